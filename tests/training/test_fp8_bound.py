"""The bound of a step in fp8: which kernels a layer runs, and what is added up."""

import json
from pathlib import Path

import pytest

from jaxfound.cli.main import main
from jaxfound.config.load import load
from jaxfound.training.events import TrainingError
from jaxfound.training.fp8_bound import (
    BOTH,
    GRADIENTS,
    PRODUCT,
    SQUARES,
    SWIGLU,
    bound_of,
    matrices,
    products_of,
    roundings_of,
    share_of,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "dense-7b-width.yaml"
FP8 = 'precision.rules=[{pattern: "layers.*", format: fp8}]'
NAME = "name=dense-7b-width-fp8"
TRAIN = json.loads((ROOT / "docs" / "benchmarks" / "train-h200.json").read_text("utf-8"))
BASE = TRAIN["rows"]["dense-7b-width"]
# Microseconds of a kernel that only count what was asked for.
PRODUCT_US, BOTH_US, SWIGLU_US, GRADIENTS_US, SQUARES_US = 1000.0, 100.0, 30.0, 7.0, 16.384


def fp8(*overrides):
    return load(CONFIG, [FP8, NAME, *overrides])


def record(cfg, *, without=()):
    """A kernels' record that has every kernel of a run, but for those of the backends left out."""
    times = {PRODUCT: PRODUCT_US, BOTH: BOTH_US, SWIGLU: SWIGLU_US, GRADIENTS: GRADIENTS_US}
    wanted = {k for k in (*products_of(cfg), *roundings_of(cfg)) if k.backend in times}
    rows = [(k.op, k.backend, k.sizes, times[k.backend]) for k in sorted(wanted)]
    # Another size than any of the run's.
    rows.append(("quantize", SQUARES, (4096, 4000), SQUARES_US))
    records = [
        {"op": op, "backend": backend, "rounds_us": [us, us + 1, us - 1],
         "sizes": dict(zip("MNK", sizes, strict=False))}
        for op, backend, sizes, us in rows if backend not in without
    ]  # fmt: skip
    return {"calls": [{"ceilings": {"copy_bps": 4e12}, "records": records}]}


def test_a_layer_multiplies_each_matrix_three_times():
    cfg = fp8()
    found = [kernel.sizes for kernel in products_of(cfg)]
    # Gradients of inputs are four: of three matrices in one, and of two.
    assert len(found) == 7 + 4 + 7
    assert (4 * 4096, 4096, 4096 + 2 * 1024) in found
    flops = sum(2 * m * n * k for m, n, k in found)
    tokens = 4 * 4096
    of_layers = BASE["flops"]["products"] - 2 * cfg.model.embed_dim * cfg.model.vocab_size
    assert flops * cfg.model.num_layers == 3 * tokens * of_layers
    assert (tokens, 14336, 4096) in found
    assert (4096, 1024, tokens) in found


def test_the_bound_is_what_stays_and_every_kernel_alone():
    cfg = fp8()
    found = bound_of(cfg, BASE, record(cfg))
    layers = cfg.model.num_layers
    assert found.products == pytest.approx(layers * 18 * PRODUCT_US / 1e6)
    squares = sum(i * o for i, o in matrices(cfg)) * SQUARES_US / (4096 * 4000)
    rounded = 8 * BOTH_US + SWIGLU_US + GRADIENTS_US + squares
    assert found.rounding == pytest.approx(layers * rounded / 1e6)
    # Of 272 ms 181 are the layers' products, and SwiGLU's 128 bits an element move.
    moved = layers * 16 * 16384 * 14336 / 4e12
    head = 2 * 4096 * 50304 / BASE["flops"]["products"]
    kept = BASE["ours"]["step_s"]["median"] - moved
    assert found.rest == pytest.approx(kept - BASE["breakdown"]["kinds"]["products"] * (1 - head))
    row = {"ours": {"step_s": {"median": 2 * found.step_s}}}
    assert share_of(found, row) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.remat=full"], "remat=full"),
        (["parallel.num_microbatches=2"], "2 micro-batches"),
        (['precision.rules=[{pattern: "layers.ffn.*", format: fp8}]'], "layers.mixer.key"),
        (["train.seq_len=2048"], "'seq_len': 4096"),
    ],
)
def test_another_run_is_refused(overrides, said):
    cfg = fp8(*overrides)
    with pytest.raises(TrainingError, match=said):
        bound_of(cfg, BASE, record(cfg))


def test_a_product_that_was_not_timed_is_named():
    cfg = fp8()
    with pytest.raises(TrainingError, match="fp8_wgrad 4096x1024x16384"):
        bound_of(cfg, BASE, record(cfg, without={PRODUCT}))


@pytest.mark.parametrize(
    ("backend", "timed", "moved"),
    [
        (GRADIENTS, GRADIENTS_US / 1e6, 10 * 16384 * 14336),
        # Four matrices of attention, and three of the feed-forward.
        (SQUARES, SQUARES_US / (4096 * 4000) * 218_103_808 / 1e6, 6 * 218_103_808),
    ],
)
def test_rounding_that_was_not_timed_counts_as_a_copy(backend, timed, moved):
    cfg = fp8()
    whole, found = (bound_of(cfg, BASE, record(cfg, without=w)) for w in ((), {backend}))
    assert (whole.by_bytes, found.by_bytes) == ((), (backend,))
    per_layer = (found.rounding - whole.rounding) / cfg.model.num_layers
    assert per_layer == pytest.approx(moved / 4e12 - timed)
    assert found.products == whole.products


def run(capsys, monkeypatch, *args):
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["bench", "bound", str(CONFIG), FP8, *map(str, args)])
    printed = capsys.readouterr()
    return printed.out, printed.err, left.value.code


def test_the_command_prints_the_parts_and_writes_them_to_the_row(tmp_path, capsys, monkeypatch):
    train, kernels = tmp_path / "train.json", tmp_path / "kernels.json"
    train.write_text(json.dumps(TRAIN))
    kernels.write_text(json.dumps(record(fp8())))
    files = ("--train", train, "--kernels", kernels, "--base", "dense-7b-width")
    out, _, code = run(capsys, monkeypatch, NAME, *files)
    assert code == 0
    assert "products in 8 bits" in out
    row = json.loads(train.read_text("utf-8"))["rows"]["dense-7b-width-fp8"]
    assert row["bound"]["step_s"] == pytest.approx(bound_of(fp8(), BASE, record(fp8())).step_s)
    assert run(capsys, monkeypatch, NAME, *files, "--least", "0.999")[2] == 1
    _, err, code = run(capsys, monkeypatch, "name=other", *files)
    assert code == 2
    assert "no row ['other']" in err
