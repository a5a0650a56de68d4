"""MLA decode on the card: FlashMLA's grid of sizes, poisoned slots, batch invariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode.cases import GRID_HEADS, GRID_QUERIES
from tests.pallas_kernels.latent_cache import make_batch
from tests.pallas_kernels.test_fp8_on_gpu import poison_memory

pytestmark = pytest.mark.gpu

OPTIONS = {"latent": 512, "sm_scale": 0.1352}


def lengths_of(batch, largest):
    rng = np.random.default_rng([batch, largest])
    lengths = rng.integers(0, largest + 1, batch)
    lengths[-1] = largest
    return [int(n) for n in lengths]


def run(batch, *, split_len=4096):
    return jax.jit(lambda b: mla_decode(**b, **OPTIONS, split_len=split_len, backend="mosaic_gpu"))(
        batch
    )


def reference(batch):
    with hardware.target("cpu"):
        return jax.jit(lambda b: mla_decode(**b, **OPTIONS, backend="xla"))(batch)


def check(batch, split_len):
    poison_memory()
    found, expected = run(batch, split_len=split_len), reference(batch)
    as64 = lambda t: np.asarray(t.astype(jnp.float32), np.float64)
    measured = difference(as64(found.out), as64(expected.out))
    assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_queries", GRID_QUERIES)
@pytest.mark.parametrize("num_heads", GRID_HEADS)
def test_every_number_of_heads_and_queries_is_right(num_heads, num_queries):
    batch = make_batch(lengths_of(6, 300), num_heads, num_queries=num_queries, dtype=jnp.bfloat16)
    check(batch, 128)


@pytest.mark.parametrize("largest", [20, 140, 4096])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("split_len", [1024, None])
def test_ragged_lengths_are_right_whole_and_in_parts(batch_size, largest, split_len):
    check(make_batch(lengths_of(batch_size, largest), 128, dtype=jnp.bfloat16), split_len)


def test_a_row_is_the_same_bit_for_bit_alone_and_in_a_batch():
    batch = make_batch(lengths_of(9, 2500), 128, dtype=jnp.bfloat16)
    together = run(batch, split_len=1024)
    for row in range(9):
        one = {name: array[row : row + 1] for name, array in batch.items() if name != "cache"}
        alone = run({**one, "cache": batch["cache"]}, split_len=1024)
        assert jnp.array_equal(alone.out[0], together.out[row])
        assert jnp.array_equal(alone.lse[0], together.lse[row])


def test_the_order_of_pages_changes_nothing():
    batch = make_batch([700, 64, 1], 64, dtype=jnp.bfloat16)
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
