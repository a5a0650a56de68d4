"""Few rows times 8-bit weights in Triton: weights are read once, and widened in registers.

Weights fill the wide side of the matrix unit, rows the narrow one. A program sums some rows of one
matrix of weights over a part of K; a step is 128 of K and has one scale. Programs of a tile without
a matrix read nothing.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import sharded, triton, tuning
from pallas_kernels.formats import BLOCK, Quantized, round_up
from pallas_kernels.widened_matmul.cases import FEW_ROWS, WidenedCase, tuning_key

# Columns of X that a tile may have: what wgmma takes, up to the accumulator that fits beside sums.
ROW_TILES: tuple[int, ...] = (16, 32, 64, 128)
# Programs of a core at once; fewer, and its reading of weights has gaps. Of many rows half as many:
# each part of K writes the sums of all of them.
PROGRAMS_A_CORE = 3
# Of a lane.
MOST_SUMS = 64

# Words of the kernel's signature: an array's address, and a number known when it is compiled.
Pointer = Any
constexpr = Any
# Triton's language; set by the adapter, because this file is read without Triton too.
tl: Any = None


@dataclass(frozen=True)
class Tile:
    """How one program works.

    Attributes:
        weights: rows of W that it multiplies: those of a square, or a part of them.
        rows: rows of X, padded with zeros.
        num_warps: warps that share the sums; 4 of them are one warpgroup.
        num_stages: steps of K in flight.
        num_splits: programs that share one tile, each with a part of K.
    """

    weights: int
    rows: int
    num_warps: int = 4
    num_stages: int = 3
    num_splits: int = 1


def refuses(case: WidenedCase) -> str | None:
    """Why the case is not for this kernel; None if it is."""
    device = case.hardware
    if case.m > FEW_ROWS:
        return f"{case.m} rows: a program holds the sums of at most {FEW_ROWS}"
    if case.dtype != "bfloat16":
        return f"rows are {case.dtype}; the matrix unit takes them in bfloat16"
    if case.element != "e4m3":
        return f"weights are {case.element}; the instruction that widens them reads e4m3"
    if device.platform == "cuda" and not device.supports("float8"):
        return f"{device.kind} is {device.architecture}, which has no casts from 8-bit floats"
    return triton.refuses(device) or sharded.refuses_mesh()


def run(
    x: Float[Array, "*tiles m k"],
    w: Quantized,
    *,
    matrices: Int[Array, " p"] | None,
    case: WidenedCase,
) -> Float[Array, "p m n"]:
    """Return the product in the dtype of `x`; parts of K are added in order."""
    tile = choose_tile(case)
    width = w.values.shape[2]
    inner = [(0, 0)] * (x.ndim - 1) + [(0, width - case.k)]
    rows = jnp.pad(x, inner) if inner[-1][1] else x
    if matrices is None:
        matrices = jnp.arange(case.p)
    dtype = x.dtype if tile.num_splits == 1 else jnp.float32
    parts = triton.call(
        widened_product,
        rows,
        w.values,
        w.scales,
        matrices.astype(jnp.int32),
        out_shape=jax.ShapeDtypeStruct((tile.num_splits, case.p, case.m, case.n), dtype),
        grid=(-(-case.n // tile.weights), case.p, tile.num_splits),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        hardware=case.hardware,
        uses=("widened_pairs",),
        NUM_ROWS=case.m,
        NUM_COLUMNS=case.n,
        STORED_ROWS=w.values.shape[1],
        SHARED=case.shared,
        WEIGHTS=tile.weights,
        ROWS=tile.rows,
        NUM_STEPS=width // BLOCK,
        NUM_SPLITS=tile.num_splits,
        BLOCK=BLOCK,
    )
    return parts[0] if tile.num_splits == 1 else parts.sum(axis=0).astype(x.dtype)


def choose_tile(case: WidenedCase) -> Tile:
    """Return the measured tile, or a square of weights, or half and parts of K to fill cores."""
    key = tuning_key(case)
    if (settings := tuning.find("widened_matmul", key, device=case.hardware.kind)) is not None:
        return Tile(**settings)
    rows = next(size for size in ROW_TILES if size >= case.m)
    cores = PROGRAMS_A_CORE * case.hardware.num_cores // (1 if rows == ROW_TILES[0] else 2)
    weights = BLOCK if case.p * (round_up(case.n, BLOCK) // BLOCK) >= cores else BLOCK // 2
    programs = case.p * -(-case.n // weights)
    splits = max(1, min(cores // programs, -(-case.k // BLOCK) // 2, 8))
    return Tile(weights, rows, num_warps=warps_for(weights, rows), num_splits=splits)


def warps_for(weights: int, rows: int) -> int:
    """Return one warpgroup, or two where one would spill its sums: they are twice in registers."""
    return 4 if weights * rows <= MOST_SUMS * 128 else 8


def widened_product(
    x: "Pointer",
    w: "Pointer",
    scales: "Pointer",
    matrices: "Pointer",
    out: "Pointer",
    NUM_ROWS: "constexpr",
    NUM_COLUMNS: "constexpr",
    STORED_ROWS: "constexpr",
    SHARED: "constexpr",
    WEIGHTS: "constexpr",
    ROWS: "constexpr",
    NUM_STEPS: "constexpr",
    NUM_SPLITS: "constexpr",
    BLOCK: "constexpr",
) -> None:
    """Some columns of one result over one part of K; source for Triton, not to be called."""
    start = tl.program_id(0) * WEIGHTS
    # 64 bits: a stack may have more than 2^31 elements.
    tile = tl.program_id(1).to(tl.int64)
    matrix = tl.load(matrices + tile).to(tl.int64)
    split = tl.program_id(2)
    width = NUM_STEPS * BLOCK

    columns = start + tl.arange(0, WEIGHTS)
    rows = tl.arange(0, ROWS)
    # Four bytes are read as one word: words come to registers by whole matrices, bytes one by one.
    # One product has the first two of each word, and so of every four columns of X the first two;
    # the other has those behind.
    quarter = tl.arange(0, BLOCK // 4)
    half = tl.arange(0, BLOCK // 2)
    pairs = tl.max_contiguous(tl.multiple_of(half // 2 * 4 + half % 2, 2), 2)
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    first = split * NUM_STEPS // NUM_SPLITS
    end = (split + 1) * NUM_STEPS // NUM_SPLITS
    # Without a matrix nothing is read, and the result is zeros.
    end = tl.where(matrix >= 0, end, first)
    w_at = words + (matrix * STORED_ROWS + columns)[:, None] * (width // 4) + quarter[None, :]
    scale_at = scales + (matrix * (STORED_ROWS // BLOCK) + start // BLOCK) * NUM_STEPS
    first_row = 0 if SHARED else tile * NUM_ROWS
    x_at = x + (first_row + rows)[:, None] * width + pairs[None, :]
    inside = (rows < NUM_ROWS)[:, None]

    total = tl.zeros((WEIGHTS, ROWS), dtype=tl.float32)
    for step in range(first, end):
        weights = tl.load(w_at + step * (BLOCK // 4))
        one = tl.load(x_at + step * BLOCK, mask=inside, other=0.0)
        other = tl.load(x_at + step * BLOCK + 2, mask=inside, other=0.0)
        part = tl.dot(widened_pairs(weights, "first", WEIGHTS, BLOCK // 2), one.T)
        part = tl.dot(widened_pairs(weights, "second", WEIGHTS, BLOCK // 2), other.T, part)
        total += part * tl.load(scale_at + step)

    place = ((split.to(tl.int64) * tl.num_programs(1) + tile) * NUM_ROWS + rows)[
        None, :
    ] * NUM_COLUMNS + columns[:, None]
    stored = (columns < NUM_COLUMNS)[:, None] & (rows < NUM_ROWS)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=stored)


def widened_pairs(
    words: "Pointer", pair: "constexpr", ROWS: "constexpr", COLUMNS: "constexpr"
) -> "Pointer":
    """Return two bytes of each word as neighbours in bfloat16; source for Triton.

    Two at a time, and by way of float32: a cast to bfloat16 at once is one instruction an element,
    which a core takes longer for than for reading it.

    Args:
        words: [ROWS, COLUMNS / 2], of four elements each.
        pair: "first" for the low bytes, or "second".
    """
    one, other = tl.inline_asm_elementwise(
        "{ .reg .b16 first, second, low, high; .reg .b32 both; .reg .f32 wide_low, wide_high;"
        "mov.b32 {first, second}, $2; cvt.rn.f16x2.e4m3x2 both, " + pair + ";"
        "mov.b32 {low, high}, both; cvt.f32.f16 wide_low, low; cvt.f32.f16 wide_high, high;"
        "cvt.rn.bf16.f32 $0, wide_low; cvt.rn.bf16.f32 $1, wide_high; }",
        "=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return tl.reshape(tl.join(one, other), (ROWS, COLUMNS))
