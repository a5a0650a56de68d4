"""Reads the collectives of a compiled program: proof that a layout is really parallel."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfound.communication.program import (
    Operation,
    Program,
    num_devices,
    numbers,
    read_operation,
)

# The collectives by the compiler's word for them; with `-start` they run beside what follows.
KINDS: Mapping[str, str] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
START = "-start"
# A fusion of a sum and of the cut that keeps one part of it: what it sends is a reduce-scatter.
FUSED_SCATTER = "all-reduce-scatter"
# The ways the compiler writes who talks to whom: lists, a reshaped range, mesh axes (or a factor of
# one: 'a':(2)4 is 4 of what is left of axis a after its first 2), pairs, and nothing for everyone.
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)\}")
_EVERYONE = re.compile(r"replica_groups=\{\}")

type Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` …
        shape: the result's type as the compiler prints it.
        groups: device numbers that exchange data with each other, one tuple a group.
    """

    kind: str
    shape: str
    groups: Groups

    @property
    def is_local(self) -> bool:
        """True when every group is a single device: nothing crosses a wire."""
        return all(len(set(g)) <= 1 for g in self.groups)

    @property
    def group_size(self) -> int:
        """Devices of the largest group."""
        return max((len(set(g)) for g in self.groups), default=1)


def collectives(program_text: str) -> Iterator[Collective]:
    """Yield every collective in the text of a compiled program (`compiled.as_text()`).

    Raises:
        ValueError: if a collective does not say who takes part in a way that is known here; it
            must not pass for one that crosses nothing.
    """
    devices = num_devices(program_text)
    for line in program_text.splitlines():
        operation = read_operation(line)
        if operation is not None and kind_of(operation):
            yield _collective(operation, devices)


def kind_of(operation: Operation) -> str | None:
    """Return which collective an operation is or starts, None when it is none."""
    return KINDS.get(operation.opcode.removesuffix(START))


def collective_of(operation: Operation, program: Program) -> Collective | None:
    """Return the collective that an operation is, starts or has inside; None when it has none.

    Inside means in the computation that a fusion or an asynchronous call runs; loops, branches and
    plain calls have operations of their own.

    Raises:
        ValueError: as `collectives` does.
    """
    if kind_of(operation):
        return _collective(operation, program.num_devices)
    if operation.opcode.removesuffix(START) not in ("fusion", "async"):
        return None
    for name in operation.called:
        for inner in program.computations.get(name, ()):
            found = collective_of(inner, program)
            if found is not None and found.kind == "all_reduce" and FUSED_SCATTER in name:
                return Collective("reduce_scatter", operation.type, found.groups)
            if found is not None:
                return found
    return None


def sent_bytes(collective: Collective, result_bytes: int) -> int:
    """Return the bytes of one device in one call, as communication.cost counts them.

    Of an all_gather what it has afterwards, of the others what it has before.

    Args:
        collective: which one.
        result_bytes: of its results, without the operands that a start repeats.
    """
    scatters = collective.kind == "reduce_scatter"
    return result_bytes * collective.group_size if scatters else result_bytes


def _collective(operation: Operation, devices: int) -> Collective:
    kind = KINDS[operation.opcode.removesuffix(START)]
    return Collective(kind, operation.type, _groups(operation.attributes, devices))


def axes_crossed(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group differ.

    Args:
        collective: from a program compiled for that mesh.
        axis_sizes: sizes of the mesh axes in mesh order, devices numbered in the same order.
    """
    shape, names = tuple(axis_sizes.values()), tuple(axis_sizes)
    crossed: set[str] = set()
    for group in collective.groups:
        places = np.array(np.unravel_index(np.array(group), shape))
        varies = (places != places[:, :1]).any(axis=1)
        crossed |= {n for n, v in zip(names, varies, strict=True) if v}
    return tuple(n for n in names if n in crossed)


def _groups(attributes: str, devices: int) -> Groups:
    if found := _LISTED.search(attributes) or _PAIRS.search(attributes):
        return tuple(numbers(g) for g in found[1].strip("{}").split("},{"))
    if found := _IOTA.search(attributes):
        order = np.arange(math.prod(numbers(found[3]))).reshape(numbers(found[3]))
        if found[4]:
            order = order.transpose(numbers(found[4]))
        return tuple(tuple(row) for row in order.reshape(int(found[1]), int(found[2])).tolist())
    if found := _MESH.search(attributes):
        axes = {name: int(size) for name, size in _MESH_AXIS.findall(found[1])}
        return _mesh_groups(axes, _MESH_PART.findall(found[2]))
    if _EVERYONE.search(attributes):
        return (tuple(range(devices)),)
    raise ValueError(f"no known replica_groups or source_target_pairs in: {attributes[:200]}")


def _mesh_groups(axes: Mapping[str, int], inside: Iterable[tuple[str, str, str]]) -> Groups:
    """Return the devices that differ only along `inside`: (axis, factor before, size) each."""
    names, sizes = list(axes), tuple(axes.values())
    places = np.array(np.unravel_index(np.arange(math.prod(sizes)), sizes))
    outside = places.copy()
    for name, before, size in inside:
        row, part = names.index(name), int(size or axes[name])
        step = axes[name] // (int(before or 1) * part)
        outside[row] -= places[row] // step % part * step
    group_of = np.ravel_multi_index(tuple(outside), sizes)
    return tuple(tuple(np.flatnonzero(group_of == g).tolist()) for g in np.unique(group_of))
