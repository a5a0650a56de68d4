"""The block-scaled 8-bit matrix product."""

from pallas_kernels.fp8_matmul.op import OP, adds_products, fp8_matmul, fp8_matmul_sum

__all__ = ["OP", "adds_products", "fp8_matmul", "fp8_matmul_sum"]
