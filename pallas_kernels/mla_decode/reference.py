"""What MLA decode means: softmax over the tokens of each sequence's pages, in float32."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.mla_decode import fp8_cache

HIGHEST = lax.Precision.HIGHEST


class Decoded(NamedTuple):
    """Result of one decode step.

    Attributes:
        out: attention-weighted latents, in the dtype of the queries.
        lse: natural logarithm of the sum of exponentials, float32; +inf where nothing is seen.
    """

    out: Float[Array, "batch queries heads latent"]
    lse: Float[Array, "batch queries heads"]


def mla_decode(
    q: Float[Array, "batch queries heads width"],
    cache: Shaped[Array, "pages page cache_width"],
    *,
    block_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    latent: int,
    sm_scale: float,
) -> Decoded:
    """Return attention of absorbed queries over a paged latent cache.

    Query t of T sees the first `length - T + t + 1` tokens. The first `latent` channels of a
    token are its value. Slots behind a length and table entries behind the last page are never
    used, whatever they hold. A cache of bytes holds tokens as `fp8_cache` packs them.
    """
    page, width = cache.shape[1], q.shape[3]
    max_pages = block_table.shape[1]
    used = jnp.arange(max_pages)[None, :] * page < lengths[:, None]
    tokens = cache[jnp.where(used, block_table, 0)]
    tokens = fp8_cache.unpack(tokens) if cache.dtype == jnp.uint8 else tokens
    tokens = tokens.reshape(len(q), max_pages * page, width)
    position = jnp.arange(max_pages * page)
    # Before any product: zero times NaN is NaN.
    alive = position[None, :] < lengths[:, None]
    tokens = jnp.where(alive[:, :, None], tokens.astype(jnp.float32), 0.0)
    num_seen = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1])[None, :] + 1
    seen = position[None, None, :] < num_seen[:, :, None]

    scores = jnp.einsum("BTNC,BSC->BTNS", q.astype(jnp.float32), tokens, precision=HIGHEST)
    scores = jnp.where(seen[:, :, None, :], scores * sm_scale, -jnp.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
    mass = weights.sum(axis=-1)
    some = mass > 0
    out = jnp.einsum("BTNS,BSC->BTNC", weights, tokens[:, :, :latent], precision=HIGHEST)
    out = out / jnp.where(some, mass, 1.0)[..., None]
    lse = jnp.where(some, jnp.log(jnp.where(some, mass, 1.0)) + largest[..., 0], jnp.inf)
    return Decoded(out=out.astype(q.dtype), lse=lse)
