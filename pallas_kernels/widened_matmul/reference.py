"""What the product with widened weights means: dequantise, multiply, sum in float32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import Quantized


def widened_matmul(
    x: Float[Array, "*tiles m k"],
    w: Quantized,
    *,
    matrices: Int[Array, " p"] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "p m n"]:
    """Return X·Wᵀ in float32, operands in `dtype`: X [M, K] or [P, M, K], W [E, N, K]."""
    if matrices is not None:
        picked = jnp.maximum(matrices, 0)
        w = replace(w, values=w.values[picked], scales=w.scales[picked], turned=None)
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
