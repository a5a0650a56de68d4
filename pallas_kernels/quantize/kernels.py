"""Sources for Triton of what rounds to tiles of 1x128; none of them is to be called.

A program holds 128 x 128 elements in registers. The lines of a tile that neighbour each other are
so far apart in memory that a thread's own lines are neighbours there.
"""

from typing import Any

# Words of the kernels' signatures: an array's address, and a number known when they are compiled.
Pointer = Any
constexpr = Any
# Triton's language; set by the adapter, because this file is read without Triton too.
tl: Any = None

# Functions here that the kernels call.
USES = (
    *("lines_of", "in_memory_order", "loaded", "finite_or_nan", "divided", "scale_of"),
    *("rounded_tile", "keep", "store_turned", "keep_turned", "keep_both", "sigmoid"),
)


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
    """
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, by, x), inverse, quotient)


def scale_of(
    largest: "Any", LARGEST: "constexpr", SMALLEST_SCALE: "constexpr"
) -> "tuple[Any, Any]":
    """The scale of lines whose largest magnitudes these are, and its reciprocal."""
    scale = tl.maximum(divided(largest, LARGEST, 1.0 / LARGEST), SMALLEST_SCALE)
    scale = tl.where(largest > 0, scale, 1.0)
    return scale, divided(1.0, scale, 1.0 / scale)


def sigmoid(x: "Any") -> "Any":
    """1 / (1 + exp(-x)); the square of a reciprocal root is fewer instructions than a division."""
    root = tl.math.rsqrt(1.0 + tl.exp(-x))
    return root * root


def rounded_tile(
    tile: "Any", AXIS: "constexpr", LARGEST: "constexpr", SMALLEST_SCALE: "constexpr"
) -> "Any":
    """Elements of a tile in float32, and a scale for each of its lines along AXIS.

    NaN is in no maximum. The cast that follows rounds to nearest and takes what is larger than the
    largest element, by an error of the product, for that one.
    """
    scale, inverse = scale_of(tl.max(tl.abs(tile), axis=AXIS), LARGEST, SMALLEST_SCALE)
    return tile * tl.expand_dims(inverse, AXIS), scale


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


def store_turned(
    turned: "Pointer",
    elements: "Any",
    columns: "Any",
    NUM_COLUMNS: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """Store the elements of a tile column by column.

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
    """Store the elements of a tile column by column, and a scale for each column."""
    store_turned(turned, elements, columns, NUM_COLUMNS, BLOCK, APART)
    block = tl.program_id(1).to(tl.int64)
    tl.store(scales + block * NUM_COLUMNS + columns, scale, mask=columns < NUM_COLUMNS)


def keep_both(
    tile: "Any",
    values: "Pointer",
    scales: "Pointer",
    turned: "Pointer",
    turned_scales: "Pointer",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    LARGEST: "constexpr",
    SMALLEST_SCALE: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
) -> None:
    """Round a tile along its rows and along its columns, and store both."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_row = tl.program_id(1).to(tl.int64) * BLOCK
    rows = lines_of(first_row, BLOCK, APART)
    tile = finite_or_nan(tile)

    elements, scale = rounded_tile(tile, 1, LARGEST, SMALLEST_SCALE)
    keep(values, scales, elements, scale, rows, first_row, columns, ROWS, BLOCK, APART)
    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    keep_turned(turned, turned_scales, elements, scale, columns, COLUMNS, BLOCK, APART)


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
    """One block of a matrix in tiles of 1x128."""
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
    """The same of the matrix and of its transpose."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    tile = loaded(x, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    keep_both(
        tile, values, scales, turned, turned_scales,
        ROWS, COLUMNS, LARGEST, SMALLEST_SCALE, BLOCK, APART,
    )  # fmt: skip


def squares(
    x: "Pointer",
    values: "Pointer",
    scales: "Pointer",
    turned: "Pointer",
    ROWS: "constexpr",
    COLUMNS: "constexpr",
    STORED_COLUMNS: "constexpr",
    LARGEST: "constexpr",
    SMALLEST_SCALE: "constexpr",
    BLOCK: "constexpr",
    APART: "constexpr",
    IS_NARROWED: "constexpr",
) -> None:
    """One square of a matrix of a stack, and its place in the transpose."""
    matrix = tl.program_id(2).to(tl.int64)
    column_block, row_block = tl.program_id(0), tl.program_id(1)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(row_block.to(tl.int64) * BLOCK, BLOCK, APART)
    first = x + matrix * ROWS * STORED_COLUMNS
    tile = loaded(first, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    if IS_NARROWED:
        tile = tile.to(tl.bfloat16).to(tl.float32)
    tile = finite_or_nan(tile)

    largest = tl.max(tl.max(tl.abs(tile), axis=1), axis=0)
    scale, inverse = scale_of(largest, LARGEST, SMALLEST_SCALE)
    elements = tile * inverse

    width, height = tl.num_programs(0), tl.num_programs(1)
    start = matrix * width * height * (BLOCK * BLOCK)
    place = rows[:, None] * (width * BLOCK) + columns[None, :]
    tl.store(values + start + place, elements.to(values.dtype.element_ty))
    # What lies behind an edge is stored too: as many columns as there are blocks of them.
    store_turned(turned + start, elements, columns, COLUMNS + BLOCK, BLOCK, APART)
    tl.store(scales + (matrix * height + row_block) * width + column_block, scale)


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
    """One block of the transpose of a matrix in 8-bit."""
    column_block = tl.program_id(0)
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    given = tl.load(scales + column_block * ROWS + rows, mask=rows < ROWS, other=1.0)
    tile = loaded(values, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK) * given[:, None]

    elements, scale = rounded_tile(tile, 0, LARGEST, SMALLEST_SCALE)
    keep_turned(turned, turned_scales, elements, scale, columns, COLUMNS, BLOCK, APART)


def swiglu_both(
    gate: "Pointer",
    up: "Pointer",
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
    """One block of silu(gate) · up, rounded both ways."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    g = loaded(gate, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    u = loaded(up, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    keep_both(
        g * sigmoid(g) * u, values, scales, turned, turned_scales,
        ROWS, COLUMNS, LARGEST, SMALLEST_SCALE, BLOCK, APART,
    )  # fmt: skip


def up_gradient_both(
    gate: "Pointer",
    grad: "Pointer",
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
    """One block of the gradient of up, rounded both ways."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    g = loaded(gate, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    d = loaded(grad, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    keep_both(
        d * g * sigmoid(g), values, scales, turned, turned_scales,
        ROWS, COLUMNS, LARGEST, SMALLEST_SCALE, BLOCK, APART,
    )  # fmt: skip


def gate_gradient_both(
    gate: "Pointer",
    up: "Pointer",
    grad: "Pointer",
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
    """One block of the gradient of gate, rounded both ways."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = lines_of(tl.program_id(1).to(tl.int64) * BLOCK, BLOCK, APART)
    g = loaded(gate, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    u = loaded(up, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    d = loaded(grad, rows, columns, ROWS, COLUMNS, STORED_COLUMNS, BLOCK)
    share = sigmoid(g)
    keep_both(
        d * u * share * (1.0 + g * (1.0 - share)), values, scales, turned, turned_scales,
        ROWS, COLUMNS, LARGEST, SMALLEST_SCALE, BLOCK, APART,
    )  # fmt: skip
