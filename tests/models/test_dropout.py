"""Dropout: its rate, its scale, and masks that depend on what is dropped and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.models.layers.dropout import PLACES, Noise, drop, kept
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.axes import TABLE_RULES
from jaxfound.training.evaluate import make_evaluate
from jaxfound.training.objective import noise_of, token_counts
from jaxfound.training.state import TrainState
from jaxfound.training.step import gradients
from tests.models.tiny import model_config, relative_error, run_config, weights_of
from tests.parallelism.layouts import LENGTH, ROWS, documents, on_layout

RATE = 0.1
KEY = jnp.array([7, 11], jnp.uint32)


def mask(key=KEY, rows=8, length=16, channels=64, *, layer=3, place="ffn", places=None, first=0):
    noise = Noise(key, first + jnp.arange(rows), places).of_layer(layer)
    return np.asarray(kept(noise, (length, channels), place=place, rate=RATE))


def test_a_channel_is_dropped_at_the_rate_and_the_mean_stays():
    x = jnp.ones((16, 64, 128))
    y = np.asarray(drop(x, Noise(KEY, jnp.arange(16)), place="mixer", rate=RATE, rules=TABLE_RULES))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - RATE))}
    # Five deviations of a binomial distribution.
    few = 5 * np.sqrt(RATE * (1 - RATE) / x.size)
    assert (y == 0).mean() == pytest.approx(RATE, abs=few)
    assert y.mean() == pytest.approx(1, abs=few / (1 - RATE))
    # No row, place or channel is dropped more than others: the worst of 128 within five deviations.
    for dims in ((1, 2), (0, 2), (0, 1)):
        shares = (y == 0).mean(axis=dims)
        size = x.size / len(shares)
        assert np.abs(shares - RATE).max() < 5 * np.sqrt(RATE * (1 - RATE) / size)


def test_what_is_kept_is_scaled_in_float32_and_rounded_once():
    x = jnp.full((1, 4, 256), 3.0, jnp.bfloat16)
    y = drop(x, Noise(KEY, jnp.arange(1)), place="mixer", rate=RATE, rules=TABLE_RULES)
    assert y.dtype == jnp.bfloat16
    assert set(np.unique(y.astype(np.float32))) == {0.0, float(jnp.bfloat16(3.0 / 0.9))}


def test_a_mask_is_that_of_its_rows_and_places_wherever_they_are():
    whole = mask()
    np.testing.assert_array_equal(mask(rows=3, first=4), whole[4:7])
    places = jnp.array([12, 2, 9])
    np.testing.assert_array_equal(mask(length=3, places=places), whole[:, places])


OTHERS = {
    "the run or the step": {"key": jnp.array([7, 12], jnp.uint32)},
    "the layer": {"layer": 4},
    "what of the layer": {"place": "mixer"},
    "the rows": {"first": 8},
    "the places": {"places": 16 + jnp.arange(16)},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS.keys())
def test_masks_that_differ_in_one_counter_have_nothing_to_do_with_each_other(changed):
    # Two masks that are independent agree in 0.9² + 0.1² of the channels.
    agreeing = (mask() == mask(**changed)).mean()
    assert agreeing == pytest.approx(0.82, abs=5 * np.sqrt(0.82 * 0.18 / mask().size))


def test_every_step_of_a_run_has_masks_of_its_own():
    first, second = (noise_of(KEY, jnp.int32(step), documents()) for step in (0, 1))
    np.testing.assert_array_equal(first.rows, np.arange(ROWS))
    assert not np.array_equal(first.key, second.key)
    assert (PLACES.index("embedding"), first.places) == (0, None)


def program(rate):
    """The program of a step's gradients, as text; with and without micro-batches it is traced."""
    model = model_config("mla_moe_mtp", dropout=rate)
    cfg = run_config(model, rows=ROWS, length=LENGTH, parallel={"num_microbatches": 2})
    frame = Frame(model)
    params, buffers = frame.shapes()
    rng = jax.ShapeDtypeStruct((2,), jnp.uint32)
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, buffers, (), rng)

    def step(state, batch):
        counts = token_counts(batch, num_depths=model.mtp_depth)
        return gradients(state, batch, frame=frame, cfg=cfg, counts=counts)

    return str(jax.make_jaxpr(step)(state, documents()))


def test_without_dropout_a_step_draws_nothing():
    assert "random_bits" in program(RATE)
    without = program(0.0)
    assert not [word for word in ("random_", "threefry", "key<") if word in without]


def test_micro_batches_and_recomputation_have_the_masks_of_the_whole_batch():
    model = model_config("gqa", dropout=RATE)
    one = on_layout(model, {}, documents())
    pieces = on_layout(model, {"num_microbatches": 4, "remat": "full"}, documents())
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in pieces.grads.items()}
    assert {path: e for path, e in errors.items() if e > 1e-5} == {}
    # And dropout does something.
    without = on_layout(model_config("gqa"), {}, documents())
    assert abs(without.loss - one.loss) > 1e-3


def test_evaluation_and_a_model_that_is_called_drop_nothing():
    losses = []
    for rate in (0.0, 0.5):
        cfg = run_config(model_config("gqa", dropout=rate), rows=ROWS, length=LENGTH)
        plan = make_plan(cfg, 1, params=describe(cfg.model))
        mesh = build_mesh(plan, devices=jax.devices()[:1])
        frame = Frame(cfg.model)
        arrays = weights_of(frame)
        state = TrainState(jnp.int32(0), *arrays, (), KEY)
        evaluated = make_evaluate(cfg, frame, mesh=mesh)(state, [documents()])
        assert frame.bind(*arrays).row(jnp.asarray(documents().tokens), None, None).noise is None
        losses.append(evaluated.loss)
    assert losses[0] == losses[1]
