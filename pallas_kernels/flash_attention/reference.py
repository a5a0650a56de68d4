"""What attention over packed rows means: every score in float32, masked, softmax, sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    *,
    num_queries: int,
    num_keys: int,
    causal: bool,
) -> Bool[Array, "rows T S"]:
    """Return which query sees which key: same segment, not 0, and not later in the row."""
    allowed = jnp.ones((1, num_queries, num_keys), bool)
    if causal:
        allowed = jnp.tril(allowed)
    if segment_ids is None:
        return allowed
    keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    same = segment_ids[:, :, None] == keys[:, None, :]
    return allowed & same & (segment_ids > 0)[:, :, None]


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    causal: bool,
    scale: float,
) -> Float[Array, "B T N V"]:
    """Return softmax(q·k·scale)·v in float32; a query that sees nothing gets zeros."""
    num_groups = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k_BSNH, v_BSNV = (jnp.repeat(x, num_groups, axis=2) for x in (k, v))
    highest = jax.lax.Precision.HIGHEST
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k_BSNH, precision=highest) * scale
    allowed = visible(
        segment_ids,
        kv_segment_ids,
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        causal=causal,
    )[:, None]
    weights_BNTS = jax.nn.softmax(jnp.where(allowed, scores_BNTS, -1e30), axis=-1)
    # A query that sees no key would weigh all keys alike.
    weights_BNTS = jnp.where(allowed, weights_BNTS, 0.0)
    return jnp.einsum("BNTS,BSNV->BTNV", weights_BNTS, v_BSNV, precision=highest)
