"""The Hopper kernels on the CPU, in JAX's Mosaic GPU interpreter, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, mosaic
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.fp8_matmul import fp8_matmul, fp8_matmul_sum
from pallas_kernels.fp8_matmul.mosaic_decode import DecodeTile, decode_product
from pallas_kernels.hopper_product import Tile
from pallas_kernels.hopper_scaled import block_scaled_product
from tests.pallas_kernels.operands import exact_product, matmul_operands

# (M, N, K), tile: the widest tiles, edges in every dim, more stages than steps, shared copies.
PERSISTENT = [
    ((192, 128, 256), Tile(num_groups=3, columns=128, num_stages=4)),
    ((200, 136, 384), Tile(num_groups=2, columns=192, num_stages=2)),
    ((140, 200, 384), Tile(num_groups=1, columns=64, num_stages=2, cluster=2)),
    # A round of whole tiles on four blocks, then one tile in halves, the second of them ragged.
    ((60, 600, 256), Tile(num_groups=1, columns=128, num_stages=3)),
    ((100, 300, 256), Tile(num_groups=1, columns=128, num_stages=3, cluster=2)),
]
DECODE = [
    ((8, 128, 512), DecodeTile(num_groups=1, num_splits=1, num_stages=3)),
    ((64, 200, 640), DecodeTile(num_groups=2, num_splits=3, num_stages=4)),
    # More parts than blocks, directly stored; blocks that share the tokens.
    ((16, 392, 256), DecodeTile(num_groups=1, num_splits=1, num_stages=3)),
    ((16, 392, 384), DecodeTile(num_groups=1, num_splits=2, num_stages=2, cluster=2)),
]


def persistent(a, b, *, tile, out_dtype="bfloat16"):
    by_row = b.format.block[0] == 1
    pad = lambda scales: jnp.pad(scales, ((0, -len(scales) % 4), (0, 0))).T
    return block_scaled_product(
        a.values,
        b.values,
        a_scales=pad(a.scales),
        b_scales=pad(b.scales) if by_row else b.scales,
        b_scales_by_row=by_row,
        num_columns=b.rows,
        tile=tile,
        num_cores=4,
        out_dtype=out_dtype,
    )[: a.rows, : b.rows]


def check(out, a, b, *, out_dtype="bfloat16"):
    found = difference(np.asarray(out, np.float64), exact_product(a, b))
    assert found.within(TOLERANCES["fp8_matmul", out_dtype]), found


@pytest.mark.parametrize(("shape", "tile"), PERSISTENT)
def test_the_persistent_kernel_equals_the_reference(shape, tile):
    a, b = matmul_operands(*shape)
    with mosaic.interpreted():
        check(jax.jit(lambda a, b: persistent(a, b, tile=tile))(a, b), a, b)


def test_the_weight_gradient_kernel_equals_the_reference_in_float32():
    a, b = matmul_operands(130, 72, 256, b_format=ACTIVATION)
    tile = Tile(num_groups=2, columns=128, num_stages=3)
    with mosaic.interpreted():
        out = jax.jit(lambda a, b: persistent(a, b, tile=tile, out_dtype="float32"))(a, b)
    check(out, a, b, out_dtype="float32")


@pytest.mark.parametrize(("shape", "tile"), DECODE)
def test_the_decode_kernel_equals_the_reference(shape, tile):
    a, b = matmul_operands(*shape)
    with mosaic.interpreted():
        out = jax.jit(
            lambda a, b: decode_product(
                a.values,
                b.values,
                a_scales=a.scales.T,
                b_scales=b.scales,
                num_columns=b.rows,
                tile=tile,
                num_cores=4,
                out_dtype="bfloat16",
            )
        )(a, b)
    check(out[:, : b.rows], a, b)


@pytest.mark.parametrize("shape", [(7, 13, 129), (130, 9, 13)], ids=str)
def test_the_op_pads_odd_sizes_for_the_kernel(shape):
    a, b = matmul_operands(*shape, b_format=WEIGHT)
    with mosaic.interpreted(), hardware.target("NVIDIA H200"):
        check(jax.jit(lambda a, b: fp8_matmul(a, b, backend="mosaic_gpu"))(a, b), a, b)


# K of each pair, and whose rows end within a tile; the second has more stages than steps.
SUMS = [((200, 136), (256, 384)), ((192, 128), (128, 384, 256))]


@pytest.mark.parametrize(("shape", "ks"), SUMS, ids=str)
def test_a_sum_of_products_is_one_product_of_all_their_k(shape, ks):
    pairs = [matmul_operands(*shape, k) for k in ks]
    with mosaic.interpreted(), hardware.target("NVIDIA H200"):
        out = jax.jit(lambda pairs: fp8_matmul_sum(pairs, backend="mosaic_gpu"))(pairs)
    expected = sum(exact_product(a, b) for a, b in pairs)
    found = difference(np.asarray(out, np.float64), expected)
    assert found.within(TOLERANCES["fp8_matmul", "bfloat16"]), found
