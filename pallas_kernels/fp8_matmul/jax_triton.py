"""The block-scaled product in Triton, for NVIDIA cards that are no Hopper.

On Hopper it is the second opinion, and takes what the Mosaic kernels refuse. One kernel computes
left · rightᵀ; few rows of activations go to the right, so that weights fill the wide side of the
matrix unit. Any M and N: a row behind the last is read as the last one and not stored. K is whole
blocks, because operands are stored so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import sharded, triton, tuning
from pallas_kernels.formats import BLOCK, Quantized
from pallas_kernels.fp8_matmul.cases import FEW_ROWS, MatmulCase, tuning_key
from pallas_kernels.fp8_matmul.partition import run_partitioned
from pallas_kernels.hardware import Hardware

# Key of this backend's tiles in a tuning table.
TUNED = "fp8_matmul.jax_triton"
# Tiles of left rows that are computed side by side, so that they share right rows in L2.
GROUP = 8

# Words of the kernel's signature: an array's address, and a number known when it is compiled.
Pointer = Any
constexpr = Any
# Triton's language; set by the adapter, because this file is read without Triton too.
tl: Any = None


@dataclass(frozen=True)
class Tile:
    """How one program works.

    Attributes:
        left: rows of the left operand: activations, or weights where `few_rows` swaps them.
        right: rows of the right operand.
        num_warps: warps that share the accumulator; 4 of them are one warpgroup.
        num_stages: blocks of K in flight.
        num_splits: programs that share one tile, each with a part of K.
    """

    left: int
    right: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


# The first was the best measured on an H200 with many rows (of 4 and 8 warps, 3 and 4 stages).
TILES: tuple[Tile, ...] = (
    Tile(left=128, right=128, num_warps=8, num_stages=3),
    Tile(left=64, right=128, num_warps=4, num_stages=4),
    Tile(left=64, right=64, num_warps=4, num_stages=4),
)
# Tiles of few activations: a warpgroup's rows of weights, and the fewest columns that hold them.
FEW_ROWS_LEFT = 64
FEW_ROWS_TILES: tuple[int, ...] = (16, 32, 64, 128)


def refuses(case: MatmulCase) -> str | None:
    """Why the case is not for this kernel; None if it is."""
    hardware = case.hardware
    if hardware.platform == "cuda" and not hardware.supports("float8"):
        return (
            f"{hardware.kind} is {hardware.architecture}, which does not multiply 8-bit floats; "
            "Triton has no product of them there. The XLA backend serves it."
        )
    return triton.refuses(hardware) or sharded.refuses_mesh()


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
    columns = b.shape[0] if num_columns is None else num_columns
    by_row = case.b_block_rows == 1
    few_rows = not by_row and len(rows) <= FEW_ROWS
    tile = choose_tile(len(rows), columns, k=b.shape[1], by_row=by_row, hardware=case.hardware)
    ours = _Side(rows, a_scales.reshape(-1, a_scales.shape[-1]), len(rows), columns, squares=False)
    weights = _Side(b, b_scales, columns, 1, squares=not by_row)
    left, right = (weights, ours) if few_rows else (ours, weights)
    shape = (len(rows), columns)
    out = _launch(left, right, shape=shape, tile=tile, hardware=case.hardware, dtype=dtype)
    return out.reshape(*a.shape[:-1], columns)


class _Side(NamedTuple):
    """One operand of a launch.

    Attributes:
        num_rows: rows to multiply; padding may follow.
        stride: how far the results of two neighbouring rows are apart.
        squares: scales are of squares; else one a row.
    """

    values: Array
    scales: Array
    num_rows: int
    stride: int
    squares: bool

    @property
    def scales_by_k(self) -> Array:
        """Scales as the kernel reads them: those of rows K first, so that a tile's are adjacent."""
        return self.scales if self.squares else self.scales.T


def _launch(
    left: _Side,
    right: _Side,
    *,
    shape: tuple[int, int],
    tile: Tile,
    hardware: Hardware,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "m n"]:
    """Multiply on one device; parts of K are added in order, so repeated runs agree bit for bit."""
    num_steps = left.values.shape[1] // BLOCK
    splits = min(tile.num_splits, num_steps)
    programs = -(-left.num_rows // tile.left) * -(-right.num_rows // tile.right)
    parts = triton.call(
        scaled_product,
        left.values,
        right.values,
        left.scales_by_k,
        right.scales_by_k,
        out_shape=jax.ShapeDtypeStruct((splits, *shape), dtype if splits == 1 else jnp.float32),
        grid=(programs, splits),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        hardware=hardware,
        LEFT_ROWS=left.num_rows,
        RIGHT_ROWS=right.num_rows,
        LEFT_SQUARES=left.squares,
        RIGHT_SQUARES=right.squares,
        LEFT_STRIDE=left.stride,
        RIGHT_STRIDE=right.stride,
        LEFT_TILE=tile.left,
        RIGHT_TILE=tile.right,
        GROUP=GROUP,
        NUM_STEPS=num_steps,
        NUM_SPLITS=splits,
        BLOCK=BLOCK,
    )
    return parts[0] if splits == 1 else parts.sum(axis=0).astype(dtype)


def scaled_product(
    left: "Pointer",
    right: "Pointer",
    left_scales: "Pointer",
    right_scales: "Pointer",
    out: "Pointer",
    LEFT_ROWS: "constexpr",
    RIGHT_ROWS: "constexpr",
    LEFT_SQUARES: "constexpr",
    RIGHT_SQUARES: "constexpr",
    LEFT_STRIDE: "constexpr",
    RIGHT_STRIDE: "constexpr",
    LEFT_TILE: "constexpr",
    RIGHT_TILE: "constexpr",
    GROUP: "constexpr",
    NUM_STEPS: "constexpr",
    NUM_SPLITS: "constexpr",
    BLOCK: "constexpr",
) -> None:
    """One tile of left · rightᵀ over one part of K; source for Triton, not to be called."""
    # Programs that run at one time form squares of tiles: each row of them is loaded once.
    program = tl.program_id(0)
    split = tl.program_id(1)
    right_tiles = tl.cdiv(RIGHT_ROWS, RIGHT_TILE)
    group = program // (GROUP * right_tiles)
    inside = program % (GROUP * right_tiles)
    height = tl.minimum(tl.cdiv(LEFT_ROWS, LEFT_TILE) - group * GROUP, GROUP)
    left_start = (group * GROUP + inside % height) * LEFT_TILE
    right_start = inside // height * RIGHT_TILE

    left_rows = left_start + tl.arange(0, LEFT_TILE)
    right_rows = right_start + tl.arange(0, RIGHT_TILE)
    left_inside = tl.minimum(left_rows, LEFT_ROWS - 1)
    right_inside = tl.minimum(right_rows, RIGHT_ROWS - 1)
    inner = tl.arange(0, BLOCK)
    first = split * NUM_STEPS // NUM_SPLITS
    end = (split + 1) * NUM_STEPS // NUM_SPLITS
    # 64 bits: a matrix may have more than 2^31 elements.
    left_at = left + left_inside.to(tl.int64)[:, None] * (NUM_STEPS * BLOCK) + inner[None, :]
    right_at = right + right_inside.to(tl.int64)[:, None] * (NUM_STEPS * BLOCK) + inner[None, :]

    total = tl.zeros((LEFT_TILE, RIGHT_TILE), dtype=tl.float32)
    for step in range(first, end):
        left_values = tl.load(left_at + step * BLOCK)
        right_values = tl.load(right_at + step * BLOCK)
        if LEFT_SQUARES:
            left_scale = tl.load(left_scales + left_start // BLOCK * NUM_STEPS + step)
        else:
            left_scale = tl.load(left_scales + step * LEFT_ROWS + left_inside)
        if RIGHT_SQUARES:
            right_scale = tl.load(right_scales + right_start // BLOCK * NUM_STEPS + step)
        else:
            right_scale = tl.load(right_scales + step * RIGHT_ROWS + right_inside)
        part = tl.dot(left_values, right_values.T)
        if LEFT_SQUARES:
            total += part * (left_scale * right_scale)[None, :]
        elif RIGHT_SQUARES:
            total += part * (left_scale * right_scale)[:, None]
        else:
            total += part * left_scale[:, None] * right_scale[None, :]

    place = left_rows.to(tl.int64)[:, None] * LEFT_STRIDE + right_rows[None, :] * RIGHT_STRIDE
    place += split.to(tl.int64) * LEFT_ROWS * RIGHT_ROWS
    stored = (left_rows < LEFT_ROWS)[:, None] & (right_rows < RIGHT_ROWS)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=stored)


def choose_tile(m: int, n: int, *, k: int, by_row: bool, hardware: Hardware) -> Tile:
    """Return the measured tile of the sizes, or else the heuristic's."""
    settings = tuning.find(TUNED, tuning_key(m, n, k), device=hardware.kind)
    if settings is not None:
        return Tile(**settings)
    if m <= FEW_ROWS and not by_row:
        return _few_rows_tile(m, n, k=k, num_cores=hardware.num_cores)
    # Scales of both sides' rows spill the first one's registers on Blackwell.
    tiles = TILES[1:] if by_row and hardware.architecture != "sm90" else TILES
    # The largest tile that gives every core one, or else the smallest.
    for tile in tiles[:-1]:
        if -(-m // tile.left) * -(-n // tile.right) >= hardware.num_cores:
            return tile
    return tiles[-1]


def _few_rows_tile(m: int, n: int, *, k: int, num_cores: int) -> Tile:
    """Weights on the wide side, and enough parts of K to fill the cores once."""
    right = next(size for size in FEW_ROWS_TILES if size >= m)
    splits = max(1, min(num_cores // -(-n // FEW_ROWS_LEFT), k // BLOCK // 4, 8))
    return Tile(left=FEW_ROWS_LEFT, right=right, num_warps=4, num_stages=4, num_splits=splits)
