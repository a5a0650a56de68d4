"""Shapes on which every backend of quantise is tested and timed."""

import math
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Element, Format, ScaleKind
from pallas_kernels.hardware import Hardware

# What rounds is under this name in a program.
SCOPE = "quantize"
# What comes of a matrix: itself; itself and its transpose; of one in 8-bit, its transpose. Both of
# silu(gate) · up, and both of each of its gradients, where two or three matrices come in. Weights
# in squares, which are those of the transpose too.
Way = Literal["plain", "both", "transposed", "swiglu", "swiglu_gradients", "squares"]
SWIGLU_WAYS: dict[Way, int] = {"swiglu": 2, "swiglu_gradients": 3}


@dataclass(frozen=True)
class QuantizeCase:
    """Quantising a [rows, columns] matrix into `format`, and its transpose by the `way`.

    Attributes:
        is_narrowed: whether elements are rounded to bfloat16 first.
    """

    rows: int
    columns: int
    format: Format
    hardware: Hardware
    way: Way = "plain"
    is_narrowed: bool = False

    @property
    def padded_flop_ratio(self) -> float:
        """Elements of whole blocks over elements of the matrix."""
        asked = self.rows * self.columns
        if not asked:
            return 1.0
        rows, columns = self.format.padded((self.rows, self.columns))
        return rows * columns / asked


def make_case(rows: int, columns: int, *, hardware: Hardware) -> QuantizeCase:
    """The case of activations [rows, columns] on `hardware`."""
    return QuantizeCase(rows=rows, columns=columns, format=ACTIVATION, hardware=hardware)


COLUMN = Format(block=(BLOCK, 1))
BASES: tuple[Format, ...] = (ACTIVATION, COLUMN, WEIGHT)
ELEMENT_KINDS: tuple[Element, ...] = ("e4m3", "e5m2")
SCALE_KINDS: tuple[ScaleKind, ...] = ("float32", "power_of_two")
FORMATS: tuple[Format, ...] = tuple(
    Format(block=base.block, element=element, scale=scale)
    for base in BASES
    for element in ELEMENT_KINDS
    for scale in SCALE_KINDS
)

# Aligned, partial in one dim, partial in both, single row, empty.
TEST_SHAPES: tuple[tuple[int, int], ...] = (
    (128, 256),
    (7, 576),
    (200, 130),
    (1, 1),
    (0, 128),
    (5, 0),
)
BENCH_SHAPES: tuple[tuple[int, int], ...] = (
    (4096, 7168),
    (4001, 2048),
    (64, 7168),
    (8192, 16384),
    # Of training with 16,384 tokens.
    (16384, 2560),
    (16384, 6912),
    (16384, 1024),
    (16384, 4096),
    (16384, 14336),
)


def bytes_moved(case: QuantizeCase, *, input_bytes: int = 2) -> int:
    """Bytes a quantiser must move: read the input once, write elements and scales.

    Args:
        input_bytes: of an element that is not quantised yet.
    """
    plain = _stored_bytes(case.rows, case.columns, case.format)
    if case.way == "plain":
        return case.rows * case.columns * input_bytes + plain
    if case.way == "squares":
        elements = math.prod(case.format.padded((case.rows, case.columns)))
        return case.rows * case.columns * input_bytes + plain + elements
    turned = _stored_bytes(case.columns, case.rows, case.format)
    if case.way == "transposed":
        return plain + turned
    if case.way in SWIGLU_WAYS:
        num_inputs = SWIGLU_WAYS[case.way]
        read = num_inputs * case.rows * case.columns * input_bytes
        return read + (num_inputs - 1) * (plain + turned)
    return case.rows * case.columns * input_bytes + plain + turned


def _stored_bytes(rows: int, columns: int, format: Format) -> int:
    padded_rows, padded_columns = format.padded((rows, columns))
    elements = padded_rows * padded_columns
    return elements + 4 * elements // (format.block[0] * format.block[1])
