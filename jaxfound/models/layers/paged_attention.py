"""Attention over pages, a block of them at a time: exact, and never all of a row's pages at once.

The loop ends at the longest row, so that a program compiled for long rows costs what the rows
in it cost.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.models.pages import PagedView

# Tokens of each row that one step of the loop reads: scores of a block are [B N T tokens].
BLOCK_TOKENS = 1024

# Pages [B n] to their keys [B S K H] and values [B S K V], S = n x page, in order.
type ReadPages = Callable[[Int[Array, "B n"]], tuple[jax.Array, jax.Array]]


class Sums(NamedTuple):
    """A softmax under way, in float32.

    Attributes:
        top: largest score so far.
        total: sum of exponentials relative to it.
        out: values weighted by them.
    """

    top: Float[Array, "B K G T 1"]
    total: Float[Array, "B K G T 1"]
    out: Float[Array, "B K G T V"]


def attend_pages(
    q: Float[Array, "B T N H"],
    read: ReadPages,
    *,
    view: PagedView,
    page_size: int,
    kv_heads: int,
    value_dim: int,
    scale: float,
) -> Float[Array, "B T N V"]:
    """Return softmax(q·k·scale) v over the tokens of each row up to the query's own.

    Padding queries and rows without tokens get what they get, or 0; nobody reads it.

    Args:
        q: queries at `view.positions`.
        read: brings keys and values of pages; those of unused slots may be NaN.
        view: of the layer.
        page_size: tokens of a page.
        kv_heads: K; query head n reads key head n // (N / K).
        value_dim: V.
        scale: factor on the scores.
    """
    batch, num_queries, heads, width = q.shape
    q_BTKGH = q.reshape(batch, num_queries, kv_heads, heads // kv_heads, width)
    pages_in_block = min(max(BLOCK_TOKENS // page_size, 1), view.block_table.shape[1])
    short = -view.block_table.shape[1] % pages_in_block
    table = jnp.pad(view.block_table, ((0, 0), (0, short)))
    block = pages_in_block * page_size

    def one(number: Array, sums: Sums) -> Sums:
        ids = jax.lax.dynamic_slice_in_dim(table, number * pages_in_block, pages_in_block, axis=1)
        places_S = number * block + jnp.arange(block)
        alive_BS = places_S[None, :] < view.lengths[:, None]
        # What stands behind a row's last page is no page of its own, perhaps none at all.
        k, v = read(jnp.where(alive_BS[:, ::page_size], ids, 0))
        # Before any product: zero times NaN is NaN.
        k, v = (jnp.where(alive_BS[:, :, None, None], part, 0) for part in (k, v))
        seen_BTS = (places_S[None, None, :] <= view.positions[:, :, None]) & alive_BS[:, None, :]
        return added(sums, q_BTKGH, k, v, seen_BTS=seen_BTS, scale=scale)

    shape = (batch, kv_heads, heads // kv_heads, num_queries)
    start = Sums(
        jnp.full((*shape, 1), NEG_INF, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, value_dim), jnp.float32),
    )
    num_blocks = -(-view.lengths.max() // block)
    sums = jax.lax.fori_loop(0, num_blocks, one, start)
    out_BKGTV = sums.out / jnp.where(sums.total == 0, 1.0, sums.total)
    out_BTNV = jnp.moveaxis(out_BKGTV, 3, 1).reshape(batch, num_queries, heads, value_dim)
    return out_BTNV.astype(q.dtype)


def added(
    sums: Sums,
    q_BTKGH: jax.Array,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    seen_BTS: jax.Array,
    scale: float,
) -> Sums:
    """Return the sums with one more block of tokens."""
    full = jax.lax.Precision.HIGHEST if q_BTKGH.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k, precision=full, preferred_element_type=jnp.float32
    )
    seen = seen_BTS[:, None, None, :, :]
    scores = jnp.where(seen, scores * scale, NEG_INF)
    top = jnp.maximum(sums.top, scores.max(axis=-1, keepdims=True))
    # A query that may see nothing yet has top = NEG_INF and would weigh every key alike.
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    fade = jnp.exp(sums.top - top)
    mixed = jnp.einsum(
        "BKGTS,BSKV->BKGTV",
        weights.astype(v.dtype),
        v,
        precision=full,
        preferred_element_type=jnp.float32,
    )
    return Sums(
        top=top,
        total=sums.total * fade + weights.sum(axis=-1, keepdims=True),
        out=sums.out * fade + mixed,
    )
