"""Trials of formats give what rules give, and operands are counted right."""

import jax
import numpy as np
import pytest

from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.schema import ConfigError
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.training.compare import make_judge, measure
from jaxfound.training.operand_numbers import FIRST_EXPONENT, numbers_of, sums_of
from jaxfound.training.precision import examine
from jaxfound.training.precision_bench import prepared
from jaxfound.training.run import run_directory
from pallas_kernels.formats import ACTIVATION, WEIGHT
from tests.models.tiny import weights_of
from tests.training.tiny import MOE, tiny
from tests.training.written import config, save_run, weights, write_texts, written_by


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The config of a run, and documents that its weights would write."""
    folder = tmp_path_factory.mktemp("precision")
    cfg = config(folder, "model.num_layers=3")
    frame = Frame(cfg.model)
    arrays = weights(frame)
    source = write_texts(folder / "written.jsonl", written_by(frame, arrays))
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"source": str(source)})})
    save_run(cfg, arrays)
    return cfg


def tried_and_ran(cfg, *rules):
    """The loss of each piece in a trial, in a run with these rules, and in a trial of none."""
    there = run_directory(cfg)
    bench, _ = prepared(cfg, there, step=None, min_tokens=None, devices=jax.devices()[:1])
    policy = PrecisionConfig(
        compute="float32",
        rules=tuple(PrecisionRule(pattern=pattern, format="fp8") for pattern in rules),
    )
    tried = bench.nats(bench.choice(lambda path, n: policy.format_of(path, n) == "fp8"))
    frame = Frame(cfg.model, execution=Execution(precision=policy))
    judge = make_judge((frame,), chunk=cfg.train.loss_chunk, mesh=bench.mesh)
    ran = measure(judge, (bench.arrays,), bench.rows, size=bench.size, sharding=bench.sharding)
    return tried, ran.nats[0], bench.nats(bench.choice(lambda path, n: False))


def test_a_trial_gives_the_loss_that_the_rules_give(written):
    """Which products are in fp8 is an argument of the trial, and a constant of the run."""
    tried, ran, plain = tried_and_ran(written, "layers.1-2.mixer.*", "layers.0.ffn.down")
    np.testing.assert_allclose(tried, ran, rtol=1e-5)
    assert np.abs(tried - plain).max() > 1e-3


@pytest.mark.slow
def test_experts_are_tried_a_layer_at_a_time(written, tmp_path):
    cfg = tiny(tmp_path, "model.num_layers=3", "train.loss_chunk=5", model={**MOE, "mtp_depth": 0})
    cfg = cfg.model_copy(update={"data": written.data})
    save_run(cfg, weights_of(Frame(cfg.model)))
    # Layer 0 is dense.
    tried, ran, plain = tried_and_ran(cfg, "layers.2.ffn.experts")
    np.testing.assert_allclose(tried, ran, rtol=1e-5)
    assert np.abs(tried - plain).max() > 1e-4


def test_layers_are_not_named_for_a_pipeline(written):
    parallel = written.parallel.model_copy(update={"pipeline": 2})
    cfg = written.model_copy(update={"parallel": parallel})
    with pytest.raises(ConfigError, match="pipeline=2: rules cannot name layers"):
        examine(cfg, run_directory(cfg), max_drop=0.05)


def test_the_counts_of_a_matrix_are_numpys():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 300)).astype(np.float32)
    x[0, :128] = 0.0
    x[1, 130] = 2.0**14
    x[2, 299] = np.inf
    sums = sums_of(jax.numpy.asarray(x), ACTIVATION)
    # Of 3 x 3 blocks one is zeros; beside 2^14 less than 2^14 / 448 / 2^10 is nothing.
    assert sums.blocks.sum() == 8
    assert sums.blocks[14 - FIRST_EXPONENT] == 1
    beside = np.abs(np.delete(x[1, 128:256], 2))
    assert sums.underflows == (beside < 2.0**14 / 448 / 2**10).sum() > 0
    assert (sums.not_finite, sums.nonzero, sums.elements) == (1, 900 - 128 - 1, 900)
    assert sums.channels[130] == 2.0**14
    assert sums.channels[299] == np.abs(x[:2, 299]).max()
    square = sums_of(jax.numpy.asarray(x), WEIGHT)
    assert square.blocks.sum() == 3
    stacked = jax.tree.map(lambda a: a[None], sums)
    (numbers,) = numbers_of(stacked, path="layers.a", layers=[5], operand="input")
    assert (numbers.layer, numbers.largest, numbers.outlier) == (5, 2.0**14, 130)
    assert numbers.outlier_channels == 1
