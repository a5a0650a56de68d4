"""What a compiler made of a training step: memory, traffic, cover and buffers, as plain data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from jaxfound.communication.cost import COLLECTIVES, CollectiveName
from jaxfound.communication.hlo import Collective, Groups, axes_crossed
from jaxfound.communication.overlap import Exchange, Timeline, timeline
from jaxfound.communication.program import Program
from jaxfound.communication.work import Peaks, seconds_of
from jaxfound.config.parallel import AXES
from jaxfound.parallelism.memory import Ledger
from jaxfound.parallelism.placement import Span, group_on
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.resources.topology import Topology
from jaxfound.training.buffers import Buffer, source_line

FORMAT_VERSION = 1
# What a kind of collective costs; those without a line of their own in the cost model cost like
# another.
COSTS_LIKE: Mapping[str, CollectiveName] = {
    **{name: name for name in COLLECTIVES},
    "ragged_all_to_all": "all_to_all",
    "broadcast": "permute",
}
Link = Literal["inside a host", "across hosts", "one device"]
# XLA's GPU scheduler aims below this share of the memory; of what arguments leave of that, below
# this many per cent, which is the default of the flag.
XLA_SHARE = 0.8
SLOP_FLAG = "xla_gpu_memory_limit_slop_factor"
SLOP_DEFAULT = 95


@dataclass(frozen=True)
class Memory:
    """The compiler's own bytes of one device.

    Attributes:
        arguments: state and batch.
        outputs: new state and metrics.
        aliased: outputs that take the place of arguments.
        temporaries: everything that lives inside the step.
        peak: the most that is alive at one time, arguments included; 0 = not said.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int

    @property
    def total(self) -> int:
        """Bytes that the step needs to run."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class Compared(NamedTuple):
    """The plan's bytes of one device beside the compiler's."""

    what: str
    planned: int
    compiled: int

    @property
    def deviation(self) -> float:
        """The plan's error as a share of the compiler's bytes."""
        return self.planned / self.compiled - 1 if self.compiled else 0.0


@dataclass(frozen=True)
class Sent:
    """One collective of the program.

    Attributes:
        collective: `all_reduce`, `all_gather` …
        axes: mesh axes it crosses.
        group_size: devices of a group.
        link: the slowest that it takes.
        num_bytes: of one device in one call, as communication.cost counts them.
        calls: in a step.
        is_async: whether other operations may run beside it.
        in_branch: whether it is in a branch that a step may not take.
        seconds: of one call; None where a link or the device's peaks are not known.
        beside_s: seconds of what is scheduled beside one call.
        waited_s: seconds of one call in which nothing else runs.
        source: `file:line`, empty where the program does not say.
    """

    collective: str
    axes: tuple[str, ...]
    group_size: int
    link: Link
    num_bytes: int
    calls: int
    is_async: bool
    in_branch: bool
    seconds: float | None
    beside_s: float | None
    waited_s: float | None
    source: str

    @property
    def step_bytes(self) -> int:
        """Bytes of one device in a step."""
        return self.num_bytes * self.calls


class Traffic(NamedTuple):
    """The collectives of one kind over the same axes and links, of one device in a step.

    Attributes:
        axes: mesh axes they cross.
        collective: which kind.
        link: the slowest that they take.
        places: how many the program has.
        in_background: beside how many of those other operations may run.
        calls: in a step.
        num_bytes: of all calls.
        seconds: of all calls; None where a link or the device's peaks are not known.
        waited_s: of those, seconds in which nothing else runs.
    """

    axes: tuple[str, ...]
    collective: str
    link: Link
    places: int
    in_background: int
    calls: int
    num_bytes: int
    seconds: float | None
    waited_s: float | None

    @property
    def covered(self) -> float | None:
        """Share of the seconds in which something else runs; None where they are not known."""
        if self.seconds is None or self.waited_s is None:
            return None
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds else 1.0


class Took(NamedTuple):
    """Seconds of the compilation.

    Attributes:
        trace_s: Python's part.
        lower_s: to the compiler's language.
        compile_s: the compiler's part.
        cpu_s: of all three, on all cores and in processes that were started.
    """

    trace_s: float
    lower_s: float
    compile_s: float
    cpu_s: float


@dataclass(frozen=True)
class CompiledStep:
    """A training step as it was compiled.

    Attributes:
        target: what it was compiled for.
        stand_in: why that is not what was asked for; empty where it is.
        memory: of one device.
        planned: the plan's bytes beside the compiler's.
        capacity_bytes: memory of the device; 0 = not known.
        margin_bytes: of that, what the plan leaves free.
        sent: the collectives, in the order they start.
        buffers: what takes the most temporary memory, by source line.
        work_s: seconds of a step's arithmetic at the device's peaks; None where those are not
            known.
        waited_s: seconds of a step in which only a collective runs.
        took: seconds of the compilation.
        notes: what a reader should know, one sentence each.
    """

    target: str
    stand_in: str
    memory: Memory
    planned: tuple[Compared, ...]
    capacity_bytes: int
    margin_bytes: int
    sent: tuple[Sent, ...]
    buffers: tuple[Buffer, ...]
    work_s: float | None
    waited_s: float | None
    took: Took
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives that leave a device, by axes, kind and link; the most bytes first."""
        found: dict[tuple[tuple[str, ...], str, Link], list[Sent]] = {}
        for one in self.sent:
            if one.link != "one device":
                found.setdefault((one.axes, one.collective, one.link), []).append(one)
        rows = (traffic_of(*key, sent) for key, sent in found.items())
        return tuple(sorted(rows, key=lambda row: -row.num_bytes))

    @property
    def spare_bytes(self) -> int:
        """Bytes that are left besides the margin; negative when the step does not fit."""
        return self.capacity_bytes - self.margin_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None where the memory is not known."""
        return self.spare_bytes >= 0 if self.capacity_bytes else None

    def as_data(self) -> dict[str, object]:
        """Return the record as plain data for JSON, with its format_version."""
        planned = [
            {"what": row.what, "planned": row.planned, "compiled": row.compiled}
            for row in self.planned
        ]
        return {
            **asdict(self),
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "planned": planned,
            "took": self.took._asdict(),
            "fits": self.fits,
        }


def traffic_of(axes: tuple[str, ...], collective: str, link: Link, sent: Sequence[Sent]) -> Traffic:
    """Return the sum of collectives that have these in common."""
    is_timed = all(one.seconds is not None for one in sent)
    return Traffic(
        axes=axes,
        collective=collective,
        link=link,
        places=len(sent),
        in_background=sum(one.is_async for one in sent),
        calls=sum(one.calls for one in sent),
        num_bytes=sum(one.step_bytes for one in sent),
        seconds=sum((s.seconds or 0.0) * s.calls for s in sent) if is_timed else None,
        waited_s=sum((s.waited_s or 0.0) * s.calls for s in sent) if is_timed else None,
    )


def compared(ledger: Ledger, memory: Memory) -> tuple[Compared, ...]:
    """Return the ledger's bytes beside the compiler's, without what the plan leaves free."""
    total = ledger.total_bytes - ledger.of("margin")
    arguments = ledger.argument_bytes
    inside = memory.total - memory.arguments
    return (
        Compared("arguments: parameters, optimizer, inputs", arguments, memory.arguments),
        Compared("inside the step: gradients, activations …", total - arguments, inside),
        Compared("total", total, memory.total),
    )


def sent_in(
    program: Program, plan: ParallelPlan, *, host_of: Sequence[int], peaks: Peaks | None
) -> tuple[tuple[Sent, ...], Timeline, bool]:
    """Return the collectives of a program, its run, and whether the seconds of that are known.

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
    run = timeline(program, work=work, wire=wire)
    sizes: dict[str, int] = dict(zip(AXES, plan.degrees, strict=True))
    rows = tuple(sent_of(e, sizes, hosts, is_timed=is_timed) for e in run.exchanges)
    return rows, run, is_timed


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
        calls=exchange.calls,
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
    sent: Sequence[Sent],
    run: Timeline,
    memory: Memory,
    *,
    capacity_bytes: int,
    slop_percent: int | None,
) -> Iterator[str]:
    """Yield what a reader of the record should know, one sentence each.

    Args:
        sent: the collectives.
        run: of the program.
        memory: of one device.
        capacity_bytes: memory of the device; 0 = not known.
        slop_percent: XLA's flag; None where another scheduler than that of GPUs is at work.
    """
    if slop_percent is not None and capacity_bytes:
        yield from scheduler_notes(sent, memory, capacity_bytes, slop_percent=slop_percent)
    if run.unknown_loops:
        yield f"{len(run.unknown_loops)} loops of unknown length count as one round each"
    branches = sum(e.in_branch for e in sent)
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
    if room <= 0 or memory.total <= aim:
        return
    waiting = sum(not e.is_async for e in sent)
    enough = int(100 * (capacity_bytes * SLOP_DEFAULT / 100 - memory.arguments) / room)
    told = (
        f"the compiler aims below {aim:,} B, because it plans with {XLA_SHARE:.0%} of a GPU's "
        "memory; above that it recomputes products and runs collectives in the foreground, here "
        f"{waiting} of {len(sent)}"
    )
    more = f". XLA_FLAGS=--{SLOP_FLAG}={enough} lets it plan with {SLOP_DEFAULT}%"
    yield told + (more if enough > slop_percent else "")
