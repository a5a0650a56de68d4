"""A step run again an operation at a time: the first that goes wrong is named by its line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.cli.main import main
from jaxfound.resources.metrics import read_metrics
from jaxfound.training import TrainingError
from jaxfound.training.op_by_op import Versus, run_twice
from jaxfound.training.replay import replay
from jaxfound.training.run import run_directory
from tests.training.tiny import run, tiny

FLOAT32, SAME = Versus(in_float32=True), Versus(in_float32=False)


def twice(f, *args, versus=FLOAT32, bound=0.1):
    return run_twice(jax.make_jaxpr(f)(*args), args, versus=versus, bound=bound)


def line_of(f, offset):
    code = f.__code__
    return f"training/test_replay.py:{code.co_firstlineno + offset}"


def logs(x):
    y = x * 2
    return jnp.log(y - 4) + 1


def test_the_first_operation_that_is_not_finite_is_named_by_its_line():
    own, other, trace = twice(logs, jnp.arange(4.0))
    assert not np.isfinite(own[0]).all()
    assert not np.isfinite(other[0]).all()
    assert trace.first_bad is not None
    assert trace.first_bad.name == "log"
    assert trace.first_bad.source.startswith(line_of(logs, 2))
    assert trace.first_bad.num_bad == 3, "log of 0, and of two negative numbers"
    assert trace.first_bad_other is not None


def masked(x):
    y = jnp.where(x > 0, x, -jnp.inf)
    return jnp.exp(y - y.max()).sum()


def test_a_mask_of_infinities_is_not_taken_for_an_error():
    _, _, trace = twice(masked, jnp.arange(4.0), bound=1e-6)
    assert (trace.first_bad, trace.first_difference) == (None, None)
    # Where all are masked, infinity minus infinity is not.
    _, _, trace = twice(masked, jnp.zeros(4))
    assert trace.first_bad is not None
    assert trace.first_bad.name == "sub"


def cancels(x):
    large = x.astype(jnp.bfloat16) + 1000
    return (large - 1000).astype(jnp.float32)


def test_the_first_operation_that_loses_its_digits_is_named():
    x = jnp.linspace(0.1, 0.9, 8)
    own, other, trace = twice(cancels, x)
    assert trace.first_bad is None
    assert trace.first_difference is not None
    assert trace.first_difference.name == "sub"
    assert trace.first_difference.source.startswith(line_of(cancels, 2))
    np.testing.assert_allclose(other[0], x, atol=1e-4)
    assert float(jnp.abs(own[0] - x).max()) > 0.05


def looped(x):
    def body(total, row):
        return total + 1 / row, total * row

    return jax.lax.scan(body, jnp.zeros(()), x)


def test_loops_are_opened_and_say_how_often_they_went_well():
    _, _, trace = twice(looped, jnp.array([2.0, 4.0, 0.0, 1.0]))
    assert trace.first_bad is not None
    assert (trace.first_bad.name, trace.first_bad.occurrence) == ("div", 2)


def everything(x, n):
    """Calls, loops of three kinds, a recomputation, a custom derivative."""
    f = jax.checkpoint(lambda y: jnp.tanh(y @ y.T))
    y = f(x.astype(jnp.bfloat16)).astype(jnp.float32)
    total, rows = jax.lax.scan(lambda c, row: (c + row, jnp.sin(c)), jnp.zeros(3), y, reverse=True)
    y = rows * jax.lax.while_loop(lambda c: c < n, lambda c: c + 1, 0)
    y = jax.lax.cond(n > 2, jnp.exp, jnp.cos, y)
    return jax.nn.relu(y).sum() + total.sum()


def test_the_first_run_is_the_program_and_the_second_is_it_in_float32():
    x, n = jax.random.normal(jax.random.key(0), (3, 3)), jnp.int32(3)
    graded = jax.value_and_grad(everything)
    own, other, trace = twice(graded, x, n)
    value, grad = graded(x, n)
    # Operations one by one round as the program does, up to what the compiler fuses.
    np.testing.assert_allclose(own[0], value, rtol=1e-5)
    np.testing.assert_allclose(own[1], grad, rtol=2e-2, atol=1e-4)
    wide = jax.make_jaxpr(graded)(x, n)
    assert "bf16" in str(wide)
    assert all(each.dtype == jnp.float32 for each in other)
    assert trace.num_ops > 30

    def in_float32(x):
        y = jnp.tanh(x @ x.T)
        total, rows = jax.lax.scan(
            lambda c, row: (c + row, jnp.sin(c)), jnp.zeros(3), y, reverse=True
        )
        return jax.nn.relu(jnp.exp(3 * rows)).sum() + total.sum()

    value, grad = jax.value_and_grad(in_float32)(x)
    np.testing.assert_allclose(other[0], value, rtol=1e-5)
    np.testing.assert_allclose(other[1], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.multidevice
def test_the_same_arithmetic_on_another_device_does_not_differ():
    x = jax.random.normal(jax.random.key(0), (3, 3))
    versus = Versus(in_float32=False, device=jax.devices()[1])
    own, other, trace = twice(everything, x, jnp.int32(3), versus=versus, bound=0.0)
    assert trace.first_difference is None
    assert other[0].device == jax.devices()[1]
    np.testing.assert_array_equal(own[0], other[0])


@pytest.fixture(scope="module")
def exploded(tmp_path_factory):
    """A run whose steps are so large that soon one is not finite; the steps before it are saved."""
    cfg = tiny(
        tmp_path_factory.mktemp("exploded"),
        *("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "train.eval_batches=0"),
        *("model.num_layers=1", "precision.compute=bfloat16"),
    )
    with pytest.raises(TrainingError, match="not finite"):
        run(cfg)
    (bad,) = [r for r in read_metrics(run_directory(cfg).metrics) if r["event"] == "non_finite"]
    return cfg, bad["step"]


def test_a_step_that_was_not_finite_is_run_again_and_its_first_bad_operation_named(exploded):
    cfg, step = exploded
    found = replay(cfg, run_directory(cfg), step=step, versus=FLOAT32)
    assert (found.step, found.from_step) == (step, 0), "the state saved after it saw the next too"
    assert found.batch == f"bad_batches, step {step}"
    assert found.bad_inputs == ()
    assert found.bad_results
    assert found.trace.first_bad is not None
    assert "layers/" in found.trace.first_bad.source or "models/" in found.trace.first_bad.source


@pytest.mark.slow
def test_a_good_step_is_reached_by_running_those_before_it(exploded, capsys, monkeypatch):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    cfg, step = exploded
    folder = run_directory(cfg)
    (loss,) = [
        r["loss"]
        for r in read_metrics(folder.metrics)
        if r["event"] == "train" and r["step"] == step - 1
    ]
    words = ["--step", str(step - 1), "--precision", "same", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder.path), *words])
    assert ended.value.code == 0, "the same arithmetic beside it does not differ"
    told = json.loads(capsys.readouterr().out)
    assert (told["from_step"], told["batch"]) == (0, "the data")
    assert told["loss"] == pytest.approx(loss, rel=1e-2), "bfloat16, not fused"
    assert told["loss"] == told["other_loss"]


def test_too_many_steps_are_not_run_again_unasked(exploded):
    cfg, step = exploded
    with pytest.raises(TrainingError, match="the newest checkpoint before step 2 is none: 1 steps"):
        replay(cfg, run_directory(cfg), step=step, versus=SAME, max_steps=0)


def test_a_step_that_is_none_of_the_run_is_refused(exploded):
    cfg, _ = exploded
    with pytest.raises(TrainingError, match="step 21 is not one of the run's, 1 to 20"):
        replay(cfg, run_directory(cfg), step=21, versus=SAME)
