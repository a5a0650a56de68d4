"""What the product with widened weights means: dequantise, multiply, sum in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import Quantized


def widened_matmul(
    x: Float[Array, "*experts m k"], w: Quantized, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "experts m n"]:
    """Return X·Wᵀ in float32, operands in `dtype`: rows of X [M, K] or [E, M, K], W [E, N, K]."""
    weights = w.dequantize(dtype)
    rows = jnp.broadcast_to(x, (len(weights), *x.shape[-2:])).astype(dtype)
    exact = jnp.dtype(dtype).itemsize >= 4
    return lax.dot_general(
        rows,
        weights,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
