"""The collectives of a compiled step: the axes and links they take, and what covers them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxfound.communication.cost import COLLECTIVES, CollectiveName
from jaxfound.communication.hlo import Collective, Groups, axes_crossed
from jaxfound.communication.overlap import Exchange, timeline
from jaxfound.communication.program import Operation, Program
from jaxfound.communication.work import Peaks, seconds_of
from jaxfound.config.parallel import AXES
from jaxfound.parallelism.pipeline.pipelining import Pipelining, table_of
from jaxfound.parallelism.placement import Span, group_on
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.resources.topology import Topology
from jaxfound.training.buffers import source_line
from jaxfound.training.compiled_step import Link, Memory, Sent
from jaxfound.training.compiler_flags import SLOP_DEFAULT, SLOP_FLAG, XLA_SHARE

# What a kind of collective costs; those without a line of their own in the cost model cost like
# another.
COSTS_LIKE: Mapping[str, CollectiveName] = {
    **{name: name for name in COLLECTIVES},
    "ragged_all_to_all": "all_to_all",
    "broadcast": "permute",
}


class Traced(NamedTuple):
    """The collectives of a program and one run of it.

    Attributes:
        sent: in the order they start.
        work_s: seconds of everything else, at the device's peaks; None where a link or the peaks
            are not known.
        waited_s: seconds in which only a collective runs.
        unknown_loops: loops that count once, because nothing says how often they run.
    """

    sent: tuple[Sent, ...]
    work_s: float | None = None
    waited_s: float | None = None
    unknown_loops: tuple[str, ...] = ()


def sent_in(
    program: Program, plan: ParallelPlan, *, host_of: Sequence[int], peaks: Peaks | None
) -> Traced:
    """Return the collectives of a program, and the seconds of a run where they can be known.

    Args:
        program: compiled for the plan's mesh.
        plan: what it was compiled for.
        host_of: host of each of the program's devices, in its numbering.
        peaks: of the device; None = not known.
    """
    topology = plan.topology
    hosts = np.asarray(host_of)

    def wire(collective: Collective, num_bytes: int) -> float:
        return 0.0 if topology is None else wire_seconds(collective, num_bytes, topology, hosts)

    is_timed = peaks is not None and topology is not None and knows_links(topology)
    work = partial(seconds_of, program=program, peaks=peaks) if peaks else lambda _: 0.0
    run = timeline(program, work=work, wire=wire, shares=partial(tick_shares, plan=plan))
    sizes: dict[str, int] = dict(zip(AXES, plan.degrees, strict=True))
    rows = tuple(sent_of(e, sizes, hosts, is_timed=is_timed) for e in run.exchanges)
    return Traced(
        sent=rows,
        work_s=run.work_s if is_timed else None,
        waited_s=run.waited_s if is_timed else None,
        unknown_loops=run.unknown_loops,
    )


def tick_shares(operation: Operation, *, plan: ParallelPlan) -> list[float] | None:
    """Return the share of a pipeline's ticks that each branch of its switch has on a rank.

    A tick's switch has a branch for each kind of tick, which no other conditional of a step has.
    """
    if plan.schedule is None:
        return None
    table = table_of(Pipelining.of(plan.schedule))
    if len(operation.called) != len(table.kinds) or len(table.kinds) == 2:
        return None
    kinds = table.columns["kind"]
    return [float((kinds == number).mean()) for number in range(len(table.kinds))]


def sent_of(
    exchange: Exchange, axis_sizes: Mapping[str, int], hosts: np.ndarray, *, is_timed: bool
) -> Sent:
    """Return a collective with its axes and its link."""
    collective = exchange.collective
    return Sent(
        collective=collective.kind,
        axes=axes_crossed(collective, axis_sizes),
        group_size=collective.group_size,
        link=link_of(collective, hosts),
        num_bytes=exchange.num_bytes,
        calls=round(exchange.calls),
        is_async=exchange.is_async,
        in_branch=exchange.in_branch,
        seconds=exchange.seconds if is_timed else None,
        beside_s=exchange.beside_s if is_timed else None,
        waited_s=exchange.waited_s if is_timed else None,
        source=source_line(exchange.stack),
    )


def link_of(collective: Collective, hosts: np.ndarray) -> Link:
    """Return the slowest link that a collective takes."""
    if collective.is_local:
        return "one device"
    return "across hosts" if span_of(collective.groups, hosts).hosts > 1 else "inside a host"


def span_of(groups: Groups, hosts: np.ndarray) -> Span:
    """Return over how many hosts groups reach; of uneven ones, as parallelism.placement does."""
    counts = [np.unique(hosts[list(set(group))], return_counts=True)[1] for group in groups]
    most = max((len(c) for c in counts), default=1)
    size = max((int(c.sum()) for c in counts), default=1)
    even = all(len(c) == most and (c == c[0]).all() for c in counts)
    return Span(most, size // most) if even or most == 1 else Span(size, 1)


def knows_links(topology: Topology) -> bool:
    """Return whether every link that a program may take has a bandwidth."""
    inside = topology.devices_per_host == 1 or topology.inside_link is not None
    return inside and (topology.hosts == 1 or topology.network is not None)


def wire_seconds(
    collective: Collective, num_bytes: int, topology: Topology, hosts: np.ndarray
) -> float:
    """Return the seconds of a collective by the alpha-beta model, 0 where a link is not known."""
    group = group_on(span_of(collective.groups, hosts), topology)
    if collective.is_local or group is None:
        return 0.0
    return COLLECTIVES[COSTS_LIKE[collective.kind]](num_bytes, group)


def notes_of(
    traced: Traced, memory: Memory, *, capacity_bytes: int, slop_percent: int | None
) -> Iterator[str]:
    """Yield what a reader of the record should know, one sentence each.

    Args:
        traced: the program's collectives.
        memory: of one device.
        capacity_bytes: memory of the device; 0 = not known.
        slop_percent: XLA's flag; None where another scheduler than that of GPUs is at work.
    """
    if slop_percent is not None and capacity_bytes:
        yield from scheduler_notes(traced.sent, memory, capacity_bytes, slop_percent=slop_percent)
    if traced.unknown_loops:
        yield f"{len(traced.unknown_loops)} loops of unknown length count as one round each"
    branches = sum(e.in_branch for e in traced.sent)
    if branches:
        yield f"{branches} collectives are in branches of which a step takes one"


def scheduler_notes(
    sent: Sequence[Sent], memory: Memory, capacity_bytes: int, *, slop_percent: int
) -> Iterator[str]:
    """Yield what happens above the memory that XLA's GPU scheduler aims at.

    It then recomputes products, and takes collectives out of the background.
    """
    room = int(XLA_SHARE * capacity_bytes) - memory.arguments
    aim = memory.arguments + room * slop_percent // 100
    if memory.total <= aim:
        return
    waiting = sum(not e.is_async for e in sent)
    wanted = capacity_bytes * SLOP_DEFAULT // 100 - memory.arguments
    enough = 100 * wanted // room if room > 0 else 0
    told = (
        f"the compiler aims below {aim:,} B, because it plans with {XLA_SHARE:.0%} of a GPU's "
        "memory; above that it recomputes products and runs collectives in the foreground, here "
        f"{waiting} of {len(sent)}"
    )
    more = f". XLA_FLAGS=--{SLOP_FLAG}={enough} lets it plan with {SLOP_DEFAULT}%"
    yield told + (more if enough > slop_percent else "")
