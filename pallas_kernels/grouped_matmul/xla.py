"""Grouped products through XLA: serve every case on every device.

Whole tiles of rows are one product after another on CPU and GPU: XLA expands its ragged product
there into G dense ones, 6 to 24 times slower on an H200. On TPU, and for rows that stand closer on
CPU, it is XLA's ragged product.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import BLOCK, Quantized
from pallas_kernels.grouped_matmul.cases import GroupedCase, Part
from pallas_kernels.grouped_matmul.layout import GroupLayout
from pallas_kernels.sharded import vary, varying_axes

Operand = Array | Quantized


def refuses(case: GroupedCase) -> None:
    """Nothing is refused."""
    return None


def rows_product(
    x: Operand, w: Operand, layout: GroupLayout, *, case: GroupedCase, transposed: bool = False
) -> Float[Array, "aligned n"]:
    """Return each aligned row times its group's [K, N] matrix, or its transpose.

    In float32, or where tiles are multiplied in the dtype that is asked for; zeros in those of no
    group.
    """
    x_full, w_full = _plain(x), _plain(w)
    w_full = w_full.mT if transposed else w_full
    precision = _precision(case)
    if not _by_tiles(layout, case):
        return lax.ragged_dot(
            x_full,
            w_full,
            layout.aligned_sizes,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    tiles = x_full.reshape(-1, layout.tile_rows, x_full.shape[-1])

    def one(tile: Array, out: Array) -> Array:
        product = _dot(tiles[tile], w_full[layout.tile_groups[tile]], precision)
        return out.at[tile].set(product.astype(out.dtype))

    room = jnp.zeros((*tiles.shape[:2], w_full.shape[-1]), case.out_dtype)
    axes = varying_axes(tiles, w_full, layout.bounds)
    out = lax.fori_loop(0, layout.bounds[-1], one, vary(room, axes))
    return out.reshape(-1, w_full.shape[-1])


def inner_product(
    x: Operand, grad: Operand, layout: GroupLayout, *, case: GroupedCase
) -> Float[Array, "groups k n"]:
    """Return for each group the sum over its aligned rows of xᵀ·grad, in float32."""
    x_full, grad_full = _plain(x), _plain(grad)
    precision = _precision(case)
    x_tiles = x_full.reshape(-1, layout.tile_rows, x_full.shape[-1])
    grad_tiles = grad_full.reshape(-1, layout.tile_rows, grad_full.shape[-1])
    num_groups = len(layout.bounds) - 1

    def one(tile: Array, sums: Array) -> Array:
        product = _dot(x_tiles[tile].T, grad_tiles[tile], precision)
        return sums.at[layout.tile_groups[tile]].add(product)

    zeros = jnp.zeros((num_groups, x_full.shape[-1], grad_full.shape[-1]), jnp.float32)
    axes = varying_axes(x_tiles, grad_tiles, layout.bounds)
    return lax.fori_loop(0, layout.bounds[-1], one, vary(zeros, axes))


PARTS = {"rows": rows_product, "inner": inner_product}


def run(
    part: Part, x: Operand, y: Operand, layout: GroupLayout, *, case: GroupedCase, **options: bool
) -> Float[Array, "..."]:
    """Return the part of the op that is asked for."""
    return PARTS[part](x, y, layout, case=case, **options)


def _by_tiles(layout: GroupLayout, case: GroupedCase) -> bool:
    platform = case.hardware.platform
    return platform in ("cuda", "rocm") or (platform == "cpu" and layout.tile_rows == BLOCK)


def _plain(operand: Operand) -> Array:
    return operand.dequantize(jnp.float32) if isinstance(operand, Quantized) else operand


def _precision(case: GroupedCase) -> lax.PrecisionLike:
    if case.precision == "bfloat16":
        return None
    if case.precision == "fp8" and case.hardware.platform == "cuda":
        return lax.DotAlgorithmPreset.TF32_TF32_F32
    return lax.Precision.HIGHEST


def _dot(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    contract = (((1,), (0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
