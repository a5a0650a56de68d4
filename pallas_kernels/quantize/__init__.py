"""Block-scaled 8-bit floating point: quantise, dequantise, and requantise for the gradient."""

from pallas_kernels.quantize.cases import SCOPE
from pallas_kernels.quantize.op import (
    OP,
    quantize,
    quantize_both,
    quantize_squares,
    requantize_transposed,
    rounded,
    serves_swiglu,
    swiglu_both,
    swiglu_gradients_both,
)

__all__ = [
    "OP",
    "SCOPE",
    "quantize",
    "quantize_both",
    "quantize_squares",
    "requantize_transposed",
    "rounded",
    "serves_swiglu",
    "swiglu_both",
    "swiglu_gradients_both",
]
