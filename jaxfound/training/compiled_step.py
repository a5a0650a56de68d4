"""What a compiler made of a training step, as plain data: memory, traffic, buffers, seconds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from jaxfound.parallelism.memory import Ledger
from jaxfound.training.buffers import Buffer

FORMAT_VERSION = 1
Link = Literal["inside a host", "across hosts", "one device"]


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
        workspace_bytes: what cuDNN adds on the devices, by the plan; a compiler without them asks
            it for nothing. 0 where `memory` has it already.
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
    workspace_bytes: int = 0
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
        """Bytes that are left besides margin and workspace; negative when it does not fit."""
        free = self.capacity_bytes - self.margin_bytes - self.workspace_bytes
        return free - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None where the memory is not known, or is not this program's."""
        return self.spare_bytes >= 0 if self.capacity_bytes and not self.stand_in else None

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


def compared(ledger: Ledger, memory: Memory, *, on_devices: bool = False) -> tuple[Compared, ...]:
    """Return the ledger's bytes beside the compiler's, without what the plan leaves free.

    Args:
        ledger: of the plan.
        memory: the compiler's.
        on_devices: whether it had the devices: without them it asks cuDNN for no workspace.
    """
    total = ledger.total_bytes - ledger.of("margin")
    total -= 0 if on_devices else ledger.of("workspace")
    arguments = ledger.argument_bytes
    inside = memory.total - memory.arguments
    return (
        Compared("arguments: parameters, optimizer, inputs", arguments, memory.arguments),
        Compared("inside the step: gradients, activations …", total - arguments, inside),
        Compared("total", total, memory.total),
    )
