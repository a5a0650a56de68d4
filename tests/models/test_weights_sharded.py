"""Published weights straight onto a mesh: the arrays of one device, and little host memory."""

import json
import math
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
from jaxfound.training.objective import terms_of, token_counts
from jaxfound.training.step import batch_sharding
from tests.models.published import published, read_folder, with_mtp
from tests.models.tiny import jit, model_config, packed_batch, run_config, weights_of

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


def laid_out(cfg, layout):
    """The plan and the mesh of a config on as many devices as the layout takes."""
    num_devices = math.prod(layout.values())
    plan = make_plan(cfg, num_devices, params=describe(cfg.model))
    return plan, build_mesh(plan, devices=jax.devices()[:num_devices])


# Every source cut every way at once, and one source on each mesh.
PAIRS = [
    *(pytest.param(SOURCES[s], LAYOUTS["data2 fsdp2 tensor2"], id=s) for s in SOURCES),
    *(pytest.param(SOURCES["deepseek with mtp"], LAYOUTS[n], id=n) for n in list(LAYOUTS)[:-1]),
]


@pytest.mark.multidevice
@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_a_mesh_holds_what_one_device_holds_and_gives_it_back(tmp_path, source, layout):
    hub = open_hub(source())
    cfg = run_config(hub.model, parallel=layout)
    plan, mesh = laid_out(cfg, layout)
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


def loss_on(layout, model, batch, folder):
    """Nats a token of a published folder's weights, loaded as `model` onto a mesh."""
    rows, length = batch.tokens.shape
    cfg = run_config(model, rows=rows, length=length, parallel=layout)
    plan, mesh = laid_out(cfg, layout)
    frame = Frame(model, execution=execution_of(plan, cfg.precision))
    arrays = load_weights(folder, model, mesh=mesh, rules=plan.rules)
    placed = jax.device_put(batch, batch_sharding(frame, mesh))

    @jit
    def loss(params, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            terms = terms_of(frame.bind(params, arrays.buffers), batch, cfg=cfg)
            return terms.nats / token_counts(batch, num_depths=0).targets

    return float(loss(arrays.params, placed))


@pytest.mark.multidevice
def test_a_vocabulary_padded_for_tensor_parallelism_has_the_loss_of_the_published_one(tmp_path):
    """Case S08: 250 rows in the file; 250 on one device, 256 on four."""
    model = model_config("gqa", vocab_size=250, tie_embeddings=False, num_layers=1)
    export_hub(tmp_path / "hub", model, weights_of(Frame(model)))
    batch = packed_batch([[5, 3], [6]], length=8, vocab=250)
    exact = model.model_copy(update={"vocab_multiple": 1})
    wider = model.model_copy(update={"vocab_multiple": 256})
    assert (exact.padded_vocab_size, wider.padded_vocab_size) == (250, 256)
    one = loss_on({}, exact, batch, tmp_path / "hub")
    assert loss_on({"tensor": 4}, wider, batch, tmp_path / "hub") == pytest.approx(one, abs=1e-6)


# Brings a checkpoint of 157 MB in bfloat16, whose largest array (the tied embedding, 268 MB in
# float32) dwarfs what the interpreter does meanwhile, through every conversion; a small one first,
# so that compilers, thread pools and caches are there before the measurement begins. VmHWM is the
# highest resident size since a 5 was last written to clear_refs.
MEASURE = """
import ctypes, gc, json, sys
from pathlib import Path
from jaxfound.cli.convert import hub_to_hub, hub_to_run, run_to_hub
from jaxfound.models.weights import load_weights, open_hub

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

small, large, out = map(Path, sys.argv[1:])
WAYS = {
    "to a run": lambda hub, size: hub_to_run(open_hub(hub), out / size, allow_nan=False),
    "back": lambda hub, size: run_to_hub(out / size, out / f"{size}-back", dtype="bfloat16",
                                         step=None, gb=5.0),
    "to another format": lambda hub, size: hub_to_hub(open_hub(hub), out / f"{size}-float32",
                                                      dtype="float32", gb=5.0, allow_nan=False),
    "to a model": lambda hub, size: load_weights(open_hub(hub)),
}
used = {}
for name, way in WAYS.items():
    way(small, "small")
    gc.collect()
    # What was freed and is still counted would hide as much of what comes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = way(large, "large")
    used[name] = status("VmHWM") - before
    del kept
print(json.dumps(used))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A published folder, and the bytes of its arrays in float32."""
    model = model_config(
        "gqa",
        vocab_size=65536,
        embed_dim=1024,
        num_heads=8,
        gqa={"num_kv_heads": 8, "head_dim": 128},
        ffn_dim=512,
    )
    pattern = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
    shapes = {spec.path: spec.shape for spec in describe(model)}
    read = lambda path: np.resize(pattern, shapes[path])
    folder = tmp_path_factory.mktemp("large") / "hub"
    export_hub(folder, model, read, dtype="bfloat16")
    return folder, [4 * spec.size for spec in describe(open_hub(folder).model)]


@pytest.mark.slow
def test_host_memory_is_what_the_target_needs_and_a_fifth_more_than_one_array(large, tmp_path):
    """By the kernel's own account; a run and a model need the float32 weights, a folder nothing."""
    folder, sizes = large
    small = published("S07/llama_tied")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", MEASURE, small, folder, tmp_path],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    used = json.loads(ran.stdout.splitlines()[-1])
    weights, largest = sum(sizes), max(sizes)
    assert largest == 4 * 65536 * 1024
    # Less than the target itself would be a measurement of nothing.
    assert 0.9 * weights < used["to a run"] < weights + 1.2 * largest
    assert 0.9 * weights < used["to a model"] < weights + 1.2 * largest
    assert 0.9 * largest < used["back"] < 1.2 * largest
    # A folder from a folder: some rows at a time.
    assert 0 < used["to another format"] < 0.3 * largest
