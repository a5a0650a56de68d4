"""Reads the collectives of a compiled program: proof that a layout is really parallel."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KINDS})(?:-start)?\((?P<rest>.*)$")
# The ways the compiler writes who talks to whom: lists, a reshaped range, mesh axes (or a factor of
# one: 'a':(2)4 is 4 of what is left of axis a after its first 2), pairs, and nothing for everyone.
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)\}")
_EVERYONE = re.compile(r"replica_groups=\{\}")
_DEVICES = re.compile(r"^HloModule .*?num_partitions=(\d+)", re.MULTILINE)

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


def collectives(program_text: str) -> Iterator[Collective]:
    """Yield every collective in the text of a compiled program (`compiled.as_text()`).

    Raises:
        ValueError: if a collective does not say who takes part in a way that is known here; it
            must not pass for one that crosses nothing.
    """
    header = _DEVICES.search(program_text)
    num_devices = int(header[1]) if header else 1
    for line in program_text.splitlines():
        found = _LINE.search(line)
        if found:
            kind = found["kind"].replace("collective-", "").replace("-", "_")
            groups = _groups(found["rest"], num_devices)
            yield Collective(kind, found["shape"].strip(), groups)


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


def _groups(attributes: str, num_devices: int) -> Groups:
    if found := _LISTED.search(attributes) or _PAIRS.search(attributes):
        return tuple(_numbers(g) for g in found[1].strip("{}").split("},{"))
    if found := _IOTA.search(attributes):
        order = np.arange(math.prod(_numbers(found[3]))).reshape(_numbers(found[3]))
        if found[4]:
            order = order.transpose(_numbers(found[4]))
        return tuple(tuple(row) for row in order.reshape(int(found[1]), int(found[2])).tolist())
    if found := _MESH.search(attributes):
        axes = {name: int(size) for name, size in _MESH_AXIS.findall(found[1])}
        return _mesh_groups(axes, _MESH_PART.findall(found[2]))
    if _EVERYONE.search(attributes):
        return (tuple(range(num_devices)),)
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


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
