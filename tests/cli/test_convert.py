"""`jaxfound convert` on real folders: there and back, what it refuses, what it leaves behind."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.cli.main import main
from jaxfound.config import load
from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.serving.generate import load_generator
from jaxfound.training.run import run_directory
from tests.models.published import (
    DATA,
    published,
    read_config,
    read_folder,
    read_logits,
    tensor,
    with_mtp,
    with_redundant_head,
    write_folder,
)
from tests.models.tiny import forward, weights_of
from tests.training.tiny import tiny
from tests.training.written import STEP, save_run


@pytest.fixture
def convert(monkeypatch, capsys):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*args):
        """The exit code, and what was printed."""
        with pytest.raises(SystemExit) as left:
            main(["convert", *map(str, args)])
        printed = capsys.readouterr()
        return left.value.code, printed.out + printed.err

    return run


SOURCES = {
    "deepseek with mtp": with_mtp,
    "deepseek in fp8": lambda: published("S06/ds_fp8"),
    "llama": lambda: published("S09/llama_headdim24"),
    "deepseek-v2 in bfloat16": lambda: published("transformers/deepseek_v2"),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_a_run_and_back_is_what_it_was(convert, tmp_path, source):
    code, said = convert(source(), tmp_path / "run")
    assert code == 0, said
    # None of these folders has a tokenizer.
    assert f"{source()} has no tokenizer.json: the run's is byte" in said
    assert f"next: jaxfound generate {tmp_path / 'run'} PROMPT --tokenizer FILE" in said
    code, said = convert(tmp_path / "run", tmp_path / "back")
    assert code == 0, said
    assert read_folder(tmp_path / "back") == read_folder(source())
    before, after = (json.loads((f / "config.json").read_text())
                     for f in (source(), tmp_path / "back"))  # fmt: skip
    added = {"head_dim", "rope_interleave", "dtype", "torch_dtype", "rope_theta",
             "rope_parameters", "rope_scaling"}  # fmt: skip
    written_only_by = {"transformers_version", "qk_head_dim", "moe_layer_freq", "scoring_func"}
    for key in before.keys() - added - written_only_by:
        assert after[key] == before[key], key


WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {
        "type": "WordLevel",
        "vocab": {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 250)}},
        "unk_token": "<s>",
    },
}


def test_a_converted_run_is_read_as_trained_ones_are(convert, tmp_path):
    """Its tokenizer comes along, and its logits are the published ones."""
    hub = tmp_path / "hub"
    write_folder(hub, read_config("S09/llama_base"), read_folder(published("S09/llama_base")))
    (hub / "tokenizer.json").write_text(json.dumps(WORDS))
    code, said = convert(hub, tmp_path / "run")
    assert (code, "byte" in said, "--tokenizer" in said) == (0, False, False)
    cfg = load(tmp_path / "run" / "config.yaml")
    assert (cfg.name, cfg.precision.compute, cfg.data.tokenizer) == (
        "run",
        "float32",
        str(tmp_path / "run" / "hub" / "tokenizer.json"),
    )
    generator = load_generator(tmp_path / "run")
    assert (generator.step, generator.tokenizer.vocab_size) == (0, 250)
    sequence = json.loads((DATA / "S09/llama_base/tokens.json").read_text())[1]
    expected = read_logits(DATA / "S09/llama_base/logits_1.npy.xz")
    model = generator.frame.bind(*generator.arrays)
    logits = forward(model, jnp.asarray([sequence], jnp.int32))
    np.testing.assert_allclose(logits[0], expected, rtol=1e-3, atol=1e-3)
    assert convert(tmp_path / "run", tmp_path / "back")[0] == 0
    assert json.loads((tmp_path / "back" / "tokenizer.json").read_text()) == WORDS


def test_what_is_repeated_or_left_is_told(convert, tmp_path):
    _, said = convert(with_redundant_head(), tmp_path / "tied")
    assert "lm_head.weight repeats model.embed_tokens.weight" in said
    code, said = convert(with_mtp(), tmp_path / "main", "--mtp", "drop")
    assert code == 0
    assert said.count("multi-token prediction") == 44
    assert load(tmp_path / "main" / "config.yaml").model.mtp_depth == 0


def test_a_trained_run_goes_out_and_comes_in_with_the_same_numbers(convert, tmp_path):
    """Of a checkpoint that holds an optimizer's state as well."""
    cfg = tiny(tmp_path)
    arrays = weights_of(Frame(cfg.model))
    run = save_run(cfg, arrays)
    with CheckpointManager(run_directory(cfg).checkpoints, keep=0, mode="sync") as checkpoints:
        checkpoints.save(STEP + 1, {**arrays._asdict(), "optimizer": {"mu": jnp.ones(7)}}, {})
    assert convert(run, tmp_path / "hub")[0] == 0
    assert convert(tmp_path / "hub", tmp_path / "again")[0] == 0
    assert convert(tmp_path / "again", tmp_path / "hub2", "--dtype", "float32")[0] == 0
    assert read_folder(tmp_path / "hub2") == read_folder(tmp_path / "hub")
    code, said = convert(run, tmp_path / "old", "--step", "7")
    assert (code, "no committed step 7" in said) == (2, True)


@pytest.mark.multidevice
def test_a_run_saved_on_a_mesh_goes_out_as_one_saved_on_a_device(convert, tmp_path):
    """Its arrays lie on disk in as many pieces as there were devices."""
    cfg = tiny(tmp_path, "parallel.fsdp=8", "name=spread")
    frame = Frame(cfg.model)
    arrays = weights_of(frame)
    mesh = build_mesh(make_plan(cfg, 8, params=describe(cfg.model)))
    spread = save_run(cfg, jax.device_put(arrays, frame.shardings(mesh)))
    alone = save_run(tiny(tmp_path, "name=alone"), arrays)
    assert convert(spread, tmp_path / "of-mesh")[0] == 0
    assert convert(alone, tmp_path / "of-device")[0] == 0
    assert read_folder(tmp_path / "of-mesh") == read_folder(tmp_path / "of-device")


def test_published_to_published_changes_the_format_alone(convert, tmp_path):
    code, said = convert(published("S06/ds_fp8"), tmp_path / "out", "--to", "hub",
                         "--dtype", "bfloat16")  # fmt: skip
    assert code == 0, said
    written = read_folder(tmp_path / "out")
    assert {t.dtype for n, t in written.items() if not n.endswith("bias")} == {"BF16"}
    assert not any(name.endswith("_scale_inv") for name in written)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def spoilt(tmp_path):
    tensors = read_folder(published("S09/llama_base"))
    norm = tensors["model.norm.weight"].array.copy()
    norm[2] = np.nan
    tensors["model.norm.weight"] = tensor(norm)
    return write_folder(tmp_path / "spoilt", read_config("S09/llama_base"), tensors)


def unknown_rope(tmp_path):
    config = read_config("S09/llama_base") | {"rope_scaling": {"type": "longrope", "factor": 4.0}}
    return write_folder(tmp_path / "rope", config, read_folder(published("S09/llama_base")))


def cut(tmp_path):
    folder = write_folder(
        tmp_path / "cut", read_config("S09/llama_base"), read_folder(published("S09/llama_base"))
    )
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def whole(tmp_path):
    return published("S07/llama_tied")


REFUSED = {
    "NaN": (spoilt, (), "model.norm.weight: 1 of its elements"),
    "NaN on the way to another format": (spoilt, ("--to", "hub"), "model.norm.weight: 1 of its"),
    "unknown rope": (unknown_rope, (), "'longrope' is not supported"),
    "truncated": (cut, (), "is truncated"),
    "nothing there": (lambda tmp_path: tmp_path / "nowhere", (), "nowhere is not a folder"),
    "format of a run": (whole, ("--dtype", "bfloat16"), "--dtype=bfloat16 is for --to hub"),
    "unknown format": (whole, ("--to", "hub", "--dtype", "int4"), "--dtype takes stored"),
    "unknown word for mtp": (whole, ("--mtp", "keep"), "--mtp takes use or drop"),
    "step of a folder": (whole, ("--step", "3"), "--step is for a run"),
}


@pytest.mark.parametrize(("source", "args", "says"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_converted_is_one_error_and_nothing_is_written(
    convert, tmp_path, source, args, says
):
    code, said = convert(source(tmp_path), tmp_path / "out", *args)
    assert (code, said.startswith("error: ")) == (2, True), said
    assert says in said
    assert not [p.name for p in tmp_path.iterdir() if "out" in p.name]


def test_nan_is_taken_when_asked(convert, tmp_path):
    assert convert(spoilt(tmp_path), tmp_path / "out", "--to", "hub", "--allow-nan")[0] == 0
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "spoilt")


def test_a_folder_that_is_there_is_refused_before_anything_is_read(convert, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    code, said = convert(published("S07/llama_tied"), tmp_path / "out")
    assert (code, "out is there already" in said) == (2, True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
