"""MLA decode over the packed cache on the card: a grid of sizes, NaN bytes, batch invariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.mla_decode import mla_decode, unpack
from tests.pallas_kernels.test_fp8_on_gpu import poison_memory
from tests.pallas_kernels.test_mla_packed import (
    NAN_BYTE,
    OPTIONS,
    check_every_byte,
    make_packed,
    one_token_of_every_byte,
)

pytestmark = pytest.mark.gpu


def lengths_of(batch, largest):
    rng = np.random.default_rng([batch, largest])
    lengths = rng.integers(0, largest + 1, batch)
    lengths[-1] = largest
    return [int(n) for n in lengths]


def run(batch, *, split_len=4096):
    return jax.jit(
        lambda b: mla_decode(**b, **OPTIONS, split_len=split_len, backend="mosaic_gpu_packed")
    )(batch)


def reference(batch, dtype=jnp.bfloat16):
    """Attention over the latents as the kernel may see them: rounded once."""
    rounded = {**batch, "cache": unpack(batch["cache"]).astype(dtype)}
    with hardware.target("cpu"):
        return jax.jit(lambda b: mla_decode(**b, **OPTIONS, backend="xla"))(rounded)


def check_out(found, expected):
    as64 = lambda t: np.asarray(t.astype(jnp.float32), np.float64)
    measured = difference(as64(found.out), as64(expected.out))
    assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured


def check(batch, split_len):
    poison_memory()
    found, expected = run(batch, split_len=split_len), reference(batch)
    check_out(found, expected)
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_queries"), [(1, 1), (3, 4), (16, 1), (63, 2), (64, 1), (126, 1), (128, 2)]
)
def test_every_number_of_heads_and_queries_is_right(num_heads, num_queries):
    check(make_packed(lengths_of(6, 300), num_heads, num_queries=num_queries), 128)


@pytest.mark.parametrize("largest", [20, 140, 4096])
@pytest.mark.parametrize(("batch_size", "split_len"), [(1, None), (2, 1024), (16, 1024)])
def test_ragged_lengths_are_right_whole_and_in_parts(batch_size, largest, split_len):
    check(make_packed(lengths_of(batch_size, largest), 128), split_len)


def test_scales_of_any_value_are_multiplied_before_the_rounding():
    """A scale is two bfloat16 numbers, so 0.2 % of the latents round the other way.

    That shifts log sums by a third of what rounding the latents does; scales that are rounded
    before they multiply would shift them by one and a half times that.
    """
    batch = make_packed([700, 64, 1], 64, odd_scales=True)
    poison_memory()
    found, rounded, exact = run(batch), reference(batch), reference(batch, jnp.float32)
    check_out(found, rounded)
    of_kernel, of_rounding = found.lse - rounded.lse, exact.lse - rounded.lse
    assert jnp.linalg.norm(of_kernel) < 0.5 * jnp.linalg.norm(of_rounding)


@pytest.mark.parametrize("odd_scales", [False, True])
def test_every_number_of_eight_bits_comes_through(odd_scales):
    """On the card bits are moved and multiplied; on the CPU they are converted."""
    batch, held = one_token_of_every_byte(odd_scales)
    check_every_byte(run(batch), held, odd_scales)


def test_a_row_is_the_same_bit_for_bit_alone_in_a_batch_and_again():
    batch = make_packed(lengths_of(9, 2500), 128)
    together, again = run(batch, split_len=1024), run(batch, split_len=1024)
    assert jnp.array_equal(together.out, again.out)
    for row in range(9):
        one = {name: array[row : row + 1] for name, array in batch.items() if name != "cache"}
        alone = run({**one, "cache": batch["cache"]}, split_len=1024)
        assert jnp.array_equal(alone.out[0], together.out[row])
        assert jnp.array_equal(alone.lse[0], together.lse[row])


def test_the_order_of_pages_changes_nothing():
    batch = make_packed([700, 64, 1], 16)
    order = jax.random.permutation(jax.random.key(0), len(batch["cache"]))
    place = jnp.argsort(order)
    table = batch["block_table"]
    known = table < len(order)
    moved = {
        **batch,
        "cache": batch["cache"][order],
        "block_table": jnp.where(known, place[jnp.where(known, table, 0)], table),
    }
    assert jnp.array_equal(run(batch).out, run(moved).out)


def test_a_nan_that_a_live_token_holds_is_seen_in_its_sequence_only():
    batch = make_packed([130, 130], 16)
    page = batch["block_table"][0, 0]
    found = run({**batch, "cache": batch["cache"].at[page, 1, 200].set(NAN_BYTE)})
    assert jnp.isnan(found.out[0]).any()
    assert jnp.isfinite(found.out[1]).all()
