"""Cross-entropy without the logits of a whole batch, summed so that tokens weigh alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfound.models.layers.embedding import Head, logits_of
from jaxfound.parallelism.context import parts_here
from jaxfound.parallelism.stream import from_stream, stream_parts


class LossSums(NamedTuple):
    """Sums over counted targets; divide by how many there are in the whole batch.

    Attributes:
        nats: −log p(target).
        log_z_squared: log²Z, what the z-loss weighs (PaLM, section 5).
    """

    nats: Float[Array, ""]
    log_z_squared: Float[Array, ""]


def cross_entropy(
    x: Float[Array, "B T D"],
    matrix: Float[Array, "D V"],
    *,
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    head: Head,
    chunk: int,
) -> LossSums:
    """Return the loss sums of states x against targets; logits of `chunk` tokens a row at a time.

    The backward pass recomputes a chunk's logits, so [B T V] never exists in either direction.
    """
    batch, length = x.shape[:2]
    if chunk == 0 or chunk >= length:
        return _sums(x, matrix, targets, counted, head)
    # Of each device's part of a row the same number of tokens, so that no step waits for one.
    num_parts = parts_here() * stream_parts(x, head.execution.rules)
    of_part = max(chunk // num_parts, 1)
    missing = -(length // num_parts) % of_part

    def pieces(a: jax.Array) -> jax.Array:
        parts = a.reshape(batch, num_parts, -1, *a.shape[2:])
        widths = [(0, missing if i == 2 else 0) for i in range(parts.ndim)]
        cut = jnp.pad(parts, widths).reshape(batch, num_parts, -1, of_part, *a.shape[2:])
        return jnp.moveaxis(cut, 2, 0).reshape(-1, batch, num_parts * of_part, *a.shape[2:])

    @jax.checkpoint
    def one(total: LossSums, piece: tuple[jax.Array, jax.Array, jax.Array]) -> LossSums:
        return jax.tree.map(jnp.add, total, _sums(piece[0], matrix, piece[1], piece[2], head))

    start = LossSums(jnp.zeros(()), jnp.zeros(()))
    chunks = (pieces(x), pieces(targets), pieces(counted))
    return jax.lax.scan(lambda total, p: (one(total, p), None), start, chunks)[0]


def _sums(
    x: jax.Array, matrix: jax.Array, targets: jax.Array, counted: jax.Array, head: Head
) -> LossSums:
    logits_BTV = logits_of(from_stream(x, head.execution.rules), matrix, head=head)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A sum over a one-hot row and not a gather: with the vocabulary split over devices, each
    # adds its own part.
    hot_BTV = jax.nn.one_hot(targets, logits_BTV.shape[-1], dtype=logits_BTV.dtype)
    target_BT = jnp.where(hot_BTV > 0, logits_BTV, 0.0).sum(axis=-1)
    return LossSums(
        jnp.where(counted, log_z_BT - target_BT, 0.0).sum(),
        jnp.where(counted, log_z_BT**2, 0.0).sum(),
    )
