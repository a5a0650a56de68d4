"""What the block-scaled product means: dequantise, multiply in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import Quantized


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    precision: lax.PrecisionLike = lax.Precision.HIGHEST,
) -> Float[Array, "*stack m n"]:
    """Return A·Bᵀ for A [*stack, M, K] and B [N, K], summed in float32."""
    a_full, b_full = a.dequantize(jnp.float32), b.dequantize(jnp.float32)
    product = lax.dot_general(
        a_full,
        b_full,
        (((a_full.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return product.astype(out_dtype)
