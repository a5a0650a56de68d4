"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfound.models.layers.parameter import scale


class RMSNorm(nnx.Module):
    """Scales the last dim to unit mean square, then by a learned factor.

    Source: Zhang & Sennrich, 2019.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        self.scale = scale(((None, size),))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x [..., size] in x's format; the statistics are float32."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        factor = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * inverse * factor).astype(x.dtype)
