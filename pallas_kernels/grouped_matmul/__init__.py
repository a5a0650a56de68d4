"""Products of consecutive groups of rows, each with its own matrix."""

from pallas_kernels.grouped_matmul.layout import GroupLayout, align
from pallas_kernels.grouped_matmul.op import OP, grouped_matmul, masked_grouped_matmul

__all__ = ["OP", "GroupLayout", "align", "grouped_matmul", "masked_grouped_matmul"]
