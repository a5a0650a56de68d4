"""Published weights straight onto a mesh: the arrays of one device, and little host memory."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.models.weights import export_hub, load_weights, open_hub, origin_of
from jaxfound.parallelism import build_mesh, make_plan
from tests.models.published import published, read_folder, with_mtp
from tests.models.tiny import (
    model_config,
    packed_batch,
    run_config,
    weights_of,
)
from tests.parallelism.layouts import on_layout

LAYOUTS = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor4": {"tensor": 4},
    "data2 fsdp2 tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SOURCES = {
    "llama": lambda: published("S09/llama_headdim24"),
    "deepseek with mtp": with_mtp,
    "deepseek in fp8": lambda: published("S06/ds_fp8"),
}
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_a_mesh_holds_what_one_device_holds_and_gives_it_back(tmp_path, source, layout):
    hub = open_hub(source())
    num_devices = int(np.prod(list(layout.values())))
    cfg = run_config(hub.model, parallel=layout)
    plan = make_plan(cfg, num_devices, params=describe(hub.model))
    mesh = build_mesh(plan, devices=jax.devices()[:num_devices])
    places = Frame(hub.model, execution=execution_of(plan, cfg.precision)).shardings(mesh)
    spread = load_weights(hub, mesh=mesh, rules=plan.rules)
    one = load_weights(hub)
    for found, right, place in zip(spread, one, places, strict=True):
        assert found.keys() == right.keys()
        for path, array in found.items():
            assert array.sharding == place[path], path
            np.testing.assert_array_equal(np.asarray(array), np.asarray(right[path]), err_msg=path)
    export_hub(tmp_path / "out", hub.model, spread, origin=origin_of(hub.folder))
    assert read_folder(tmp_path / "out") == read_folder(source())


@pytest.mark.multidevice
def test_a_vocabulary_padded_for_tensor_parallelism_has_the_loss_of_the_published_one(tmp_path):
    """Case S08: 250 rows in the file; 250 on one device, 256 on four."""
    model = model_config("gqa", vocab_size=250, tie_embeddings=False, num_layers=1)
    export_hub(tmp_path / "hub", model, weights_of(Frame(model)))
    batch = packed_batch([[5, 3], [6]], length=8, vocab=250)
    exact = model.model_copy(update={"vocab_multiple": 1})
    wider = model.model_copy(update={"vocab_multiple": 256})
    one = on_layout(exact, {}, batch, arrays=load_weights(tmp_path / "hub", exact))
    four = on_layout(wider, {"tensor": 4}, batch, arrays=load_weights(tmp_path / "hub", wider))
    assert (exact.padded_vocab_size, wider.padded_vocab_size) == (250, 256)
    assert four.loss == pytest.approx(one.loss, abs=1e-6)


# Loads or converts a checkpoint of 110 MB in bfloat16, whose largest array (the tied embedding,
# 134 MB in float32) dwarfs what the interpreter does meanwhile; a small one first, so that
# compilers, thread pools and caches are there before the measurement begins. VmHWM is the highest
# resident size since the program began; ru_maxrss would begin at that of the program before it.
MEASURE = """
import json, sys
from pathlib import Path
from jaxfound.cli.convert import hub_to_run
from jaxfound.models.weights import load_weights, open_hub

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

what, small, large, out = sys.argv[1:]
do = {
    "load": lambda hub, out: load_weights(hub),
    "convert": lambda hub, out: hub_to_run(hub, out, allow_nan=False),
}[what]
do(open_hub(small), Path(out) / "small")
before = peak_bytes()
kept = do(open_hub(large), Path(out) / "large")
print(json.dumps(peak_bytes() - before))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    model = model_config(
        "gqa",
        vocab_size=32768,
        embed_dim=1024,
        num_heads=8,
        gqa={"num_kv_heads": 8, "head_dim": 128},
        ffn_dim=2816,
    )
    pattern = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
    shapes = {spec.path: spec.shape for spec in describe(model)}
    read = lambda path: np.resize(pattern, shapes[path])
    folder = tmp_path_factory.mktemp("large") / "hub"
    export_hub(folder, model, read, dtype="bfloat16")
    return folder


@pytest.mark.parametrize("what", ["load", "convert"])
def test_host_memory_is_the_model_and_one_array(large, tmp_path, what):
    """At most 1.2 of the largest array beside the float32 model, by the kernel's own account."""
    small = published("S07/llama_tied")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", MEASURE, what, str(small), str(large), str(tmp_path)],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    used = json.loads(ran.stdout.splitlines()[-1])
    sizes = [4 * spec.size for spec in describe(open_hub(large).model)]
    assert max(sizes) == 4 * 32768 * 1024
    # Less than the model would be a measurement of nothing.
    assert 0.9 * sum(sizes) < used < sum(sizes) + 1.2 * max(sizes)
