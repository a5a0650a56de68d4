"""Block-scaled 8-bit floating point: quantise, dequantise, and requantise for the gradient."""

from pallas_kernels.quantize.op import OP, quantize, requantize_transposed, rounded

__all__ = ["OP", "quantize", "requantize_transposed", "rounded"]
