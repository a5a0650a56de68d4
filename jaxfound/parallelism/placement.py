"""Which axis runs over which link: the six axes laid over hosts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from jaxfound.communication.cost import NO_LANE, Group, Lane
from jaxfound.config.parallel import AXES, AxisName
from jaxfound.parallelism.axes import BATCH_AXES
from jaxfound.resources.topology import Topology

# Axes that are never moved: rows stay in the order in which processes read them, and tensor runs
# over neighbours, because it sends in the middle of every layer.
FIXED: tuple[AxisName, ...] = (*BATCH_AXES, "tensor")


class Span(NamedTuple):
    """Where the groups of one axis lie; of uneven groups, the one over the most hosts.

    Attributes:
        hosts: hosts that a group spans.
        inside: devices of a group in one host; 1 where hosts hold unequal parts of a group, whose
            ring then runs at the speed of the network.
    """

    hosts: int
    inside: int


@dataclass(frozen=True)
class Placement:
    """The axes over the devices of a topology.

    Attributes:
        order: the axes from the one that varies slowest over device numbers to the one that runs
            over neighbours.
        spans: by axis, in mesh order.
    """

    order: tuple[AxisName, ...] = AXES
    spans: tuple[Span, ...] = ()

    def span(self, axis: AxisName) -> Span:
        """Return where the groups of `axis` lie."""
        return self.spans[AXES.index(axis)]

    def crosses(self, axis: AxisName) -> bool:
        """Return whether what `axis` sends leaves a host."""
        return self.span(axis).hosts > 1


def orders(degrees: Mapping[AxisName, int]) -> Iterator[tuple[AxisName, ...]]:
    """Yield the orders worth trying, mesh order first: each gives the devices another place."""
    moved: list[AxisName] = [a for a in AXES if degrees[a] > 1]
    idle: tuple[AxisName, ...] = tuple(a for a in AXES if degrees[a] == 1)
    for order in permutations(moved):
        fixed = [a for a in order if a in FIXED]
        rising = fixed == [a for a in FIXED if a in fixed]
        last = "tensor" not in order or order[-1] == "tensor"
        if rising and last:
            yield (*idle, *order)


def place(
    degrees: Mapping[AxisName, int], topology: Topology, *, order: tuple[AxisName, ...] = AXES
) -> Placement:
    """Return where the groups of every axis lie when the devices are walked in `order`."""
    host = np.arange(topology.num_devices) // topology.devices_per_host
    grid = host.reshape([degrees[a] for a in order])
    return Placement(order, tuple(_span(grid, order.index(a)) for a in AXES))


def _span(hosts: np.ndarray, position: int) -> Span:
    """Return the span of the axis at `position` of an array of host numbers."""
    groups = np.moveaxis(hosts, position, -1).reshape(-1, hosts.shape[position])
    if (groups == groups[:, :1]).all():
        return Span(1, groups.shape[1])
    counts = [np.unique(group, return_counts=True)[1] for group in groups]
    most = max(len(c) for c in counts)
    even = all(len(c) == most and (c == c[0]).all() for c in counts)
    return Span(most, groups.shape[1] // most) if even else Span(groups.shape[1], 1)


def group_of(axis: AxisName, placement: Placement, topology: Topology) -> Group | None:
    """Return the group that a collective over `axis` runs in; None when a link is not known."""
    return group_on(placement.span(axis), topology)


def group_on(span: Span, topology: Topology) -> Group | None:
    """Return the group of devices that lie so on a topology; None when a link is not known."""
    near, far = NO_LANE, NO_LANE
    if span.inside > 1:
        if topology.inside_link is None:
            return None
        near = Lane(topology.inside_link.bandwidth_bps, topology.inside_link.latency_s)
    if span.hosts > 1:
        if topology.network is None:
            return None
        far = Lane(topology.network_bps, topology.network.latency_s)
    return Group(inside=span.inside, hosts=span.hosts, near=near, far=far)
