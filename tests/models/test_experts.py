"""Experts computed on tiles of their own tokens equal a plain loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.models.layers.moe import TILE_ROWS, mix_experts, tile_slots

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 8, 6, 2

# What the router chose for each of 150 tokens: not a multiple of a tile's rows.
RNG = np.random.default_rng(0)
CHOSEN = {
    "all experts": RNG.permuted(np.tile(np.arange(EXPERTS), (150, 1)), axis=1)[:, :CHOICES],
    "two experts get nothing": np.tile([3, 1], (150, 1)),
    "one expert gets everything": np.full((150, CHOICES), 2),
    "one token": np.array([[1, 3]]),
    "exactly one tile each": np.tile([0, 3], (TILE_ROWS, 1)),
}


@pytest.fixture(params=CHOSEN)
def case(request):
    experts = CHOSEN[request.param]
    rng = np.random.default_rng(1)
    shapes = (
        (len(experts), WIDTH),
        (len(experts), CHOICES),
        (EXPERTS, WIDTH, HIDDEN),
        (EXPERTS, WIDTH, HIDDEN),
        (EXPERTS, HIDDEN, WIDTH),
    )
    return experts, *(rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)


def tiled(experts, x, weights, gate, up, down):
    arrays = (x[None], np.asarray(experts)[None], weights[None], gate, up, down)
    return mix_experts(*(jnp.asarray(a) for a in arrays))[0]


def dense(experts, x, weights, gate, up, down):
    """Every expert on every token, weighed by 0 where it was not chosen."""
    share = (jax.nn.one_hot(experts, EXPERTS) * weights[..., None]).sum(axis=1)
    hidden = jax.nn.silu(jnp.einsum("MD,EDF->MEF", x, gate)) * jnp.einsum("MD,EDF->MEF", x, up)
    return jnp.einsum("MEF,EFD,ME->MD", hidden, down, share)


def test_the_mix_is_that_of_a_loop_over_tokens(case):
    experts, x, weights, gate, up, down = case
    expected = np.zeros(x.shape)
    for token, choices in enumerate(experts):
        for choice, expert in enumerate(choices):
            opened = x[token].astype(np.float64) @ gate[expert]
            hidden = opened / (1 + np.exp(-opened)) * (x[token] @ up[expert])
            expected[token] += weights[token, choice] * (hidden @ down[expert])
    np.testing.assert_allclose(tiled(*case), expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_dense_form(case):
    experts, *arrays = case
    arrays = [jnp.asarray(a) for a in arrays]

    def gradients(form):
        return jax.grad(lambda *a: jnp.sin(form(experts, *a)).sum(), tuple(range(5)))(*arrays)

    # Jitted as one: 25 small programs would compile otherwise.
    ours, theirs = jax.jit(lambda: (gradients(tiled), gradients(dense)))()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    unused = [e for e in range(EXPERTS) if e not in experts]
    for matrix in ours[2:]:
        assert np.isfinite(matrix).all()
        assert not matrix[np.array(unused, int)].any(), "an expert without tokens has no gradient"


def test_a_tokens_choices_are_summed_in_their_own_order():
    """Bit for bit the same for a token, whoever else is in the batch."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, WIDTH)).astype(np.float32)
    weights = rng.random((40, CHOICES)).astype(np.float32)
    matrices = [
        rng.normal(size=s).astype(np.float32)
        for s in ((EXPERTS, WIDTH, HIDDEN),) * 2 + ((EXPERTS, HIDDEN, WIDTH),)
    ]
    chosen = CHOSEN["all experts"][:40]
    whole = tiled(chosen, x, weights, *matrices)
    order = rng.permutation(40)
    shuffled = tiled(chosen[order], x[order], weights[order], *matrices)
    np.testing.assert_array_equal(np.asarray(whole)[order], shuffled)


@settings(max_examples=40, deadline=None)
@given(experts=st.lists(st.integers(0, EXPERTS - 1), min_size=300, max_size=300))
def test_every_choice_has_a_row_of_its_own_in_a_tile_of_its_expert(experts):
    slots, expert_of_tile = tile_slots(jnp.asarray(experts, jnp.int32), num_experts=EXPERTS)
    slots, tiles = np.asarray(slots), np.asarray(expert_of_tile)
    assert len(set(slots.tolist())) == len(experts)
    assert slots.min() >= 0
    assert slots.max() < len(tiles) * TILE_ROWS
    np.testing.assert_array_equal(tiles[slots // TILE_ROWS], experts)
    for expert in set(experts):
        rows = np.sort(slots[np.array(experts) == expert])
        np.testing.assert_array_equal(rows, rows[0] + np.arange(len(rows)))
        assert rows[0] % TILE_ROWS == 0


def test_a_choice_keeps_its_place_among_those_of_its_expert():
    slots, _ = tile_slots(jnp.array([1, 0, 1, 1, 0]), num_experts=2)
    assert slots.tolist() == [TILE_ROWS, 0, TILE_ROWS + 1, TILE_ROWS + 2, 1]
