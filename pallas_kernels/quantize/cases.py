"""Shapes on which every backend of quantise is tested and timed."""

from dataclasses import dataclass

from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Element, Format, ScaleKind
from pallas_kernels.hardware import Hardware


@dataclass(frozen=True)
class QuantizeCase:
    """Quantising a [rows, columns] matrix into `format`."""

    rows: int
    columns: int
    format: Format
    hardware: Hardware

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
BENCH_SHAPES: tuple[tuple[int, int], ...] = ((4096, 7168), (4001, 2048), (64, 7168), (8192, 16384))


def bytes_moved(case: QuantizeCase, *, input_bytes: int = 2) -> int:
    """Bytes a quantiser must move: read the input once, write elements and scales."""
    rows, columns = case.format.padded((case.rows, case.columns))
    scales = rows * columns // (case.format.block[0] * case.format.block[1])
    return case.rows * case.columns * input_bytes + rows * columns + 4 * scales
