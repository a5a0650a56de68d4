"""The block-scaled 8-bit matrix product."""

from pallas_kernels.fp8_matmul.op import OP, fp8_matmul

__all__ = ["OP", "fp8_matmul"]
