"""Quantising in Triton: one read of a matrix gives its tiles, those of its transpose, or both.

XLA reads a matrix for the largest magnitudes, again for the elements, and writes its transpose in
float32 in between. Here a program holds 128 x 128 elements in registers, and only what is 8-bit
goes back. Any number of rows and columns: what lies behind an edge is read as zero. Scales leave
K first, as the products read them, so that no transpose of them is left in a program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import sharded, triton
from pallas_kernels.formats import BLOCK, Format, Quantized
from pallas_kernels.quantize.cases import SCOPE, QuantizeCase
from pallas_kernels.quantize.reference import SMALLEST_SCALE

NUM_WARPS = 4
# Elements of a line that a thread holds: 16 of 8 bits are the widest store.
VECTOR = 16
# How many lines of a tile all threads hold at once; a thread's own lines are so far apart.
APART = NUM_WARPS * 32 * VECTOR // BLOCK
USES = (
    *("lines_of", "in_memory_order", "loaded", "finite_or_nan", "divided", "rounded_tile"),
    *("keep", "keep_turned"),
)

# Words of the kernels' signatures: an array's address, and a number known when they are compiled.
Pointer = Any
constexpr = Any
# Triton's language; set by the adapter, because this file is read without Triton too.
tl: Any = None


def refuses(case: QuantizeCase) -> str | None:
    """Why the case is not for these kernels; None if it is."""
    hardware = case.hardware
    if case.format.block != (1, BLOCK):
        return f"blocks of {case.format.block}: these kernels make tiles of 1x{BLOCK}"
    if case.format.scale != "float32":
        return f"scales are {case.format.scale}; these kernels make float32 ones"
    if case.rows < BLOCK or not case.columns:
        return (
            f"{case.rows} x {case.columns} fills no block of {BLOCK} rows; XLA rounds few of them "
            "in the kernel that makes them"
        )
    if hardware.platform == "cuda" and not hardware.supports("float8"):
        return f"{hardware.kind} is {hardware.architecture}, which has no casts to 8-bit floats"
    return triton.refuses(hardware) or sharded.refuses_mesh()


def run(
    x: Float[Array, "*stack rows columns"] | Quantized, *, case: QuantizeCase
) -> Quantized | tuple[Quantized, Quantized]:
    """Return what the case asks for; sharded operands stay where they are."""
    if isinstance(x, Quantized):
        call = sharded.batched(partial(_partitioned, requantized, case), stacked=())
        turned, turned_scales = call(x.values, x.scales.mT)
        return _of(turned, turned_scales.mT, case, rows=x.columns, columns=x.rows)
    rows, columns = x.shape[-2:]
    if case.way == "plain":
        values, scales = sharded.batched(partial(_plain, case), stacked=(0,))(x)
        return _of(values, scales, case, rows=rows, columns=columns)
    call = sharded.batched(partial(_partitioned, quantized_both, case), stacked=())
    values, scales, turned, turned_scales = call(x)
    return (
        _of(values, scales.mT, case, rows=rows, columns=columns),
        _of(turned, turned_scales.mT, case, rows=columns, columns=rows),
    )


def _plain(case: QuantizeCase, x: Float[Array, "*stack rows columns"]) -> tuple[Array, Array]:
    """Elements, and scales as `Quantized` holds them."""
    values, scales = _partitioned(quantized, case, x)
    return values, jnp.moveaxis(scales, 0, -1)


def _of(values: Array, scales: Array, case: QuantizeCase, *, rows: int, columns: int) -> Quantized:
    return Quantized(values, scales, rows=rows, columns=columns, format=case.format)


def _partitioned(source: Callable[..., None], case: QuantizeCase, *operands: Array) -> Any:
    """The kernel on arrays that may be sharded: which of its dims are the same."""
    stack = sharded.STACK_LETTERS[: operands[0].ndim - 2]
    # A dim that is padded or cropped is another one in the result, and must be whole.
    k, many_k = ("o", "O") if case.columns % BLOCK else ("k", "K")
    m, many_m = ("p", "P") if case.rows % BLOCK else ("m", "M")
    plain = (f"{stack}m{k}", f"{many_k}{stack}m")
    whole = "k" if case.columns % BLOCK else ""
    if source is quantized:
        rule = sharded.ShardRule((f"{stack}mk",), plain, {"K": ("k", BLOCK)}, whole=whole)
        return sharded.partitioned(partial(_launch, source, case), rule)(*operands)
    blocks = {"K": ("k", BLOCK), "M": ("m", BLOCK)}
    whole += "m" if case.rows % BLOCK else ""
    taken, turned = ("mk",), (f"k{m}", f"{many_m}k")
    given = (*plain, *turned)
    if source is requantized:
        taken, given = ("mk", "Km"), (f"{k}{m}", f"{many_m}{k}")
    rule = sharded.ShardRule(taken, given, blocks, whole=whole)
    return sharded.partitioned(partial(_launch, source, case), rule)(*operands)


@jax.named_scope(SCOPE)
def _launch(source: Callable[..., None], case: QuantizeCase, *operands: Array) -> Any:
    """Run a kernel on what one device has.

    Args:
        operands: the matrix [*stack, rows, columns]; of one in 8-bit its elements, and its scales
            [blocks of columns, rows].
    """
    *stack, _, stored_columns = operands[0].shape
    matrix = operands[0].reshape(-1, stored_columns)
    # Elements in 8-bit are stored padded; a device's part has as many columns as it has.
    columns = min(stored_columns, case.columns) if source is requantized else stored_columns
    sizes = _Sizes(len(matrix), columns, case.format)
    results = {
        quantized: sizes.plain,
        quantized_both: (*sizes.plain, *sizes.turned),
        requantized: sizes.turned,
    }[source]
    found = triton.call(
        source,
        matrix,
        *operands[1:],
        out_shape=results,
        grid=(sizes.column_blocks, sizes.row_blocks),
        num_warps=NUM_WARPS,
        num_stages=1,
        hardware=case.hardware,
        uses=USES,
        ROWS=sizes.rows,
        COLUMNS=columns,
        STORED_COLUMNS=stored_columns,
        LARGEST=case.format.largest,
        SMALLEST_SCALE=SMALLEST_SCALE,
        BLOCK=BLOCK,
        APART=APART,
    )
    if source is requantized:
        return found
    values, scales, *turned = found
    stacked = values.reshape(*stack, -1, values.shape[-1])
    return stacked, scales.reshape(len(scales), *stack, -1), *turned


class _Sizes(NamedTuple):
    """Of a matrix, and of what comes of it.

    Attributes:
        plain: its elements, and its scales with blocks of columns first.
        turned: elements of its transpose, and their scales with blocks of rows first.
    """

    rows: int
    columns: int
    format: Format

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // BLOCK)

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // BLOCK)

    @property
    def plain(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return self._pair(self.rows, self.column_blocks)

    @property
    def turned(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return self._pair(self.columns, self.row_blocks)

    def _pair(
        self, rows: int, num_blocks: int
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        values = jax.ShapeDtypeStruct((rows, num_blocks * BLOCK), self.format.dtype)
        return values, jax.ShapeDtypeStruct((num_blocks, rows), jnp.float32)


def lines_of(FIRST: "constexpr", BLOCK: "constexpr", APART: "constexpr") -> "Any":
    """Rows of a block in the order of a tile: neighbours in it are BLOCK/APART rows apart.

    A thread holds every APART-th line of a tile, so these are neighbours in memory, and what a
    transpose wants side by side needs no way between threads.
    """
    place = tl.arange(0, BLOCK)
    return FIRST + (place % APART) * (BLOCK // APART) + place // APART


def in_memory_order(lines: "Any", BLOCK: "constexpr", APART: "constexpr") -> "Any":
    """A number for each line of a tile in the order of `lines_of`, in the order of memory."""
    return tl.reshape(tl.trans(tl.reshape(lines, (BLOCK // APART, APART))), (BLOCK,))


def loaded(
    x: "Pointer",
    rows: "Any",
    columns: "Any",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    STORED_COLUMNS: "constexpr",
    BLOCK: "constexpr",
) -> "Any":
    """A tile in float32, zero behind the edges; a matrix of whole blocks has none to look for."""
    place = rows[:, None] * STORED_COLUMNS + columns[None, :]
    if ROWS % BLOCK == 0 and COLUMNS % BLOCK == 0:
        return tl.load(x + place).to(tl.float32)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


def finite_or_nan(tile: "Any") -> "Any":
    """A tile without infinities: the largest of a line passes NaN over."""
    return tl.where(tl.abs(tile) <= 3.4028234663852886e38, tile, float("nan"))


def divided(x: "Any", by: "Any", inverse: "Any") -> "Any":
    """A quotient as division rounds it, by the reciprocal and one correction by what is left over.

    Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
    A division in each element would be what takes the time.
    """
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, by, x), inverse, quotient)


def rounded_tile(
    tile: "Any", AXIS: "constexpr", LARGEST: "constexpr", SMALLEST_SCALE: "constexpr"
) -> "Any":
    """Elements of a tile in float32, and a scale for each of its lines along AXIS.

    NaN is in no maximum. The cast that follows rounds to nearest and takes what is larger than the
    largest element, by an error of the quotient, for that one.
    """
    largest = tl.max(tl.abs(tile), axis=AXIS)
    scale = tl.maximum(divided(largest, LARGEST, 1.0 / LARGEST), SMALLEST_SCALE)
    scale = tl.where(largest > 0, scale, 1.0)
    inverse = 1.0 / scale
    return divided(tile, tl.expand_dims(scale, AXIS), tl.expand_dims(inverse, AXIS)), scale


def keep(
    values: "Pointer",
    scales: "Pointer",
    elements: "Any",
    scale: "Any",
    rows: "Any",
    first_row: "Any",
    inner: "Any",
    NUM_ROWS: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """Store the elements of a tile row by row, and a scale for each row."""
    inside = rows < NUM_ROWS
    place = rows.to(tl.int64)[:, None] * (tl.num_programs(0) * BLOCK) + inner[None, :]
    tl.store(values + place, elements.to(values.dtype.element_ty), mask=inside[:, None])
    row = first_row + tl.arange(0, BLOCK)
    found = scales + tl.program_id(0).to(tl.int64) * NUM_ROWS + row
    tl.store(found, in_memory_order(scale, BLOCK, APART), mask=row < NUM_ROWS)


def keep_turned(
    turned: "Pointer",
    scales: "Pointer",
    elements: "Any",
    scale: "Any",
    columns: "Any",
    NUM_COLUMNS: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """Store the elements of a tile column by column, and a scale for each column.

    Elements of four rows side by side are one word, so that what changes hands between threads
    are words.
    """
    bits = elements.to(turned.dtype.element_ty).to(tl.uint8, bitcast=True).to(tl.int32)
    fours = tl.reshape(bits, (BLOCK // APART // 4, 4, APART, BLOCK))
    shifts = tl.reshape(8 * tl.arange(0, 4), (1, 4, 1, 1))
    words = tl.sum(fours << shifts, axis=1)
    words = tl.reshape(tl.permute(words, (2, 1, 0)), (BLOCK, BLOCK // 4))
    inside = columns < NUM_COLUMNS
    width = tl.num_programs(1).to(tl.int64) * (BLOCK // 4)
    place = columns.to(tl.int64)[:, None] * width + (
        tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    )
    tl.store(turned.to(tl.pointer_type(tl.int32)) + place, words, mask=inside[:, None])
    block = tl.program_id(1).to(tl.int64)
    tl.store(scales + block * NUM_COLUMNS + columns, scale, mask=inside)


def quantized(
    x: "Pointer",
    values: "Pointer",
    scales: "Pointer",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    STORED_COLUMNS: "constexpr",
    LARGEST: "constexpr",
    SMALLEST_SCALE: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """One block of a matrix in tiles of 1x128; source for Triton, not to be called."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # 64 bits: a matrix may have more than 2^31 elements.
    first_row = tl.program_id(1).to(tl.int64) * BLOCK
    rows = lines_of(first_row, BLOCK, APART)
    tile = loaded(x, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    tile = finite_or_nan(tile)

    elements, scale = rounded_tile(tile, 1, LARGEST, SMALLEST_SCALE)
    keep(values, scales, elements, scale, rows, first_row, columns, ROWS, BLOCK, APART)


def quantized_both(
    x: "Pointer",
    values: "Pointer",
    scales: "Pointer",
    turned: "Pointer",
    turned_scales: "Pointer",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    STORED_COLUMNS: "constexpr",
    LARGEST: "constexpr",
    SMALLEST_SCALE: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """The same of the matrix and of its transpose; source for Triton, not to be called."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_row = tl.program_id(1).to(tl.int64) * BLOCK
    rows = lines_of(first_row, BLOCK, APART)
    tile = loaded(x, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    tile = finite_or_nan(tile)

    elements, scale = rounded_tile(tile, 1, LARGEST, SMALLEST_SCALE)
    keep(values, scales, elements, scale, rows, first_row, columns, ROWS, BLOCK, APART)
    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    keep_turned(turned, turned_scales, elements, scale, columns, COLUMNS, BLOCK, APART)


def requantized(
    values: "Pointer",
    scales: "Pointer",
    turned: "Pointer",
    turned_scales: "Pointer",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    STORED_COLUMNS: "constexpr",
    LARGEST: "constexpr",
    SMALLEST_SCALE: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """One block of the transpose of a matrix in 8-bit; source for Triton, not to be called."""
    column_block = tl.program_id(0)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    given = tl.load(scales + column_block * ROWS + rows, mask=rows < ROWS, other=1.0)
    tile = loaded(values, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK) * given[:, None]

    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    keep_turned(turned, turned_scales, elements, scale, columns, COLUMNS, BLOCK, APART)
