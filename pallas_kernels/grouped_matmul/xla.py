"""Grouped products through XLA: serve every case on every device.

On CPU and TPU as XLA's ragged product. On GPU as one product after another, a tile of rows each:
XLA expands its ragged product there into G dense ones, 6 to 24 times slower on an H200.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import Quantized
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
    """Return each aligned row times its group's [K, N] matrix, or its transpose, in float32."""
    x_full, w_full = _plain(x), _plain(w)
    w_full = w_full.mT if transposed else w_full
    precision = _precision(case)
    if case.hardware.platform not in ("cuda", "rocm"):
        return lax.ragged_dot(
            x_full,
            w_full,
            layout.aligned_sizes,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    tiles = x_full.reshape(-1, layout.tile_rows, x_full.shape[-1])

    def one(tile: tuple[Array, Array]) -> Array:
        rows, group = tile
        return _dot(rows, w_full[jnp.maximum(group, 0)], precision)

    return lax.map(one, (tiles, layout.tile_groups)).reshape(-1, w_full.shape[-1])


def inner_product(
    x: Operand, grad: Operand, layout: GroupLayout, *, case: GroupedCase
) -> Float[Array, "groups k n"]:
    """Return for each group the sum over its aligned rows of xᵀ·grad, in float32."""
    x_full, grad_full = _plain(x), _plain(grad)
    precision = _precision(case)
    x_tiles = x_full.reshape(-1, layout.tile_rows, x_full.shape[-1])
    grad_tiles = grad_full.reshape(-1, layout.tile_rows, grad_full.shape[-1])
    num_groups = len(layout.bounds) - 1

    def one(sums: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        rows, grads, group = tile
        # Tiles of no group go to a row that is dropped.
        place = jnp.where(group >= 0, group, num_groups)
        return sums.at[place].add(_dot(rows.T, grads, precision), mode="drop"), None

    zeros = jnp.zeros((num_groups, x_full.shape[-1], grad_full.shape[-1]), jnp.float32)
    tiles = (x_tiles, grad_tiles, layout.tile_groups)
    return lax.scan(one, vary(zeros, varying_axes(*tiles)), tiles)[0]


PARTS = {"rows": rows_product, "inner": inner_product}


def run(
    part: Part, x: Operand, y: Operand, layout: GroupLayout, *, case: GroupedCase, **options: bool
) -> Float[Array, "..."]:
    """Return the part of the op that is asked for."""
    return PARTS[part](x, y, layout, case=case, **options)


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
