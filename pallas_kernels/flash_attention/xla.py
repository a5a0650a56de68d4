"""Attention through XLA: serves every case on every device.

Where a row has many scores they are computed for some queries at a time, forward and again
backward, so that memory grows with T + S and not with T times S.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash_attention.cases import AttentionCase
from pallas_kernels.formats import round_up

NEG_INF = -1e30
# Scores of one head of one row that are kept at once: all of 1024 x 1024, else half as many.
WHOLE_SCORES = 2**20
CHUNK_SCORES = 2**19
MIN_CHUNK_ROWS = 64


class Queries(NamedTuple):
    """Some queries of each row.

    Attributes:
        values: G query heads of each of the K key heads.
        positions: place of each in its row.
        ids: segments; None = one document a row.
    """

    values: Float[Array, "B T K G H"]
    positions: Int[Array, " T"]
    ids: Int[Array, "B T"] | None


class Keys(NamedTuple):
    """All keys and values of each row."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K V"]
    ids: Int[Array, "B S"] | None


def refuses(case: AttentionCase) -> None:
    """Nothing is refused."""
    return None


def run(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    *,
    case: AttentionCase,
    scale: float,
) -> Float[Array, "B T N V"]:
    """Return the attention of every query, some of them at a time where there are many."""
    keys = Keys(k, v, segment_ids if kv_segment_ids is None else kv_segment_ids)
    num_rows = rows_at_once(q.shape[1], k.shape[1])
    return attend(q, keys, segment_ids, causal=case.causal, scale=scale, num_rows=num_rows)


def rows_at_once(num_queries: int, num_keys: int) -> int:
    """Queries of one row whose scores exist at the same time."""
    if num_queries * num_keys <= WHOLE_SCORES:
        return num_queries
    chunk = CHUNK_SCORES // num_keys // MIN_CHUNK_ROWS * MIN_CHUNK_ROWS
    return max(chunk, MIN_CHUNK_ROWS)


def attend(
    q: Float[Array, "B T N H"],
    keys: Keys,
    ids: Int[Array, "B T"] | None,
    *,
    causal: bool,
    scale: float,
    num_rows: int,
) -> Float[Array, "B T N V"]:
    """Return the attention of `q` over `keys`, `num_rows` queries at a time."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.keys.shape[2]
    q_BTKGH = q.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    one = partial(_attend_some, causal=causal, scale=scale, dtype=q.dtype)
    if num_rows >= num_queries:
        out_BTKGV = one(Queries(q_BTKGH, jnp.arange(num_queries), ids), keys)
    else:
        out_BTKGV = _in_chunks(one, Queries(q_BTKGH, jnp.arange(num_queries), ids), keys, num_rows)
    return out_BTKGV.reshape(batch, num_queries, num_heads, -1)


def _in_chunks(one: partial[Array], queries: Queries, keys: Keys, num_rows: int) -> Array:
    num_queries = len(queries.positions)
    padding = round_up(num_queries, num_rows) - num_queries

    def cut(x: Array, axis: int) -> Array:
        """`x` in chunks of `num_rows` along `axis`, the chunks first."""
        widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        shape = (*x.shape[:axis], -1, num_rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

    chunks = Queries(
        cut(queries.values, 1),
        cut(queries.positions, 0),
        None if queries.ids is None else cut(queries.ids, 1),
    )
    # float32: the chunks' gradients of k and v are summed in the dtype that they come in.
    wide = keys._replace(keys=keys.keys.astype(jnp.float32), values=keys.values.astype(jnp.float32))
    body = jax.checkpoint(lambda chunk: one(chunk, wide), prevent_cse=False)
    out = jnp.moveaxis(lax.map(body, chunks), 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :num_queries]


def _attend_some(
    queries: Queries, keys: Keys, *, causal: bool, scale: float, dtype: jnp.dtype
) -> Float[Array, "B T K G V"]:
    """The attention of some queries over all keys; the products take operands of `dtype`."""
    q_BTKGH, k_BSKH, v_BSKV = queries.values, *(x.astype(dtype) for x in keys[:2])
    allowed = _visible(queries, keys, causal=causal)
    tainted = None
    if queries.ids is not None and allowed is not None:
        tainted = _sees_non_finite(q_BTKGH, k_BSKH, v_BSKV, allowed=allowed)
        # A weight of 0 times NaN would carry it from one document into another.
        q_BTKGH, k_BSKH, v_BSKV = (_finite(x) for x in (q_BTKGH, k_BSKH, v_BSKV))
    full = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=full, preferred_element_type=jnp.float32
    )
    weights_BKGTS = _softmax(scores_BKGTS * scale, allowed).astype(dtype)
    out_BTKGV = jnp.einsum(
        "BKGTS,BSKV->BTKGV",
        weights_BKGTS,
        v_BSKV,
        precision=full,
        preferred_element_type=jnp.float32,
    )
    if tainted is not None:
        out_BTKGV = jnp.where(tainted[..., None], jnp.nan, out_BTKGV)
    return out_BTKGV.astype(dtype)


def _visible(queries: Queries, keys: Keys, *, causal: bool) -> Bool[Array, "rows T S"] | None:
    """Which query sees which key; None = every one sees all."""
    allowed = None
    if causal:
        order_S = jnp.arange(keys.keys.shape[1])
        allowed = (queries.positions[:, None] >= order_S[None, :])[None]
    if queries.ids is None or keys.ids is None:
        return allowed
    same = queries.ids[:, :, None] == keys.ids[:, None, :]
    same &= (queries.ids > 0)[:, :, None]
    return same if allowed is None else same & allowed


def _softmax(scores: Float[Array, "B K G T S"], allowed: Bool[Array, "rows T S"] | None) -> Array:
    if allowed is None:
        return jax.nn.softmax(scores, axis=-1)
    allowed = allowed[:, None, None]
    scores = jnp.where(allowed, scores, NEG_INF)
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    # Masked again: in a row that overflowed, 0 / NaN is not 0.
    return jnp.where(allowed, weights / jnp.where(total == 0, 1.0, total), 0.0)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _sees_non_finite(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    allowed: Bool[Array, "B T S"],
) -> Bool[Array, "B T K G"]:
    """Which queries see a key or value that is not finite, or are not finite themselves."""
    bad_q = ~jnp.isfinite(q).all(-1)
    bad_BSK = ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))
    seen_BTK = jnp.einsum("BTS,BSK->BTK", allowed.astype(jnp.float32), bad_BSK.astype(jnp.float32))
    sees_any = allowed.any(-1)[:, :, None, None]
    return (bad_q & sees_any) | (seen_BTK > 0)[..., None]
