"""The block-scaled product through XLA: serves every case on every device."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import Quantized
from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul.cases import MatmulCase

# An element times its scale needs more than bfloat16's 8 bits and less than TF32's 11, and the
# float32 units of a GPU are ten times slower than TF32.
GPU_PRECISION = lax.DotAlgorithmPreset.TF32_TF32_F32


def refuses(case: MatmulCase) -> None:
    """Nothing is refused."""
    return None


def run(
    a: Quantized, b: Quantized, *, case: MatmulCase, out_dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Float[Array, "*stack m n"]:
    """Return A·Bᵀ from dequantised operands."""
    on_gpu = case.hardware.supports("tf32") and case.hardware.platform == "cuda"
    precision = GPU_PRECISION if on_gpu else lax.Precision.HIGHEST
    return reference.fp8_matmul(a, b, out_dtype=out_dtype, precision=precision)
