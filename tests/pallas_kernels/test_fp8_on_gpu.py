"""The Hopper block-scaled kernels on the card itself: edges, poisoned memory, repeatability."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.fp8_matmul import fp8_matmul, fp8_matmul_sum, mosaic_gpu, reference
from pallas_kernels.fp8_matmul.cases import ODD_SIZES, tuning_key
from pallas_kernels.linear import linear
from pallas_kernels.tuning import Table
from tests.pallas_kernels.operands import matmul_operands

pytestmark = pytest.mark.gpu

SIZES = [size for size in ODD_SIZES if size]
# A quarter of a Latin square: every odd size in every place, in many pairs.
SHAPES = [
    (m, n, SIZES[(i + j) % len(SIZES)])
    for (i, m), (j, n) in itertools.product(enumerate(SIZES), enumerate(SIZES))
    if (i + 2 * j) % 4 == 0
]


def poison_memory():
    """Leave NaN in the memory that the next results are allocated from."""
    jax.block_until_ready(jnp.full((1 << 27,), jnp.nan, jnp.float32)).delete()


def check(out, a, b, *, out_dtype="bfloat16"):
    expected = jax.jit(lambda a, b: reference.fp8_matmul(a, b, out_dtype=jnp.float32))(a, b)
    ours, right = np.asarray(out.astype(jnp.float32)), np.asarray(expected)
    if ours.shape[1] == 1:
        # A row of one number may cancel to less than the error of its sum: one column, one row.
        ours, right = ours.T, right.T
    found = difference(ours, right)
    assert found.within(TOLERANCES["fp8_matmul", out_dtype]), found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_are_right_in_every_row(shape):
    a, b = matmul_operands(*shape)
    poison_memory()
    check(jax.jit(lambda a, b: fp8_matmul(a, b, backend="mosaic_gpu"))(a, b), a, b)


@pytest.mark.parametrize("shape", [(7, 129, 129), (130, 576, 1152), (4097, 127, 576)], ids=str)
@pytest.mark.parametrize("b_format", [WEIGHT, ACTIVATION], ids=str)
def test_float32_results_are_right(shape, b_format):
    a, b = matmul_operands(*shape, b_format=b_format)
    poison_memory()
    run = jax.jit(lambda a, b: fp8_matmul(a, b, out_dtype=jnp.float32, backend="mosaic_gpu"))
    check(run(a, b), a, b, out_dtype="float32")


@pytest.mark.parametrize("ks", [(1024, 256), (2560, 384, 300)], ids=str)
def test_a_sum_of_products_is_the_sum_of_the_products(ks):
    pairs = [matmul_operands(1000, 2112, k) for k in ks]
    poison_memory()
    out = jax.jit(lambda pairs: fp8_matmul_sum(pairs, backend="mosaic_gpu"))(pairs)
    right = sum(np.asarray(reference.fp8_matmul(a, b, out_dtype=jnp.float32)) for a, b in pairs)
    found = difference(np.asarray(out.astype(jnp.float32)), right)
    assert found.within(TOLERANCES["fp8_matmul", "bfloat16"]), found


@pytest.mark.parametrize("tile", [*mosaic_gpu.TILES, *mosaic_gpu.DECODE_TILES], ids=str)
def test_every_tile_is_right_and_repeats_bit_for_bit(tile):
    m = 100 if "num_splits" in tile.__dict__ else 1000
    a, b = matmul_operands(m, 2112, 1536)
    key = tuning_key(m, 2112, 1536)
    table = Table(jax.devices()[0].device_kind).with_entry(
        "fp8_matmul", key, settings=tile.__dict__
    )
    with tuning.override(table):
        run = jax.jit(lambda a, b: fp8_matmul(a, b, backend="mosaic_gpu")).lower(a, b).compile()
    poison_memory()
    first = run(a, b)
    check(first, a, b)
    for _ in range(5):
        poison_memory()
        assert jnp.array_equal(run(a, b), first)


def test_gradients_equal_the_xla_path():
    x = jax.random.normal(jax.random.key(0), (3, 200, 300), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (300, 576)) / 17
    grad = jax.random.normal(jax.random.key(2), (3, 200, 576), jnp.bfloat16)

    def run(x, w, grad):
        out, vjp = jax.vjp(lambda x, w: linear(x, w, precision="fp8"), x, w)
        return out, *vjp(grad)

    with hardware.target("cpu"):
        expected = jax.jit(run)(x, w, grad)
    for found, on_cpu in zip(jax.jit(run)(x, w, grad), expected, strict=True):
        a, b = (np.asarray(t, np.float64).reshape(-1, t.shape[-1]) for t in (found, on_cpu))
        assert difference(a, b).total < 1e-5
