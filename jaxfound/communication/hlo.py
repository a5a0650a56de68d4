"""Reads the collectives of a compiled program: proof that a layout is really parallel."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KINDS})(?:-start)?\((?P<rest>.*)$")
# The four ways the compiler writes who talks to whom: lists, a reshaped range, mesh axes, pairs.
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)\}")

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
    """Yield every collective in the text of a compiled program (`compiled.as_text()`)."""
    for line in program_text.splitlines():
        found = _LINE.search(line)
        if found:
            kind = found["kind"].replace("collective-", "").replace("-", "_")
            yield Collective(kind, found["shape"].strip(), _groups(found["rest"]))


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


def _groups(attributes: str) -> Groups:
    if found := _LISTED.search(attributes) or _PAIRS.search(attributes):
        return tuple(_numbers(g) for g in found[1].strip("{}").split("},{"))
    if found := _IOTA.search(attributes):
        order = np.arange(math.prod(_numbers(found[3]))).reshape(_numbers(found[3]))
        if found[4]:
            order = order.transpose(_numbers(found[4]))
        return _rows(order.reshape(int(found[1]), int(found[2])))
    if found := _MESH.search(attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        inside = re.findall(r"'(\w+)'", found[2])
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        axes = [list(sizes).index(name) for name in inside]
        outer = [i for i in range(len(sizes)) if i not in axes]
        members = math.prod(sizes[name] for name in inside)
        return _rows(grid.transpose(*outer, *axes).reshape(-1, members))
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)
