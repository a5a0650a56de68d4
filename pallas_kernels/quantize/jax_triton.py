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

NUM_WARPS = 8

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
        uses=("rounded_tile", "keep"),
        ROWS=sizes.rows,
        COLUMNS=columns,
        STORED_COLUMNS=stored_columns,
        LARGEST=case.format.largest,
        SMALLEST_SCALE=SMALLEST_SCALE,
        BLOCK=BLOCK,
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


def rounded_tile(
    tile: "Any", AXIS: "constexpr", LARGEST: "constexpr", SMALLEST_SCALE: "constexpr"
) -> "Any":
    """Elements of a tile in float32, and a scale for each of its lines along AXIS.

    The cast that follows rounds to nearest and takes what is larger than the largest element, by
    an error of the quotient, for that one.
    """
    magnitude = tl.abs(tile)
    finite = magnitude <= 3.4028234663852886e38
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=AXIS)
    scale = tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE)
    scale = tl.where(largest > 0, scale, 1.0)
    # A division in each element is what takes long; the reciprocal and one correction by what is
    # left over give the same quotient (Markstein, 1990).
    inverse = tl.expand_dims(tl.div_rn(1.0, scale), AXIS)
    quotient = tile * inverse
    left_over = tl.fma(-quotient, tl.expand_dims(scale, AXIS), tile)
    quotient = tl.fma(left_over, inverse, quotient)
    return tl.where(finite, quotient, float("nan")), scale


def keep(
    values: "Pointer",
    scales: "Pointer",
    elements: "Any",
    scale: "Any",
    lines: "Any",
    inner: "Any",
    NUM_LINES: "constexpr",
    BLOCK: "constexpr",
    AXIS: "constexpr",
) -> None:
    """Store elements, line by line, and the scales of their lines; AXIS counts blocks of a line."""
    inside = lines < NUM_LINES
    place = lines.to(tl.int64)[:, None] * (tl.num_programs(AXIS) * BLOCK) + inner[None, :]
    tl.store(values + place, elements.to(values.dtype.element_ty), mask=inside[:, None])
    block = tl.program_id(AXIS).to(tl.int64)
    tl.store(scales + block * NUM_LINES + lines, scale, mask=inside)


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
) -> None:
    """One block of a matrix in tiles of 1x128; source for Triton, not to be called."""
    column_block = tl.program_id(0)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    # 64 bits: a matrix may have more than 2^31 elements.
    rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    place = rows[:, None] * STORED_COLUMNS + columns[None, :]
    tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)

    elements, scale = rounded_tile(tile, 1, LARGEST, SMALLEST_SCALE)
    keep(values, scales, elements, scale, rows, columns, ROWS, BLOCK, 0)


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
) -> None:
    """The same of the matrix and of its transpose; source for Triton, not to be called."""
    column_block = tl.program_id(0)
    row_block = tl.program_id(1).to(tl.int64)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = row_block * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    place = rows[:, None] * STORED_COLUMNS + columns[None, :]
    tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)

    elements, scale = rounded_tile(tile, 1, LARGEST, SMALLEST_SCALE)
    keep(values, scales, elements, scale, rows, columns, ROWS, BLOCK, 0)

    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    # Cast first: what changes hands between threads is a quarter as much.
    elements = tl.trans(elements.to(turned.dtype.element_ty))
    keep(turned, turned_scales, elements, scale, columns, rows, COLUMNS, BLOCK, 1)


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
) -> None:
    """One block of the transpose of a matrix in 8-bit; source for Triton, not to be called."""
    column_block = tl.program_id(0)
    row_block = tl.program_id(1).to(tl.int64)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = row_block * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    place = rows[:, None] * STORED_COLUMNS + columns[None, :]
    given = tl.load(scales + column_block * ROWS + rows, mask=rows < ROWS, other=1.0)
    tile = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * given[:, None]

    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    # Cast first: what changes hands between threads is a quarter as much.
    elements = tl.trans(elements.to(turned.dtype.element_ty))
    keep(turned, turned_scales, elements, scale, columns, rows, COLUMNS, BLOCK, 1)
