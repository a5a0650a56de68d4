"""Paged latent caches with poisoned dead slots and junk tables; attention over them by numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla_decode

JUNK = 2_147_480_000
# Each as one program, not as one for each of its operations.
pack, unpack = jax.jit(mla_decode.pack), jax.jit(mla_decode.unpack)
decode = jax.jit(
    mla_decode.mla_decode, static_argnames=("latent", "sm_scale", "split_len", "backend")
)


def make_batch(
    lengths, num_heads, *, num_queries=1, page=64, latent=512, rope=64, room=1, dtype=jnp.float32
):
    """Arguments of `mla_decode`: shuffled pages, NaN in every dead slot, junk behind each table."""
    rng = np.random.default_rng([num_heads, num_queries, *lengths])
    width = latent + rope
    num_pages = [-(-length // page) for length in lengths]
    total = sum(num_pages) + 2
    cache = np.full((total, page, width), np.nan, np.float32)
    table = np.full((len(lengths), max(num_pages) + room), JUNK, np.int32)
    free = list(rng.permutation(total))
    for row, length in enumerate(lengths):
        tokens = np.clip(rng.standard_normal((length, width)) / 10, -1, 1)
        for index in range(num_pages[row]):
            table[row, index] = chosen = free.pop()
            part = tokens[index * page : (index + 1) * page]
            cache[chosen, : len(part)] = part
    q = np.clip(rng.standard_normal((len(lengths), num_queries, num_heads, width)) / 2, -1, 1)
    return {
        "q": jnp.asarray(q, dtype),
        "cache": jnp.asarray(cache, dtype),
        "block_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
    }


def by_numpy(batch, *, latent, sm_scale):
    """Attention row by row in float64, from what the arrays hold."""
    q, cache = np.asarray(batch["q"], np.float64), np.asarray(batch["cache"], np.float64)
    table, lengths = np.asarray(batch["block_table"]), np.asarray(batch["lengths"])
    page = cache.shape[1]
    out = np.zeros((*q.shape[:3], latent))
    lse = np.full(q.shape[:3], np.inf)
    for b, t in np.ndindex(*q.shape[:2]):
        num_seen = lengths[b] - q.shape[1] + t + 1
        if num_seen <= 0:
            continue
        pages = cache[table[b, : -(-lengths[b] // page)]]
        tokens = pages.reshape(-1, cache.shape[2])[:num_seen]
        scores = q[b, t] @ tokens.T * sm_scale
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - largest)
        lse[b, t] = largest[:, 0] + np.log(weights.sum(axis=-1))
        out[b, t] = weights @ tokens[:, :latent] / weights.sum(axis=-1, keepdims=True)
    return out, lse
