"""What the wires really carry: pairs of devices, and each collective over all of them.

A collective is run many times in one program, each on the result of the one before, so that the
time of a call of the program hardly counts; the median over such calls is reported.

Bus bandwidth is what each device's link must have carried at the least, so that collectives, sizes
and numbers of devices compare: bytes times a factor (`BUS_FACTORS`) over seconds.
Source of the factors: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.communication.cost import COLLECTIVES, NO_LANE, CollectiveName, Group, Lane
from jaxfound.resources.links import Link
from jaxfound.resources.topology import Device, Topology

AXIS = "all"
ITEM_BYTES = 4
# A message so small that only its latency counts.
TINY_BYTES = 256
# Of one device in one collective, by platform; what is not listed is taken for a GPU's.
SIZES: Mapping[str, tuple[int, ...]] = {"cpu": (2**12, 2**16, 2**20)}
GPU_SIZES = (2**12, 2**16, 2**20, 2**24, 2**26, 2**28)
# More pairs than this would take as many compilations: then neighbours, and device 0 with each.
ALL_PAIRS = 8
# Share of the devices' bytes that crosses each device's link, of n devices.
BUS_FACTORS: Mapping[CollectiveName, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "permute": lambda n: 1.0,
}
type Body = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Pair:
    """Two devices that send to each other at the same time.

    Attributes:
        first, second: their numbers.
        crosses_hosts: whether they are of two processes.
        latency_s: of a message of `TINY_BYTES`.
        bps: bytes/s each way of the largest message.
    """

    first: int
    second: int
    crosses_hosts: bool
    latency_s: float
    bps: float


@dataclass(frozen=True)
class Timed:
    """One collective over all devices.

    Attributes:
        collective: which.
        num_bytes: of one device, as `communication.cost` counts them: of the whole array for
            all_gather and reduce_scatter.
        seconds: of one, the median.
        bus_bps: bytes/s of each device's link.
        expected_s: by the links on record; None where one is not known.
    """

    collective: CollectiveName
    num_bytes: int
    seconds: float
    bus_bps: float
    expected_s: float | None

    @property
    def share(self) -> float | None:
        """Expected over measured seconds: 1 is as on record; None where nothing is."""
        return None if self.expected_s is None else self.expected_s / self.seconds


@dataclass(frozen=True)
class Measured:
    """What the wires of these devices carried.

    Attributes:
        topology: of the devices, with the links on record.
        pairs: pairs of devices.
        sweep: collectives, by size.
        across_bps: bytes/s of each device when all send to another host at once; None on one host.
    """

    topology: Topology
    pairs: tuple[Pair, ...]
    sweep: tuple[Timed, ...]
    across_bps: float | None

    def link(self, *, crosses_hosts: bool) -> Link | None:
        """Return the measured link inside a host or across hosts; None where there is no pair.

        Latency is the median of its pairs'. Bandwidth is the slowest pair's inside a host, and a
        device's when all send at once across: what a plan may count on.
        """
        pairs = [pair for pair in self.pairs if pair.crosses_hosts is crosses_hosts]
        if not pairs:
            return None
        known = self.topology.network if crosses_hosts else self.topology.inside_link
        bps = min(pair.bps for pair in pairs)
        if crosses_hosts and self.across_bps is not None:
            bps = self.across_bps
        latency_s = statistics.median(pair.latency_s for pair in pairs)
        return Link(known.name if known else "link", bps, latency_s, "measured")


def measure(
    topology: Topology,
    *,
    devices: Sequence[Device],
    sizes: Sequence[int] | None = None,
    rounds: int = 5,
    repeats: int = 0,
) -> Measured:
    """Time pairs and collectives; in a job of several processes, all make this call.

    Args:
        topology: of the devices, with the links that are on record.
        devices: who takes part, in the order of processes.
        sizes: bytes of one device, the smallest first; by platform when None.
        rounds: calls of which the median is taken.
        repeats: collectives in one call; 0 = many small ones, few large ones.

    Raises:
        ValueError: for one device, which has nobody to send to.
    """
    if len(devices) < 2:
        raise ValueError(
            "one device has no wires to measure. Probe on two or more: on CPU ask for virtual ones "
            "(--virtual 8), in a job start it under `jaxfound launch`"
        )
    mesh = Mesh(np.array(devices), (AXIS,))
    sizes = sizes or SIZES.get(devices[0].platform, GPU_SIZES)
    took = partial(seconds_of, mesh=mesh, rounds=rounds, repeats=repeats)
    hosts = [device.process_index for device in devices]
    pairs = tuple(timed_pairs(hosts, num_bytes=sizes[-1], took=took))
    group = group_of(topology)
    sweep = tuple(
        timed_collective(name, num_bytes, n=len(devices), group=group, took=took)
        for name in BUS_FACTORS
        for num_bytes in sizes
    )
    across_bps = None
    if topology.hosts > 1:
        shift = [(i, (i + topology.devices_per_host) % len(hosts)) for i in range(len(hosts))]
        across_bps = sizes[-1] / took(permute_by(shift), num_bytes=sizes[-1])
    return Measured(topology, pairs, sweep, across_bps)


type Took = Callable[..., float]


def timed_pairs(hosts: Sequence[int], *, num_bytes: int, took: Took) -> Iterator[Pair]:
    """Yield the pairs of devices, whose processes `hosts` names, with what went between them."""
    n = len(hosts)
    for first in range(n):
        for second in range(first + 1, n):
            if n > ALL_PAIRS and first and second != first + 1:
                continue
            both = permute_by([(first, second), (second, first)])
            yield Pair(
                first,
                second,
                crosses_hosts=hosts[first] != hosts[second],
                latency_s=took(both, num_bytes=TINY_BYTES),
                bps=num_bytes / took(both, num_bytes=num_bytes),
            )


def timed_collective(
    name: CollectiveName, num_bytes: int, *, n: int, group: Group | None, took: Took
) -> Timed:
    """Return the time of one collective over all devices."""
    # Every part of an array that is cut over the devices has the same number of items.
    whole = max(1, num_bytes // (n * ITEM_BYTES)) * n * ITEM_BYTES
    seconds = took(BODIES[name], num_bytes=whole)
    return Timed(
        name,
        whole,
        seconds,
        bus_bps=BUS_FACTORS[name](n) * whole / seconds,
        expected_s=None if group is None else COLLECTIVES[name](whole, group),
    )


def group_of(topology: Topology) -> Group | None:
    """Return all devices of a topology as one group; None where a link is not known."""
    inside, network = topology.inside_link, topology.network
    near = Lane(inside.bandwidth_bps, inside.latency_s) if inside else None
    far = Lane(topology.network_bps, network.latency_s) if network else None
    if topology.devices_per_host == 1:
        near = NO_LANE
    if topology.hosts == 1:
        far = NO_LANE
    if near is None or far is None:
        return None
    return Group(topology.devices_per_host, topology.hosts, near, far)


def seconds_of(body: Body, *, num_bytes: int, mesh: Mesh, rounds: int, repeats: int = 0) -> float:
    """Return the seconds of one `body`, the median over calls of many of them in a row.

    Args:
        body: takes an array [items] of one device, and gives one of that shape; called inside a
            shard_map over all devices.
        num_bytes: of that array.
        repeats: of the body in a call; 0 = chosen by the size.
    """
    # Some milliseconds in a call: the call itself takes some tens of microseconds.
    repeats = repeats or max(4, min(100, 2**24 // max(num_bytes, 1)))
    run = repeated(body, repeats=repeats, mesh=mesh)
    items = num_bytes // ITEM_BYTES
    there = NamedSharding(mesh, PartitionSpec(AXIS))
    start = jax.jit(partial(jnp.zeros, items * mesh.size, jnp.float32), out_shardings=there)()
    jax.block_until_ready(run(start))
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        jax.block_until_ready(run(start))
        times.append(time.perf_counter() - began_s)
    return statistics.median(times) / repeats


def repeated(body: Body, *, repeats: int, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return the compiled program that runs `body` so many times, each on the last's result."""
    spec = PartitionSpec(AXIS)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, value: body(value), x)

    return run


def permute_by(pairs: Sequence[tuple[int, int]]) -> Body:
    """Return the body in which each first of a pair sends its array to the second."""
    return lambda x: jax.lax.ppermute(x, AXIS, pairs)


def _permute(x: jax.Array) -> jax.Array:
    n = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)])


def _all_reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, AXIS)


def _all_gather(x: jax.Array) -> jax.Array:
    # The array of a device is the whole; what it gives is 1/n of it.
    part = x.shape[0] // jax.lax.axis_size(AXIS)
    return jax.lax.all_gather(x[:part], AXIS, tiled=True)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    part = jax.lax.psum_scatter(x, AXIS, tiled=True)
    return jax.lax.dynamic_update_slice(x, part, (0,))


def _all_to_all(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)


# Arrays are zeros, which stay zeros: nothing is computed that would take time.
BODIES: Mapping[CollectiveName, Body] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
