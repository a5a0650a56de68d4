"""Experts computed on tiles of their own tokens equal a plain loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.models.layers import expert_tiles
from jaxfound.models.layers.expert_tiles import (
    TILE_ROWS,
    inverse,
    moved,
    outputs_here,
    outputs_of_8_bit,
    outputs_of_all,
    rows_of_tiles,
    tile_product,
    touches_most,
)
from jaxfound.models.layers.moe import mix_experts
from pallas_kernels.formats import WEIGHT
from pallas_kernels.quantize import quantize, rounded

# One program for each shape, not one for each of its operations.
tiles_of = jax.jit(
    expert_tiles.tiles_of, static_argnames=("num_experts", "most_choices", "tile_rows")
)
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
    return jax.jit(mix_experts)(*(jnp.asarray(a) for a in arrays))[0]


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
    for matrix in map(np.asarray, ours[2:]):
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
@given(experts=st.lists(st.integers(0, EXPERTS), min_size=300, max_size=300))
def test_every_choice_has_a_row_of_its_own_in_a_tile_of_its_expert(experts):
    """Choices of expert number EXPERTS are made elsewhere and have no row."""
    whole = {"num_experts": EXPERTS, "most_choices": 300}
    found = tiles_of(jnp.asarray(experts, jnp.int32), **whole)
    small = tiles_of(jnp.asarray(experts, jnp.int32), **whole, tile_rows=16)
    # In smaller tiles each stands at the same place among those of its expert.
    places = np.asarray(small.slot_of_choice)[np.array(experts) < EXPERTS]
    np.testing.assert_array_equal(
        np.asarray(small.expert_of_tile)[places // 16],
        np.array(experts)[np.array(experts) < EXPERTS],
    )
    experts, tiles = np.array(experts), np.asarray(found.expert_of_tile)
    everyone, here = np.asarray(found.slot_of_choice), experts < EXPERTS
    slots = everyone[here]
    assert (everyone[~here] == found.num_slots).all()
    assert len(set(slots.tolist())) == here.sum()
    assert slots.min(initial=0) >= 0
    assert slots.max(initial=0) < found.num_slots == len(tiles) * TILE_ROWS
    np.testing.assert_array_equal(tiles[slots // TILE_ROWS], experts[here])
    np.testing.assert_array_equal(np.asarray(found.choice_of_slot)[slots], np.flatnonzero(here))
    assert (np.asarray(found.choice_of_slot) < 300).sum() == here.sum()
    for expert in set(experts[here].tolist()):
        rows = np.sort(everyone[experts == expert])
        np.testing.assert_array_equal(rows, rows[0] + np.arange(len(rows)))
        assert rows[0] % TILE_ROWS == 0


@pytest.mark.parametrize(
    ("num_choices", "rows"), [(0, 16), (64, 16), (6 * 129, 32), (6 * 512, 128), (10**6, 128)]
)
def test_tiles_have_twice_the_rows_of_an_average_expert(num_choices, rows):
    assert rows_of_tiles(num_choices, num_experts=64) == rows


def test_a_choice_keeps_its_place_among_those_of_its_expert():
    found = tiles_of(jnp.array([1, 0, 1, 1, 0]), num_experts=2, most_choices=5)
    assert found.slot_of_choice.tolist() == [TILE_ROWS, 0, TILE_ROWS + 1, TILE_ROWS + 2, 1]


def test_places_found_by_a_sort_are_those_found_by_comparing(monkeypatch):
    experts = jnp.asarray(np.random.default_rng(0).integers(0, EXPERTS + 1, 300), jnp.int32)
    compared = expert_tiles.ranks_and_counts(experts, num_experts=EXPERTS)
    monkeypatch.setattr(expert_tiles, "MOST_COMPARED", 0)
    by_sort = expert_tiles.ranks_and_counts(experts, num_experts=EXPERTS)
    for found, expected in zip(compared, by_sort, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("experts", "used"), [([2] * 300, 3), ([0, 1, 3], 3), ([EXPERTS] * 3, 0), ([1] * 128, 1)]
)
def test_tiles_are_in_use_for_the_rows_there_are(experts, used):
    found = tiles_of(jnp.asarray(experts), num_experts=EXPERTS, most_choices=len(experts))
    assert int(found.rows_of_expert.sum()) == used * TILE_ROWS
    assert used <= len(found.expert_of_tile)


def test_rows_behind_the_last_tile_in_use_are_never_read():
    """NaN there reaches neither a product nor a gradient."""
    experts = jnp.array([1, 1, EXPERTS])
    tiles = tiles_of(experts, num_experts=EXPERTS, most_choices=3)
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(tiles.num_slots, WIDTH)).astype(np.float32)
    kernels = rng.normal(size=(EXPERTS, WIDTH, HIDDEN)).astype(np.float32)
    used = TILE_ROWS
    rows[used:] = np.nan

    def product(rows, kernels):
        return tile_product(rows, kernels, tiles)[:used].sum()

    out, grads = jax.jit(jax.value_and_grad(product, (0, 1)))(rows, kernels)
    assert out == pytest.approx((rows[:used] @ kernels[1]).sum(), rel=1e-4)
    assert np.isfinite(grads[0]).all()
    assert np.isfinite(grads[1]).all()
    assert not np.asarray(grads[1])[[0, 2, 3]].any()


def test_the_gradient_of_moved_rows_is_that_of_a_copy():
    """Row 0 goes to two places, row 1 nowhere, row 2 to one; place 1 is left empty."""
    rows = jnp.arange(6.0).reshape(3, 2)
    sources, places = jnp.array([0, 3, 2, 0]), jnp.array([[3, 0], [4, 4], [2, 4]])
    there, back = jax.vjp(lambda rows: moved(rows, sources, places), rows)
    np.testing.assert_array_equal(there, [[0, 1], [0, 0], [4, 5], [0, 1]])
    (grads,) = back(jnp.array([[1.0, 2.0], [50.0, 50.0], [3.0, 4.0], [10.0, 20.0]]))
    np.testing.assert_array_equal(grads, [[11, 22], [0, 0], [3, 4]])


def test_the_inverse_says_who_stands_where():
    assert inverse(jnp.array([2, 5, 0, 7]), size=4).tolist() == [2, 4, 0, 4]


@pytest.mark.parametrize("num_rows", [1, 4, 9])
def test_multiplying_all_experts_gives_what_each_rows_own_give(num_rows):
    rng = np.random.default_rng(num_rows)
    rows = jnp.asarray(rng.normal(size=(num_rows, 16)), jnp.float32)
    experts = jnp.asarray([rng.permutation(8)[:3] for _ in range(num_rows)], jnp.int32)
    shapes = ((8, 16, 24), (8, 16, 24), (8, 24, 16))
    kernels = tuple(jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32) for shape in shapes)
    found, expected = (f(rows, experts, kernels) for f in (outputs_of_all, outputs_here))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_all_experts_are_multiplied_where_few_rows_touch_most_of_them():
    """DeepSeek-V2-Lite's 6 of 64: 10 rows touch 63 % of the experts."""
    chosen = [rows for rows in range(1, 200) if touches_most(rows, 6, num_experts=64)]
    assert chosen == list(range(10, 129))


@pytest.mark.parametrize("num_rows", [5, 129, 250])
def test_experts_kept_in_8_bits_are_those_of_their_rounded_matrices(num_rows, monkeypatch):
    """Few rows, and many in tiles: by the way of kernels too, on what XLA makes of it."""
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, WIDTH, HIDDEN),) * 2 + ((EXPERTS, HIDDEN, WIDTH),)
    kernels = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    kept = tuple(quantize(kernel, format=WEIGHT).mT for kernel in kernels)
    rows = jnp.asarray(rng.normal(size=(num_rows, WIDTH)), jnp.float32)
    # One expert gets nothing.
    chosen = jnp.asarray(rng.permuted(np.tile([0, 1, 3], (num_rows, 1)), axis=1)[:, :CHOICES])
    widened = tuple(rounded(kernel, format=WEIGHT) for kernel in kernels)
    expected = jax.jit(outputs_here)(rows, chosen, widened)
    np.testing.assert_allclose(
        jax.jit(outputs_of_8_bit)(rows, chosen, kept), expected, rtol=1e-5, atol=1e-5
    )
    monkeypatch.setattr(expert_tiles, "has_kernel", lambda *_, **__: True)
    by_tiles = jax.jit(lambda *operands: outputs_of_8_bit(*operands))(rows, chosen, kept)
    np.testing.assert_allclose(by_tiles, expected, rtol=1e-5, atol=1e-5)
