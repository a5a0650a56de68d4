"""How far a result is from its reference, in the measures the field uses, and how far it may be."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

TolerantOp = Literal["fp8_matmul", "grouped_fp8", "grouped_bf16", "mla_decode"]


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences from the reference on the same, dequantised, operands.

    Attributes:
        total: `cosine_difference` of the whole result.
        row: the worst `cosine_difference` of a single row.
    """

    total: float
    row: float


# Every element of a bfloat16 row off by half a unit in the last place, 2^-8: a row that is worse
# has more than its result rounded.
BFLOAT16_ROW = 2.0**-17

# A wide bfloat16 result is 1.4e-6 off by its rounding alone; 5e-6 is the field's limit for
# simulated arithmetic (DeepGEMM's tests). A float32 result has only the order of its sums.
TOLERANCES: dict[tuple[TolerantOp, str], Tolerance] = {
    ("fp8_matmul", "bfloat16"): Tolerance(total=5e-6, row=1.01 * BFLOAT16_ROW),
    ("fp8_matmul", "float32"): Tolerance(total=1e-6, row=2e-6),
    ("grouped_fp8", "bfloat16"): Tolerance(total=5e-6, row=1.01 * BFLOAT16_ROW),
    ("grouped_bf16", "bfloat16"): Tolerance(total=5e-6, row=1.01 * BFLOAT16_ROW),
    ("grouped_fp8", "float32"): Tolerance(total=1e-6, row=2e-6),
    ("grouped_bf16", "float32"): Tolerance(total=1e-6, row=2e-6),
    # The weights P are rounded to bfloat16 before P·V: FlashMLA's limit for dense decode.
    ("mla_decode", "bfloat16"): Tolerance(total=5e-6, row=2e-5),
}


class Difference(NamedTuple):
    """Measured differences of one result; comparable with a `Tolerance`."""

    total: float
    row: float
    largest: float

    def within(self, tolerance: Tolerance) -> bool:
        """True if neither the total nor any row is further off than allowed."""
        return self.total <= tolerance.total and self.row <= tolerance.row


def cosine_difference(x: Shaped[ndarray, "..."], y: Shaped[ndarray, "..."]) -> float:
    """Return 1 - 2 Σxy / Σ(x² + y²) in float64; 0 where both are zero, 1 where not finite.

    The field's `calc_diff`. Half the squared relative error for small errors, so a uniform gain
    error of 2 % is only 2e-4: compare with dequantised operands, and row by row.
    """
    a, b = x.astype(np.float64), y.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 1.0
    energy = float((a * a + b * b).sum())
    return 1.0 - 2.0 * float((a * b).sum()) / energy if energy else 0.0


def difference(result: Shaped[ndarray, "..."], reference: Shaped[ndarray, "..."]) -> Difference:
    """Return how far `result` is from `reference`, in total, in the worst row, and at most."""
    if result.shape != reference.shape:
        raise ValueError(f"result is {result.shape}, reference is {reference.shape}.")
    if not result.size:
        return Difference(total=0.0, row=0.0, largest=0.0)
    a = result.astype(np.float64).reshape(-1, result.shape[-1])
    b = reference.astype(np.float64).reshape(-1, result.shape[-1])
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Difference(total=1.0, row=1.0, largest=float("inf"))
    energy = (a * a + b * b).sum(axis=1)
    product = (a * b).sum(axis=1)
    rows = 1.0 - 2.0 * product / np.where(energy > 0, energy, 1.0)
    rows = np.where(energy > 0, rows, 0.0)
    total = 1.0 - 2.0 * product.sum() / energy.sum() if energy.sum() > 0 else 0.0
    return Difference(total=float(total), row=float(rows.max()), largest=float(np.abs(a - b).max()))
