"""Rows of packed documents as runs of tokens: where each begins, and whether that says it all."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Runs(NamedTuple):
    """The documents of each row, in order; places behind the last one hold -1.

    Attributes:
        starts: first token of each document.
        lengths: its tokens.
        complete: True if every row is runs in rising order, then padding, and has places for all.
    """

    starts: Int[Array, "B M"]
    lengths: Int[Array, "B M"]
    complete: Bool[Array, ""]


def find_runs(segment_ids: Int[Array, "B T"], *, max_segments: int) -> Runs:
    """Return the first `max_segments` documents of each row."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    real = segment_ids > 0
    first = jnp.arange(segment_ids.shape[1])[None, :] == 0
    # Once 0 always 0, and never back to an earlier document: so no id has two runs.
    in_order = (segment_ids == 0) | (real & (first | ((before > 0) & (segment_ids >= before))))
    number_BT = jnp.cumsum(real & (segment_ids != before), axis=1)
    count_B1 = number_BT[:, -1:]
    wanted_1M = jnp.arange(1, max_segments + 1)[None, :]
    starts = (number_BT[:, None, :] < wanted_1M[:, :, None]).sum(-1)
    lengths = ((number_BT[:, None, :] == wanted_1M[:, :, None]) & real[:, None, :]).sum(-1)
    present = wanted_1M <= count_B1
    return Runs(
        starts=jnp.where(present, starts, -1).astype(jnp.int32),
        lengths=jnp.where(present, lengths, -1).astype(jnp.int32),
        complete=in_order.all() & (count_B1 <= max_segments).all(),
    )


def are_whole(segment_ids: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Return whether every row is one document without padding."""
    return (segment_ids == segment_ids[:, :1]).all() & (segment_ids[:, 0] > 0).all()
