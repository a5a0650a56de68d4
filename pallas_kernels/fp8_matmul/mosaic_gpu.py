"""The block-scaled product on Hopper: which kernel, which tile, and the shapes they accept.

Two kernels: the persistent one (`hopper_scaled`) and, for few rows of activations and square
weight blocks, the one that puts weights on wgmma's wide side (`mosaic_decode`). Rows are padded
only in the scales, a few bytes; elements past an edge are clipped by the copy engine.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import hopper_scaled, mosaic, sharded, tuning
from pallas_kernels.formats import BLOCK, Quantized, round_up
from pallas_kernels.fp8_matmul import mosaic_decode
from pallas_kernels.fp8_matmul.cases import FEW_ROWS, MatmulCase, tuning_key
from pallas_kernels.fp8_matmul.mosaic_decode import DecodeTile
from pallas_kernels.fp8_matmul.partition import run_partitioned
from pallas_kernels.hardware import Hardware
from pallas_kernels.hopper_product import Tile, num_halved
from pallas_kernels.hopper_scaled import Operands

# Persistent tiles from the most to the least work per loaded byte. Of the first two, three groups
# were 5 to 12 % faster in every product of training that was measured, eight tiles side by side
# with operands that the L2 cannot hold.
TILES: tuple[Tile, ...] = (
    Tile(num_groups=3, columns=128, num_stages=7, num_out_buffers=2, snake=8),
    Tile(num_groups=2, columns=192, num_stages=7, num_out_buffers=2, snake=8),
    Tile(num_groups=2, columns=160, num_stages=5),
    Tile(num_groups=2, columns=128, num_stages=6),
    Tile(num_groups=2, columns=96, num_stages=7),
    Tile(num_groups=2, columns=64, num_stages=8),
    Tile(num_groups=1, columns=64, num_stages=8),
)
# Time of a last round of halved tiles, in rounds: measured 0.7 at M = N = 4096, K = 7168.
HALVED_ROUND = 0.7
DECODE_TILES: tuple[DecodeTile, ...] = tuple(
    DecodeTile(num_groups=groups, num_splits=splits, num_stages=stages)
    for groups, stages in ((1, 8), (2, 6))
    for splits in (1, 2, 4, 7, 8)
)


def refuses(case: MatmulCase) -> str | None:
    """Why the case is not for these kernels; None if it is."""
    if case.a_element != case.b_element:
        return f"a is {case.a_element} and b is {case.b_element}; the kernels hold both in one type"
    return mosaic.refuses(case.hardware) or sharded.refuses_mesh()


def run(
    a: Quantized, b: Quantized, *, case: MatmulCase, out_dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Float[Array, "*stack m n"]:
    """Return A·Bᵀ; sharded operands stay where they are."""
    return run_partitioned(_product, a, b, case=case, out_dtype=out_dtype)


def _product(
    a: Float[Array, "*stack m k"],
    b: Float[Array, "n k"],
    a_scales: Float[Array, "*stack m k_blocks"],
    b_scales: Float[Array, "n_blocks k_blocks"],
    *,
    num_columns: int | None,
    case: MatmulCase,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*stack m n_out"]:
    """The product of the operands on one device."""
    rows = a.reshape(-1, a.shape[-1])
    scales = a_scales.reshape(-1, a_scales.shape[-1])
    columns = b.shape[0] if num_columns is None else num_columns
    by_row = case.b_block_rows == 1
    tile = choose_tile(rows.shape[0], columns, k=b.shape[1], by_row=by_row, hardware=case.hardware)
    if isinstance(tile, DecodeTile):
        padding = ((0, round_up(len(rows), 8) - len(rows)), (0, 0))
        out = mosaic_decode.decode_product(
            _pad(rows, padding),
            b,
            a_scales=_pad(scales, padding).T,
            b_scales=b_scales,
            num_columns=columns,
            tile=tile,
            num_cores=case.hardware.num_cores,
            out_dtype=dtype,
        )
    else:
        out = hopper_scaled.block_scaled_product(
            rows,
            b,
            a_scales=_scales_by_k(scales),
            b_scales=_scales_by_k(b_scales) if by_row else b_scales,
            b_scales_by_row=by_row,
            num_columns=columns,
            tile=tile,
            num_cores=case.hardware.num_cores,
            out_dtype=dtype,
        )
    return out[: len(rows), :columns].reshape(*a.shape[:-1], columns)


def run_sum(
    pairs: Sequence[tuple[Quantized, Quantized]],
    *,
    case: MatmulCase,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "m n"]:
    """Return the sum of A·Bᵀ over pairs [M, K], [N, K], whose weights are in squares.

    Args:
        case: of the whole sum, its K that of all pairs. More rows than `FEW_ROWS`.
    """
    operands = [Operands(a.values, b.values, _scales_by_k(a.scales)) for a, b in pairs]
    first, *added = operands
    kind = case.hardware
    tile = choose_tile(case.m, case.n, k=case.k, by_row=False, hardware=kind)
    assert isinstance(tile, Tile), "few rows take another kernel"
    out = hopper_scaled.block_scaled_product(
        *first,
        b_scales=jnp.concatenate([b.scales for _, b in pairs], axis=1),
        b_scales_by_row=False,
        num_columns=case.n,
        tile=tile,
        num_cores=kind.num_cores,
        out_dtype=out_dtype,
        added=added,
    )
    return out[: case.m, : case.n]


def _scales_by_k(scales: Float[Array, "rows k_blocks"]) -> Float[Array, "k_blocks padded_rows"]:
    """Scales K first, each K's row of scales a whole number of 16 bytes."""
    return _pad(scales, ((0, round_up(len(scales), 4) - len(scales)), (0, 0))).T


def _pad(x: Array, widths: tuple[tuple[int, int], ...]) -> Array:
    """`x` padded; a plain `x` where there is nothing to pad, which saves a copy of 8-bit data."""
    if not any(after for _, after in widths):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, after, 0) for _, after in widths])


def choose_tile(m: int, n: int, *, k: int, by_row: bool, hardware: Hardware) -> Tile | DecodeTile:
    """Return the measured tile of the sizes, or else the heuristic's."""
    decode = m <= FEW_ROWS and not by_row
    settings = tuning.find("fp8_matmul", tuning_key(m, n, k), device=hardware.kind)
    if settings is not None and "num_splits" not in settings:
        return Tile(**settings)
    if settings is not None and decode:
        return DecodeTile(**settings)
    if decode:
        return _decode_heuristic(n, k, hardware)
    return min(TILES, key=lambda tile: _tile_cost(tile, (m, n), hardware.num_cores))


def _tile_cost(tile: Tile, shape: tuple[int, int], num_cores: int) -> float:
    """Relative time: rounds of tiles times the larger of a tile's arithmetic and its loads.

    A Hopper core multiplies 64 x 128 elements in the time in which it loads about 230 rows from
    L2 when every core does; below that a tile waits for its operands.
    """
    m, n = shape
    num_tiles = -(-m // tile.rows) * -(-n // tile.columns)
    rounds = -(-num_tiles // num_cores)
    if num_halved(num_tiles, num_cores, tile=tile):
        rounds += HALVED_ROUND - 1
    arithmetic = tile.rows * tile.columns / (192 * 128)
    loads = (tile.rows + tile.columns) / (192 + 128)
    return rounds * max(arithmetic, loads)


def _decode_heuristic(n: int, k: int, hardware: Hardware) -> DecodeTile:
    """Enough blocks to fill the cores once, each with at least four steps of K."""
    num_groups = 2 if n >= 2 * BLOCK * hardware.num_cores // 3 or k >= 8 * n else 1
    stripes = -(-n // (num_groups * mosaic.WARPGROUP_ROWS))
    splits = max(1, min(hardware.num_cores // stripes, k // BLOCK // 4, 8))
    return DecodeTile(num_groups=num_groups, num_splits=splits, num_stages=8 // num_groups + 2)
