"""Causal attention of rows that are cut over the `context` axis.

Each device holds two chunks of a row's queries (see `parallelism.context`) and all its keys. It
goes through the 2c + 1 pairs of a chunk of queries and a chunk of keys that see each other, and
keeps a running softmax for each of its two chunks, forward; backward it goes through the same
pairs again from the log sums (Dao et al., "FlashAttention", 2022, algorithms 1 and 4). So scores
of one pair exist at a time, and no device waits for one with more pairs.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.parallelism.axes import ShardingRules
from jaxfound.parallelism.context import (
    AXIS,
    CHUNKS_EACH,
    context_degree,
    in_order,
    of_whole_rows,
)


class Pair(NamedTuple):
    """Which chunks meet in a step: of the device's queries, of the row's keys.

    Attributes:
        half: the device's first or second chunk of queries.
        chunk: place of the chunk of keys in its row.
        diagonal: whether they are the same chunk, so that order within it matters.
    """

    half: Int[Array, ""]
    chunk: Int[Array, ""]
    diagonal: Bool[Array, ""]


class Rows(NamedTuple):
    """What one device computes with, chunk by chunk.

    Attributes:
        q: its two chunks of queries, G heads for each of K key heads [2 B L K G H].
        k: keys of the whole row in order [2c B L K H].
        v: values [2c B L K V].
        q_ids: documents of the queries [2 B L].
        k_ids: documents of the keys [2c B L].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_ids: jax.Array
    k_ids: jax.Array


class Running(NamedTuple):
    """The softmax so far of both chunks of queries, float32.

    Attributes:
        total: weighted values relative to the largest score [2 B L K G V].
        top: largest score [2 B L K G].
        mass: sum of weights relative to it [2 B L K G].
    """

    total: jax.Array
    top: jax.Array
    mass: jax.Array


def attend_over_context(
    q: Float[Array, "B T N H"],
    k: Float[Array, "copies S K H"],
    v: Float[Array, "copies S K V"],
    *,
    segment_ids: Int[Array, "B T"],
    scale: float,
    rules: ShardingRules,
) -> Float[Array, "B T N V"]:
    """Return the attention of arranged rows over themselves.

    Args:
        q: queries, rows cut over `context`.
        k: keys of whole rows, a copy for each device of `context`: [c·B T K H].
        v: values, likewise.
        segment_ids: document of each token in the arranged order; 0 is padding.
        scale: factor on the scores.
        rules: how heads and rows lie on the mesh.
    """
    rows = rules.activation_spec(("batch", "seq", "heads", None))
    whole = rules.activation_spec(("copies", None, "kv_heads", None))
    if rows[2] != whole[2]:
        # Key heads that tensor does not divide are whole on each of its devices, whose query heads
        # need not begin where a key head does: each query head gets its own.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        whole = rules.activation_spec(("copies", None, "heads", None))
    own_ids = rules.activation_spec(("batch", "seq"))
    all_ids = PartitionSpec(own_ids[0])
    local = partial(_attend_local, scale=scale, degree=context_degree())
    run = rules.on_each_device(local, takes=(rows, whole, whole, own_ids, all_ids), gives=rows)
    return run(q, k, v, segment_ids, of_whole_rows(segment_ids))


def _attend_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array,
    k_ids: jax.Array,
    *,
    scale: float,
    degree: int,
) -> jax.Array:
    """What one device of the axis does with its queries and whole rows of keys."""
    batch, length, num_heads, width = q.shape
    num_kv_heads = k.shape[2]

    def chunks(x: jax.Array, count: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, count, -1, *x.shape[2:]), 1, 0)

    num_chunks = CHUNKS_EACH * degree
    grouped = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, width)
    rows = Rows(
        q=chunks(grouped, CHUNKS_EACH),
        k=chunks(in_order(k, degree), num_chunks),
        v=chunks(in_order(v, degree), num_chunks),
        q_ids=chunks(q_ids, CHUNKS_EACH),
        k_ids=chunks(in_order(k_ids, degree), num_chunks),
    )
    found = _attention(rows.q, rows.k, rows.v, rows.q_ids, rows.k_ids, scale, num_chunks)
    out = cast(jax.Array, found)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, length, num_heads, -1)
    return out.astype(q.dtype)


def pair_of(step: jax.Array, *, index: jax.Array, num_chunks: int) -> Pair:
    """Return the pair of step 0 … 2c of the device at `index`: first its early chunk's pairs."""
    early = step <= index
    chunk = jnp.where(early, step, step - (index + 1))
    own = jnp.where(early, index, num_chunks - 1 - index)
    return Pair(jnp.where(early, 0, 1), chunk, chunk == own)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array,
    k_ids: jax.Array,
    scale: float,
    num_chunks: int,
) -> jax.Array:
    """Return the attention of both chunks of queries, float32 [2 B L K G V]."""
    return _forward(q, k, v, q_ids, k_ids, scale, num_chunks)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array,
    k_ids: jax.Array,
    scale: float,
    num_chunks: int,
) -> tuple[jax.Array, tuple]:
    rows = Rows(q, k, v, q_ids, k_ids)
    heads = q.shape[:-1]
    start = Running(
        total=jnp.zeros((*heads, v.shape[-1]), jnp.float32),
        top=jnp.full(heads, NEG_INF, jnp.float32),
        mass=jnp.zeros(heads, jnp.float32),
    )
    index = lax.axis_index(AXIS)

    def step(running: Running, number: jax.Array) -> tuple[Running, None]:
        pair = pair_of(number, index=index, num_chunks=num_chunks)
        scores, allowed = _scores(rows, pair, scale=scale)
        total, top, mass = (_at(x, pair.half) for x in running)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(allowed, jnp.exp(scores - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        values = _finite(_at(rows.v, pair.chunk))
        part = _product("BLKGS,BSKV->BLKGV", weights.astype(values.dtype), values)
        new = (total * fade[..., None] + part, new_top, mass * fade + weights.sum(axis=-1))
        return Running(*(_put(x, y, pair.half) for x, y in zip(running, new, strict=True))), None

    running, _ = lax.scan(step, start, jnp.arange(num_chunks + 1))
    mass = jnp.where(running.mass == 0, 1.0, running.mass)
    out = running.total / mass[..., None]
    return out, (*rows, out, running.top + jnp.log(mass))


def _backward(scale: float, num_chunks: int, kept: tuple, grad: jax.Array) -> tuple:
    *arrays, out, log_sum = kept
    rows = Rows(*arrays)
    dot = (grad * out).sum(axis=-1)
    sound = jnp.isfinite(grad).all(axis=-1)
    q, k, v, grad = (_finite(x) for x in (*rows[:3], grad))
    index = lax.axis_index(AXIS)
    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

    def step(grads: tuple, number: jax.Array) -> tuple[tuple, None]:
        pair = pair_of(number, index=index, num_chunks=num_chunks)
        scores, allowed = _scores(rows, pair, scale=scale)
        weights = jnp.exp(scores - _at(log_sum, pair.half)[..., None])
        weights = jnp.where(_at(sound, pair.half)[..., None], weights, jnp.nan)
        weights = jnp.where(allowed, weights, 0.0)
        grad_out = _at(grad, pair.half)
        queries, keys, values = _at(q, pair.half), _at(k, pair.chunk), _at(v, pair.chunk)
        grad_weights = _product("BLKGV,BSKV->BLKGS", grad_out.astype(v.dtype), values)
        inner = weights * (grad_weights - _at(dot, pair.half)[..., None]) * scale
        grad_scores = jnp.where(allowed, inner, 0.0).astype(q.dtype)
        parts = (
            (_product("BLKGS,BSKH->BLKGH", grad_scores, keys), pair.half),
            (_product("BLKGS,BLKGH->BSKH", grad_scores, queries), pair.chunk),
            (
                _product("BLKGS,BLKGV->BSKV", weights.astype(v.dtype), grad_out.astype(v.dtype)),
                pair.chunk,
            ),
        )
        summed = (
            _put(x, _at(x, at) + part, at) for x, (part, at) in zip(grads, parts, strict=True)
        )
        return tuple(summed), None

    grads, _ = lax.scan(step, start, jnp.arange(num_chunks + 1))
    return (*(g.astype(x.dtype) for g, x in zip(grads, rows[:3], strict=True)), None, None)


_attention.defvjp(_forward, _backward)


def _scores(
    rows: Rows, pair: Pair, *, scale: float
) -> tuple[Float[Array, "B L K G S"], Bool[Array, "B L 1 1 S"]]:
    """Return the scores of a pair of chunks, and which query sees which key.

    A query that sees a value that is not finite gets a score that is none: zero weight times NaN
    would otherwise carry it from one document into another.
    """
    queries, keys = _at(rows.q, pair.half), _at(rows.k, pair.chunk)
    q_ids, k_ids = _at(rows.q_ids, pair.half), _at(rows.k_ids, pair.chunk)
    length = q_ids.shape[1]
    earlier = jnp.tril(jnp.ones((length, length), bool)) | ~pair.diagonal
    same = (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids > 0)[:, :, None]
    allowed = (same & earlier[None])[:, :, None, None, :]
    scores = _product("BLKGH,BSKH->BLKGS", queries, keys) * scale
    sound_BSK = jnp.isfinite(_at(rows.v, pair.chunk)).all(axis=-1)
    sound = jnp.moveaxis(sound_BSK, 1, 2)[:, None, :, None, :]
    return jnp.where(allowed, jnp.where(sound, scores, jnp.nan), NEG_INF), allowed


def _product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    full = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(letters, a, b, precision=full, preferred_element_type=jnp.float32)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, part, index, 0)
