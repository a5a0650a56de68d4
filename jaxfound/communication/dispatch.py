"""The one seam through which rows go to the devices that own them, and come back.

A device packs its rows as one run for each peer of a mesh axis. `exchange` brings every run to its
peer, where it stands at the head of that device's block; `exchange_back` is the way home. Each is
the other's gradient, and neither does arithmetic: a row arrives bit for bit as it left.

A block has room for the longest run there can be, since shapes are static and no row may be lost.
Where the platform has a ragged all_to_all the wire carries the rows of the runs alone; elsewhere a
dense one carries the blocks, padding included.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxfound.config.parallel import AxisName

Transport = Literal["platform", "dense", "ragged"]
# Platforms whose compiler has ragged-all-to-all; XLA:CPU refuses it as unimplemented.
RAGGED_PLATFORMS = ("cuda", "tpu")


class Runs(NamedTuple):
    """What one device sends to each peer of an axis, and what each peer sends to it.

    Attributes:
        offsets: first packed row of each peer's run; the runs follow each other without gaps.
        sizes: rows of each run.
        peer_offsets: where this device's run begins among each peer's packed rows.
        peer_sizes: rows that each peer sends to this device.
    """

    offsets: Int[Array, " N"]
    sizes: Int[Array, " N"]
    peer_offsets: Int[Array, " N"]
    peer_sizes: Int[Array, " N"]


def announce(sizes: Int[Array, "kinds N"], *, axis: AxisName) -> tuple[Runs, ...]:
    """Tell every peer how many rows it gets; return the runs of each kind of rows.

    Call it inside a shard_map that is manual over `axis`.

    Args:
        sizes: rows of each kind that go to each peer.
        axis: mesh axis of the peers.
    """
    offsets = jnp.cumsum(sizes, axis=1) - sizes
    mine = jnp.stack([offsets, sizes], axis=1).astype(jnp.int32)
    theirs = jax.lax.all_to_all(mine, axis, split_axis=2, concat_axis=2, tiled=True)
    return tuple(Runs(*ours, *peers) for ours, peers in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Exchange:
    """An exchange over a mesh axis, with the sizes that do not depend on the data.

    Attributes:
        axis: mesh axis of the peers, manual where the exchange is called.
        packed_rows: room for a device's packed rows.
        longest_run: most rows that one device can send to another; room for more would be
            wasted, and for less would lose rows.
        transport: what carries the rows; by the platform the program is compiled for, unless a
            test or a measurement names one.
    """

    axis: AxisName
    packed_rows: int
    longest_run: int
    transport: Transport = "platform"

    def there(self, rows: Shaped[Array, "R D"], runs: Runs) -> Shaped[Array, "N L D"]:
        """Return the rows that each peer sent here, at the head of the peer's block, then zeros."""
        return _there(rows, runs, self)

    def back(self, blocks: Shaped[Array, "N L D"], runs: Runs) -> Shaped[Array, "R D"]:
        """Return the rows that were sent out to the peers, packed as they left, then zeros.

        What stands in a block behind the rows that were received is never read.
        """
        return _back(blocks, runs, self)


@partial(jax.custom_vjp, nondiff_argnames=("how",))
def _there(rows: Array, runs: Runs, how: Exchange) -> Array:
    return _carried(rows, runs, how, by=THERE)


@partial(jax.custom_vjp, nondiff_argnames=("how",))
def _back(blocks: Array, runs: Runs, how: Exchange) -> Array:
    return _carried(blocks, runs, how, by=BACK)


# A row that travels keeps its value, so its gradient travels home: no factor, no sum.
_there.defvjp(
    lambda rows, runs, how: (_there(rows, runs, how), runs),
    lambda how, runs, grads: (_back(grads, runs, how), None),
)
_back.defvjp(
    lambda blocks, runs, how: (_back(blocks, runs, how), runs),
    lambda how, runs, grads: (_there(grads, runs, how), None),
)

type Carry = Callable[[Array, Runs, Exchange], Array]


def _carried(rows: Array, runs: Runs, how: Exchange, *, by: Mapping[Transport, Carry]) -> Array:
    """Send rows as `how` says; left to the platform, that is settled when a program is lowered."""
    if how.transport != "platform":
        return by[how.transport](rows, runs, how)

    def dense(rows: Array, runs: Runs) -> Array:
        return by["dense"](rows, runs, how)

    def ragged(rows: Array, runs: Runs) -> Array:
        return by["ragged"](rows, runs, how)

    of_platform = dict.fromkeys(RAGGED_PLATFORMS, ragged)
    return jax.lax.platform_dependent(rows, runs, default=dense, **of_platform)


def _dense_there(rows: Array, runs: Runs, how: Exchange) -> Array:
    places = jnp.arange(how.longest_run)[None, :]
    sources = jnp.where(
        places < runs.sizes[:, None], runs.offsets[:, None] + places, how.packed_rows
    )
    blocks = rows.at[sources].get(mode="fill", fill_value=0)
    return jax.lax.all_to_all(blocks, how.axis, split_axis=0, concat_axis=0, tiled=True)


def _dense_back(blocks: Array, runs: Runs, how: Exchange) -> Array:
    home = jax.lax.all_to_all(blocks, how.axis, split_axis=0, concat_axis=0, tiled=True)
    rows, ends = jnp.arange(how.packed_rows), runs.offsets + runs.sizes
    peer = jnp.searchsorted(ends, rows, side="right", method="compare_all")
    place = rows - runs.offsets.at[peer].get(mode="fill", fill_value=0)
    # A row behind the last run has peer N, which is outside the blocks.
    return home.at[peer, place].get(mode="fill", fill_value=0)


def _ragged_there(rows: Array, runs: Runs, how: Exchange) -> Array:
    num_peers = len(runs.sizes)
    room = jnp.zeros((num_peers * how.longest_run, *rows.shape[1:]), rows.dtype)
    # The offsets of a run are those on the device that receives it.
    my_block = jnp.full(num_peers, jax.lax.axis_index(how.axis) * how.longest_run, jnp.int32)
    received = jax.lax.ragged_all_to_all(
        rows, room, runs.offsets, runs.sizes, my_block, runs.peer_sizes, axis_name=how.axis
    )
    return received.reshape(num_peers, how.longest_run, *rows.shape[1:])


def _ragged_back(blocks: Array, runs: Runs, how: Exchange) -> Array:
    num_peers = len(runs.sizes)
    room = jnp.zeros((how.packed_rows, *blocks.shape[2:]), blocks.dtype)
    heads = jnp.arange(num_peers, dtype=jnp.int32) * how.longest_run
    return jax.lax.ragged_all_to_all(
        blocks.reshape(-1, *blocks.shape[2:]),
        room,
        heads,
        runs.peer_sizes,
        runs.peer_offsets,
        runs.sizes,
        axis_name=how.axis,
    )


THERE: Mapping[Transport, Carry] = {"dense": _dense_there, "ragged": _ragged_there}
BACK: Mapping[Transport, Carry] = {"dense": _dense_back, "ragged": _ragged_back}
