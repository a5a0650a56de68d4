"""Which boxes of an array a process holds, which of them are its own, and copies of them.

A box that several processes hold is on each one's disk, so that each can restore from its own; one
of them, the owner, brings it to the shared tier. The holders take turns, so that copies of a state
that every host has are brought there by all hosts together.
"""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax

from jaxfound.resources.checkpoint.leaves import LeafPath, unwrap
from jaxfound.resources.checkpoint.manifest import Box
from jaxfound.resources.checkpoint.snapshot import Stage, to_host


@runtime_checkable
class Device(Protocol):
    """What this file asks of a device; jax's own class has no types."""

    @property
    def id(self) -> int:
        """Its number in the job."""
        ...

    @property
    def process_index(self) -> int:
        """The process that drives it."""
        ...


# Says which process drives a device.
type ProcessOf = Callable[[Device], int]


class Piece(NamedTuple):
    """A copy of one box of a leaf, in host memory where the device has such; `owned` as above."""

    box: Box
    data: jax.Array
    owned: bool


def process_of(device: Device) -> int:
    """Return the process that drives `device`."""
    return device.process_index


def boxes(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Box, tuple[Device, ...]]:
    """Return the distinct boxes of an array and the devices that hold each, in their order."""
    held: dict[Box, tuple[Device, ...]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held[box] = (*held.get(box, ()), device)
    return held


def owners(
    held: Mapping[Box, Sequence[Device]], *, whose: ProcessOf = process_of, first_turn: int = 0
) -> dict[Box, int]:
    """Return the process that owns each box: one of its holders, in turns from `first_turn` on."""
    found: dict[Box, int] = {}
    for turn, (box, devices) in enumerate(sorted(held.items(), key=lambda item: item[0])):
        holders = sorted({whose(device) for device in devices})
        found[box] = holders[(first_turn + turn) % len(holders)]
    return found


def needed(leaf: jax.ShapeDtypeStruct, *, process: int, whose: ProcessOf = process_of) -> set[Box]:
    """Return the boxes of `leaf` that `process` must read; none of an array without elements."""
    sharding = leaf.sharding
    if sharding is None or not leaf.size:
        return set()
    held = boxes(sharding, leaf.shape)
    return {box for box, devices in held.items() if process in map(whose, devices)}


def take_pieces(
    table: Mapping[LeafPath, jax.Array],
    *,
    process: int,
    whose: ProcessOf = process_of,
    stage: Stage | None = None,
) -> dict[LeafPath, tuple[Piece, ...]]:
    """Return copies of every box that `process` holds, each once, random keys as integers.

    Later steps cannot change them; where they are: `snapshot.take`.
    """
    named: list[tuple[LeafPath, Box, bool]] = []
    views: list[jax.Array] = []
    for turn, (path, leaf) in enumerate(sorted(table.items())):
        plain = unwrap(leaf)
        if not plain.size:
            continue
        held = boxes(plain.sharding, plain.shape)
        owner = owners(held, whose=whose, first_turn=turn)
        on_device = {shard.device: shard.data for shard in plain.addressable_shards}
        for box, devices in held.items():
            mine = [device for device in devices if whose(device) == process]
            if mine:
                named.append((path, box, owner[box] == process))
                views.append(on_device[mine[0]])
    copies = to_host(views, stage=stage)
    found: dict[LeafPath, tuple[Piece, ...]] = {}
    for (path, box, owned), data in zip(named, copies, strict=True):
        found[path] = (*found.get(path, ()), Piece(box, data, owned))
    return found
