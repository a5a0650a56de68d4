"""Seconds of a collective by the alpha-beta model: messages times latency, bytes over bandwidth.

Rings inside a host; where a group spans hosts, one collective inside each host and one across them
(hierarchical), which is what a communication library does on rails of NICs. Every device of the
job is taken to do the same at the same time, so a host's NICs are shared by all of its devices.
Sources: Hockney (1994) for the model; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations" (2009) for the ring.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

CollectiveName = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute"]


@dataclass(frozen=True)
class Lane:
    """One device's way to its neighbours.

    Attributes:
        bandwidth_bps: bytes/s it sends while it receives as many.
        latency_s: of one message.
    """

    bandwidth_bps: float
    latency_s: float


# Takes no time: the lane of a group that never uses it.
NO_LANE = Lane(float("inf"), 0.0)


@dataclass(frozen=True)
class Group:
    """The devices of one collective and what connects them.

    Attributes:
        inside: devices of the group in each host.
        hosts: hosts the group spans.
        near: lane inside a host.
        far: lane between hosts.
    """

    inside: int
    hosts: int = 1
    near: Lane = NO_LANE
    far: Lane = NO_LANE

    @property
    def size(self) -> int:
        """Devices of the group."""
        return self.inside * self.hosts


def ring_pass(num_bytes: int | float, n: int, lane: Lane) -> float:
    """Return the seconds of one pass of a ring: n-1 messages of a 1/n part of the bytes each."""
    return (n - 1) * (lane.latency_s + num_bytes / n / lane.bandwidth_bps)


def all_gather(num_bytes: int | float, group: Group) -> float:
    """Return the seconds until every device has all `num_bytes`, of which each held 1/n.

    Across hosts first, while the parts are small: device i of every host gathers the i-th part.
    """
    across = ring_pass(num_bytes / group.inside, group.hosts, group.far)
    return across + ring_pass(num_bytes, group.inside, group.near)


def reduce_scatter(num_bytes: int | float, group: Group) -> float:
    """Return the seconds until each device has the sum of 1/n of `num_bytes`; all_gather's mirror.

    Inside hosts first, so that what crosses is summed already.
    """
    return all_gather(num_bytes, group)


def all_reduce(num_bytes: int | float, group: Group) -> float:
    """Return the seconds until every device has the sum of `num_bytes`: the two above in turn."""
    return reduce_scatter(num_bytes, group) + all_gather(num_bytes, group)


def all_to_all(num_bytes: int | float, group: Group) -> float:
    """Return the seconds in which each device sends 1/n of its `num_bytes` to every other.

    Pair by pair: those in the host by its link, those in other hosts by the network, in turn.
    """
    part = num_bytes / group.size
    near = (group.inside - 1) * (group.near.latency_s + part / group.near.bandwidth_bps)
    away = group.size - group.inside
    return near + away * (group.far.latency_s + part / group.far.bandwidth_bps)


def permute(num_bytes: int | float, group: Group) -> float:
    """Return the seconds in which each device sends `num_bytes` to the next; the slowest pair's."""
    if group.size == 1:
        return 0.0
    lane = group.far if group.hosts > 1 else group.near
    return lane.latency_s + num_bytes / lane.bandwidth_bps


COLLECTIVES: Mapping[CollectiveName, Callable[[int | float, Group], float]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "permute": permute,
}
