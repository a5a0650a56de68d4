"""What a grouped product means: each row times the matrix of its group, in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "rows k"], w: Float[Array, "groups k n"], group_sizes: Int[Array, " groups"]
) -> Float[Array, "rows n"]:
    """Return `x[i] @ w[g]` for each row i of group g; zeros for rows behind the groups.

    Rows are in the order of their groups. JAX differentiates this function into what the
    gradients mean: a group without rows gets zeros, a row without a group too.
    """
    rows = jnp.arange(len(x))
    group_of_row = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")
    has_group = (group_of_row < len(group_sizes))[:, None]
    # Before the product: zero times NaN is NaN.
    x = jnp.where(has_group, x.astype(jnp.float32), 0.0)
    out = jnp.zeros((len(x), w.shape[-1]), jnp.float32)
    for group in range(len(w)):
        product = jnp.dot(x, w[group].astype(jnp.float32), precision=lax.Precision.HIGHEST)
        out = jnp.where((group_of_row == group)[:, None], product, out)
    return out
