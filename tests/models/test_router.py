"""Where tokens go and with which weights, against published numbers and plain loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from jaxfound.config.model import MoeConfig
from jaxfound.models.execution import ONE_DEVICE
from jaxfound.models.layers import router
from jaxfound.models.layers.router import Router, allowed_experts, updated_bias
from tests.models.published import DATA
from tests.models.tiny import model_config

# One program for each shape, not one for each of its operations.
route = jax.jit(router.route, static_argnames="cfg")
load_stats = jax.jit(router.load_stats, static_argnames="cfg")

V3 = MoeConfig(num_experts=8, num_groups=4, top_groups=2, top_k=3, routed_scaling=2.5, expert_dim=8)
ONE_TOKEN = [2, -1, 0.5, 0.25, 1.5, 1, -2, 0]


def routed(logits, bias, cfg=V3):
    logits = jnp.asarray(logits, jnp.float32)[None]
    return jax.tree.map(lambda a: a[0], route(logits, jnp.asarray(bias, jnp.float32), cfg=cfg))


@pytest.fixture(scope="module")
def published():
    return np.load(DATA / "S04" / "cases.npz")


def test_experts_and_weights_are_the_published_routers(published):
    routing = routed(published["logits"], published["bias"])
    for ours, w, theirs, expected in zip(
        routing.experts, routing.weights, published["idx"], published["weights"], strict=True
    ):
        assert set(ours.tolist()) == set(theirs.tolist())
        aligned = [w[ours.tolist().index(i)] for i in theirs]
        np.testing.assert_allclose(aligned, expected, atol=1e-5)
    np.testing.assert_allclose(routing.weights.sum(axis=-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("bias", "experts", "weights"),
    [
        (np.zeros(8), [4, 5, 2], [0.941432, 0.841810, 0.716758]),
        # A negative bias: groups excluded by zeros instead of -inf would win here.
        (np.full(8, -1.0), [4, 5, 2], [0.941432, 0.841810, 0.716758]),
        (
            [-0.95, -0.95, -0.7, -0.7, -0.9, -0.9, -0.2, -0.2],
            [7, 2, 6],
            [1.006715, 1.253278, 0.240007],
        ),
    ],
    ids=["no bias", "all -1", "some groups"],
)
def test_excluded_groups_never_win(bias, experts, weights):
    routing = routed([ONE_TOKEN], bias)
    assert routing.experts[0].tolist() == experts
    np.testing.assert_allclose(routing.weights[0], weights, atol=1e-5)


def test_the_bias_moves_the_choice_and_never_the_mix(published):
    """Among tokens whose choice stays, no weight changes by one bit; its gradient is exactly 0."""
    logits = jnp.asarray(published["logits"])[None]
    before = route(logits, jnp.zeros(8), cfg=V3)
    after = route(logits, jnp.full(8, -3.0), cfg=V3)
    np.testing.assert_array_equal(before.experts, after.experts)
    np.testing.assert_array_equal(before.weights, after.weights)

    def mixed(bias, logits):
        routing = route(logits, bias, cfg=V3)
        return (routing.weights * jnp.arange(3.0)[None, None, :]).sum()

    by_bias, by_logits = jax.jit(jax.grad(mixed, (0, 1)))(jnp.asarray(published["bias"]), logits)
    assert not by_bias.any()
    assert by_logits.any()


def test_gradients_of_the_weights_are_those_of_finite_differences(published):
    check_grads(
        lambda logits: route(jnp.asarray(logits), jnp.asarray(published["bias"]), cfg=V3).weights,
        (jnp.asarray(published["logits"])[None],),
        order=1,
        modes=["rev"],
        atol=1e-2,
        rtol=1e-2,
    )


def test_softmax_scores_without_normalisation_are_the_probabilities():
    """DeepSeek-V2-Lite: greedy top-k, weights that do not sum to one."""
    cfg = MoeConfig(num_experts=8, top_k=3, scoring="softmax", normalize_weights=False)
    routing = routed([ONE_TOKEN], np.zeros(8), cfg)
    probabilities = np.exp(ONE_TOKEN) / np.exp(ONE_TOKEN).sum()
    assert routing.experts[0].tolist() == [0, 4, 5]
    np.testing.assert_allclose(routing.weights[0], probabilities[[0, 4, 5]], rtol=1e-6)


@pytest.mark.parametrize(
    ("score", "kept"), [("max", [0, 4]), ("top2_sum", [2, 4])], ids=["V2: best", "V3: best two"]
)
def test_a_group_is_scored_by_its_best_or_its_best_two(score, kept):
    biased = jnp.array([0.9, 0.0, 0.6, 0.5, 0.8, 0.7, 0.1, 0.1])[None, None]
    cfg = V3.model_copy(update={"group_score": score})
    allowed = np.flatnonzero(allowed_experts(biased, cfg=cfg)[0, 0])
    assert allowed.tolist() == sorted(i + j for i in kept for j in (0, 1))


def test_one_group_allows_every_expert():
    cfg = MoeConfig(num_experts=8, top_k=3)
    assert allowed_experts(jnp.zeros((1, 2, 8)), cfg=cfg).all()


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_load_is_that_of_a_plain_loop_over_real_tokens(scoring):
    rng = np.random.default_rng(1)
    cfg = V3.model_copy(update={"scoring": scoring, "balance_loss_weight": 0.01})
    logits = rng.normal(size=(3, 10, 8)).astype(np.float32)
    real = rng.random((3, 10)) < 0.7
    real[2] = False
    routing = route(jnp.asarray(logits), jnp.asarray(rng.normal(size=8), jnp.float32), cfg=cfg)
    stats = load_stats(routing, real=jnp.asarray(real), cfg=cfg)

    counts, loss = np.zeros(8, np.int64), 0.0
    for row in range(3):
        tokens = np.flatnonzero(real[row])
        chosen, share = np.zeros(8), np.zeros(8)
        for t in tokens:
            scores = np.asarray(routing.scores[row, t], np.float64)
            share += scores / scores.sum() / len(tokens)
            for expert in routing.experts[row, t].tolist():
                chosen[expert] += 1
                counts[expert] += 1
        if len(tokens):
            load = chosen * 8 / (3 * len(tokens))
            loss += 0.01 * (load * share).sum() * len(tokens)
    assert stats.expert_counts.tolist() == counts.tolist()
    np.testing.assert_allclose(stats.balance_loss, loss, rtol=1e-5)


def test_padding_changes_neither_load_nor_its_gradient():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(2, 6, 8)), jnp.float32)
    real = jnp.arange(6)[None, :] < jnp.array([4, 6])[:, None]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def balance(logits):
        stats = load_stats(route(logits, jnp.zeros(8), cfg=V3), real=real, cfg=V3)
        return stats.balance_loss, stats.expert_counts

    (loss, counts), grads = balance(logits)
    (other, others), _ = balance(logits.at[0, 4:].set(9.0))
    assert loss == other
    np.testing.assert_array_equal(counts, others)
    assert not grads[0, 4:].any()
    assert grads[0, :4].any()


def test_even_load_has_the_least_balance_loss():
    """Equal scores and equal counts: f = P·E = 1 for every expert, so the loss is its weight."""
    cfg = MoeConfig(num_experts=4, top_k=1, balance_loss_weight=0.5)
    even = 1e-3 * jnp.eye(4)[None]
    loss = load_stats(route(even, jnp.zeros(4), cfg=cfg), real=jnp.ones((1, 4), bool), cfg=cfg)
    np.testing.assert_allclose(loss.balance_loss / 4, 0.5, rtol=1e-3)
    skewed = jnp.zeros((1, 4, 4)).at[..., 2].set(5.0)
    worse = load_stats(route(skewed, jnp.zeros(4), cfg=cfg), real=jnp.ones((1, 4), bool), cfg=cfg)
    assert worse.balance_loss > 1.5 * loss.balance_loss


def test_the_bias_rises_for_idle_experts_and_falls_for_busy_ones():
    bias = jnp.array([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]])
    counts = jnp.array([[0, 4, 4, 8], [3, 3, 3, 3]])
    moved = updated_bias(bias, counts, rate=0.25)
    np.testing.assert_array_equal(moved, [[0.75, 0.5, 0.5, 0.25], [0, 0, 0, 0]])
    np.testing.assert_array_equal(updated_bias(bias, counts, rate=0.0), bias)


def test_scores_are_float32_when_the_model_computes_in_bfloat16():
    """A score rounded to bfloat16 would tie experts that differ."""
    router = Router(model_config("mla_moe_mtp"), rngs=nnx.Rngs(0), execution=ONE_DEVICE)
    routing = router(jnp.ones((1, 2, 32), jnp.bfloat16))
    assert routing.scores.dtype == routing.weights.dtype == jnp.float32
    assert router.bias[...].dtype == jnp.float32
