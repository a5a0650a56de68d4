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


def test_a_trial_gives_the_loss_that_the_rules_give(written):
    """Which products are in fp8 is an argument of the trial, and a constant of the run."""
    bench, _ = prepared(
        written, run_directory(written), step=None, min_tokens=None, devices=jax.devices()[:1]
    )
    rules = PrecisionConfig(
        compute="float32",
        rules=(
            PrecisionRule(pattern="layers.1-2.mixer.*", format="fp8"),
            PrecisionRule(pattern="layers.0.ffn.down", format="fp8"),
        ),
    )
    tried = bench.nats(bench.choice(lambda path, n: rules.format_of(path, n) == "fp8"))
    frame = Frame(written.model, execution=Execution(precision=rules))
    judge = make_judge((frame,), chunk=written.train.loss_chunk, mesh=bench.mesh)
    ran = measure(judge, (bench.arrays,), bench.rows, size=bench.size, sharding=bench.sharding)
    np.testing.assert_allclose(tried, ran.nats[0], rtol=1e-5)
    plain = bench.nats(bench.choice(lambda path, n: False))
    assert np.abs(tried - plain).max() > 1e-3


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
