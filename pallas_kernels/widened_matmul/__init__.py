"""Few rows times weights kept in 8 bits, which are widened as they are read."""

from pallas_kernels.widened_matmul.op import OP, has_kernel, widened_matmul

__all__ = ["OP", "has_kernel", "widened_matmul"]
