"""Grouped products on Hopper: block-scaled 8-bit and bfloat16, by rows and by inner dim."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic, sharded, tuning
from pallas_kernels.formats import BLOCK, Quantized, round_up
from pallas_kernels.grouped_matmul import mosaic_bfloat16
from pallas_kernels.grouped_matmul.cases import GroupedCase, Part
from pallas_kernels.grouped_matmul.layout import GroupLayout
from pallas_kernels.hopper_product import Tile
from pallas_kernels.hopper_scaled import block_scaled_product

Operand = Array | Quantized

# Groups start at multiples of 128 rows, so a tile must be 128 rows high.
TILE = Tile(num_groups=2, columns=192, num_stages=5, snake=4)


def refuses(case: GroupedCase) -> str | None:
    """Why the case is not for these kernels; None if it is."""
    if case.precision == "float32":
        return "float32 operands have no tensor-core product without rounding"
    return mosaic.refuses(case.hardware) or sharded.refuses_mesh()


def rows_product(
    x: Operand, w: Operand, layout: GroupLayout, *, case: GroupedCase, transposed: bool = False
) -> Float[Array, "aligned n"]:
    """Return each aligned row times its group's [K, N] matrix, or its transpose.

    Tiles of no group hold anything.
    """
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        b = w if transposed else w.mT
        exact = b.values.shape[1] == case.n
        call = partial(_scaled_rows, num_columns=None if exact else case.n, case=case)
        rule = sharded.ShardRule(
            operands=("mk", "gnk", "mK", "gNK", "t"),
            results=("mn" if exact else "mo",),
            blocks={"K": ("k", BLOCK), "N": ("n", BLOCK)},
            contracted="k",
            # Padded columns are cropped from the result, so its parts would not match B's.
            whole="mgt" if exact else "mgtn",
        )
        operands = (x.values, b.values, x.scales, b.scales, layout.tile_groups)
        return sharded.partitioned(call, rule, sum_dtype=jnp.float32)(*operands)
    call = partial(_plain_rows, case=case, transposed=transposed)
    w_letters = "gnk" if transposed else "gkn"
    rule = sharded.ShardRule(
        operands=("mk", w_letters, "t"), results=("mn",), contracted="k", whole="mgt"
    )
    return sharded.partitioned(call, rule, sum_dtype=jnp.float32)(x, w, layout.tile_groups)


def inner_product(
    x: Operand, grad: Operand, layout: GroupLayout, *, case: GroupedCase
) -> Float[Array, "groups k n"]:
    """Return for each group the sum over its aligned rows of xᵀ·grad.

    8-bit operands come in tiles of 128 rows and are laid out rows last here.
    """
    if isinstance(x, Quantized) and isinstance(grad, Quantized):
        a, b = x.mT, grad.mT
        call = partial(_scaled_inner, case=case)
        rule = sharded.ShardRule(
            operands=("km", "nm", "kM", "nM", "g"),
            results=("akn",),
            blocks={"M": ("m", BLOCK)},
            whole="mg",
        )
        operands = (a.values, b.values, a.scales, b.scales, layout.bounds)
        return sharded.partitioned(call, rule)(*operands)
    call = partial(_plain_inner, case=case)
    rule = sharded.ShardRule(operands=("mk", "mn", "g"), results=("akn",), whole="mg")
    return sharded.partitioned(call, rule)(x, grad, layout.bounds)


PARTS = {"rows": rows_product, "inner": inner_product}


def run(
    part: Part, x: Operand, y: Operand, layout: GroupLayout, *, case: GroupedCase, **options: bool
) -> Float[Array, "..."]:
    """Return the part of the op that is asked for."""
    return PARTS[part](x, y, layout, case=case, **options)


def tile_of(case: GroupedCase) -> Tile:
    """The measured tile of the sizes, or the default."""
    key = f"g{case.num_groups}_n{case.n}_k{case.k}"
    settings = tuning.find(f"grouped_{case.precision}", key, device=case.hardware.kind)
    if settings is not None:
        return Tile(**settings)
    return TILE if case.precision == "fp8" else mosaic_bfloat16.TILE


def _scaled_rows(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    tile_groups: Array,
    *,
    num_columns: int | None,
    case: GroupedCase,
    dtype: jax.typing.DTypeLike | None = None,
) -> Array:
    columns = b.shape[1] if num_columns is None else num_columns
    out = block_scaled_product(
        a,
        b,
        a_scales=a_scales.T,
        b_scales=b_scales,
        b_scales_by_row=False,
        num_columns=columns,
        tile=tile_of(case),
        num_cores=case.hardware.num_cores,
        out_dtype=case.out_dtype if dtype is None else dtype,
        groups=tile_groups,
        grouping="rows",
    )
    return out[:, :columns]


def _scaled_inner(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    bounds: Array,
    *,
    case: GroupedCase,
) -> Array:
    out = block_scaled_product(
        a,
        b,
        a_scales=_whole_copies(a_scales.T),
        b_scales=_whole_copies(b_scales.T),
        b_scales_by_row=True,
        num_columns=b.shape[0],
        tile=TILE,
        num_cores=case.hardware.num_cores,
        out_dtype=case.inner_dtype,
        groups=bounds,
        grouping="inner",
    )
    return out[:, : a.shape[0], : b.shape[0]]


def _plain_rows(
    a: Array,
    b: Array,
    tile_groups: Array,
    *,
    case: GroupedCase,
    transposed: bool,
    dtype: jax.typing.DTypeLike | None = None,
) -> Array:
    num_columns = b.shape[-2] if transposed else b.shape[-1]
    out = mosaic_bfloat16.grouped_product(
        a,
        b,
        groups=tile_groups,
        grouping="rows",
        b_inner_first=not transposed,
        num_cores=case.hardware.num_cores,
        out_dtype=case.out_dtype if dtype is None else dtype,
        tile=tile_of(case),
    )
    return out[:, :num_columns]


def _plain_inner(a: Array, b: Array, bounds: Array, *, case: GroupedCase) -> Array:
    rows, columns = a.shape[-1], b.shape[-1]
    out = mosaic_bfloat16.grouped_product(
        a,
        b,
        groups=bounds,
        grouping="inner",
        b_inner_first=True,
        num_cores=case.hardware.num_cores,
        out_dtype=case.inner_dtype,
        tile=tile_of(case),
    )
    return out[:, :rows, :columns]


def _whole_copies(scales: Array) -> Array:
    """Scales K first, each K's row of scales a whole number of 16 bytes."""
    missing = round_up(scales.shape[1], 4) - scales.shape[1]
    return lax.pad(scales, jnp.float32(0), [(0, 0, 0), (0, missing, 0)]) if missing else scales
