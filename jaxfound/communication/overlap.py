"""How much of each collective of a scheduled program is covered by what runs beside it.

The program is walked as a device runs it: one operation after the other, and collectives one after
the other on wires of their own. One that has been started goes on while other operations run, and
its end waits for what is left of it; one without a start and an end stops everything. A loop counts
as often as it runs. Of the branches of a conditional the cheapest is taken to run, so that nothing
is covered by arithmetic that may be skipped; what the others send is listed all the same. Where it
is known how often each branch runs, as of the ticks of a pipeline, it counts as often.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfound.communication.hlo import START, Collective, collective_of, kind_of, sent_bytes
from jaxfound.communication.program import Operation, Program, type_bytes

DONE = "-done"
type Work = Callable[[Operation], float]
type Wire = Callable[[Collective, int], float]
# How often each branch of a conditional runs for one run of it; None where nobody knows.
type Shares = Callable[[Operation], Sequence[float] | None]


@dataclass(frozen=True)
class Exchange:
    """A collective of a program, and what becomes of its time.

    Attributes:
        collective: what is sent, and between whom.
        operation: its name in the program.
        stack: `file:line` it comes from, then of each caller; empty where nothing is said.
        num_bytes: of one device in one call, as communication.cost counts them.
        calls: how often the program runs it, on average where branches are shared out.
        is_async: whether other operations may run between its start and its end.
        in_branch: whether it is in a branch of a conditional, and may not run at all.
        seconds: of one call.
        beside_s: seconds of what is scheduled between its start and its end, in one call.
        waited_s: seconds in which nothing else ran, in one call.
    """

    collective: Collective
    operation: str
    stack: tuple[str, ...]
    num_bytes: int
    calls: float | int
    is_async: bool
    in_branch: bool
    seconds: float
    beside_s: float
    waited_s: float

    @property
    def covered(self) -> float:
        """Share of its seconds in which something else ran; 1 for one that takes no time."""
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds else 1.0


@dataclass(frozen=True)
class Timeline:
    """One run of a program, or of one of its computations.

    Attributes:
        exchanges: its collectives, in the order they start.
        work_s: seconds of everything else.
        waited_s: seconds in which a collective was waited for.
        unknown_loops: loops counted once, because the text does not say how often they run.
    """

    exchanges: tuple[Exchange, ...] = ()
    work_s: float = 0.0
    waited_s: float = 0.0
    unknown_loops: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of work and of waiting."""
        return self.work_s + self.waited_s

    def times(self, count: float | int) -> "Timeline":
        """Return the timeline of a loop that runs this `count` times."""
        return replace(
            self,
            exchanges=tuple(replace(e, calls=e.calls * count) for e in self.exchanges),
            work_s=self.work_s * count,
            waited_s=self.waited_s * count,
        )


def timeline(
    program: Program,
    *,
    work: Work,
    wire: Wire,
    shares: Shares = lambda _: None,
    computation: str | None = None,
) -> Timeline:
    """Return one run of a scheduled program.

    Args:
        program: from `read_program`.
        work: seconds of an operation that is no collective and runs nothing else.
        wire: seconds of a collective with so many bytes a device.
        shares: of each branch of a conditional.
        computation: the part of the program to run; all of it by default.
    """
    return _Walk(program, work, wire, shares).of(computation or program.entry)


@dataclass
class _Walk:
    """Walks computations, each once; what is found is kept."""

    program: Program
    work: Work
    wire: Wire
    shares: Shares
    found: dict[str, Timeline] = field(default_factory=dict)

    def of(self, computation: str) -> Timeline:
        if computation not in self.found:
            operations = self.program.computations.get(computation, ())
            clock = _Clock(self, {op.operands[0]: op for op in operations if _is_end(op)})
            for operation in operations:
                clock.run(operation)
            self.found[computation] = clock.timeline()
        return self.found[computation]

    def loop(self, operation: Operation) -> Timeline:
        """Return what a while loop does: its condition runs once more than its body."""
        count = operation.trip_count
        body = self.of(operation.attribute("body") or "")
        check = self.of(operation.attribute("condition") or "")
        once = body.times(1 if count is None else count)
        unknown = () if count is not None else (operation.name,)
        return replace(
            once,
            work_s=once.work_s + check.work_s * ((count or 1) + 1),
            unknown_loops=(*body.unknown_loops, *unknown),
        )

    def branches(self, operation: Operation) -> Timeline:
        """Return the branches by their shares, or the cheapest, with what any of them may send."""
        ways = [self.of(name) for name in operation.called]
        shares = self.shares(operation)
        if shares is not None:
            parts = [way.times(share) for way, share in zip(ways, shares, strict=True)]
            return Timeline(
                exchanges=tuple(e for part in parts for e in part.exchanges if e.calls),
                work_s=sum(part.work_s for part in parts),
                waited_s=sum(part.waited_s for part in parts),
                unknown_loops=tuple(name for part in parts for name in part.unknown_loops),
            )
        cheapest = min(ways, key=lambda way: way.work_s, default=Timeline())
        sent = (replace(e, in_branch=True) for way in ways for e in way.exchanges)
        return replace(cheapest, exchanges=tuple(sent))


INSIDE: Mapping[str, Callable[[_Walk, Operation], Timeline]] = {
    "while": _Walk.loop,
    "conditional": _Walk.branches,
    "call": lambda walk, operation: walk.of(operation.attribute("to_apply") or ""),
}


@dataclass
class _Clock:
    """Runs the operations of one computation in order.

    Attributes:
        walk: knows the other computations.
        ends: the end of each operation that is started, by the start's name.
        now: seconds since the computation began.
        wire_free: when the wires have sent all that was started.
    """

    walk: _Walk
    ends: Mapping[str, Operation]
    now: float = 0.0
    wire_free: float = 0.0
    work_s: float = 0.0
    waited_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    under_way: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    unknown_loops: list[str] = field(default_factory=list)

    def run(self, operation: Operation) -> None:
        collective = collective_of(operation, self.walk.program)
        if collective is not None:
            self.start(operation, collective)
        elif operation.opcode in INSIDE:
            self.enter(INSIDE[operation.opcode](self.walk, operation))
        elif operation.opcode.endswith("-update"):
            self.hand_on(operation)
        elif operation.opcode.endswith(DONE):
            self.end(operation)
        else:
            self.pass_time(self.walk.work(operation))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.work_s += seconds

    def enter(self, inside: Timeline) -> None:
        self.now += inside.total_s
        self.work_s += inside.work_s
        self.waited_s += inside.waited_s
        self.exchanges += inside.exchanges
        self.unknown_loops += inside.unknown_loops

    def start(self, operation: Operation, collective: Collective) -> None:
        """Put a collective on the wires; wait for it where it has no end of its own."""
        is_async = operation.opcode.endswith(START)
        num_bytes = self.bytes_of(operation, collective)
        seconds = self.walk.wire(collective, num_bytes)
        self.wire_free = max(self.now, self.wire_free) + seconds
        self.exchanges.append(
            Exchange(
                collective=collective,
                operation=operation.name,
                stack=self.walk.program.stack(operation),
                num_bytes=num_bytes,
                calls=1,
                is_async=is_async,
                in_branch=False,
                seconds=seconds,
                beside_s=0.0,
                waited_s=0.0,
            )
        )
        place = (len(self.exchanges) - 1, self.wire_free, self.work_s)
        if is_async:
            self.under_way[operation.name] = place
        else:
            self.wait(place)

    def hand_on(self, operation: Operation) -> None:
        """Let an operation stand for the start that it continues."""
        if operation.operands and operation.operands[0] in self.under_way:
            self.under_way[operation.name] = self.under_way.pop(operation.operands[0])

    def end(self, operation: Operation) -> None:
        place = self.under_way.pop(operation.operands[0], None) if operation.operands else None
        if place is not None:
            self.wait(place)

    def wait(self, place: tuple[int, float, float]) -> None:
        """Stop until a collective is over, and note how long that took."""
        index, over_at, work_before = place
        waited = max(0.0, over_at - self.now)
        self.now += waited
        self.waited_s += waited
        self.exchanges[index] = replace(
            self.exchanges[index], beside_s=self.work_s - work_before, waited_s=waited
        )

    def bytes_of(self, operation: Operation, collective: Collective) -> int:
        """Return what a collective sends; a start repeats its operands, so its end is asked.

        Of a ragged exchange one side has room for the worst case: it sends no more than the other.
        """
        end = self.ends.get(operation.name)
        starts = kind_of(operation) is not None and operation.opcode.endswith(START)
        printed = end.type if starts and end is not None else collective.shape
        sent = sent_bytes(collective, type_bytes(printed))
        rows = self.walk.program.operand(operation, 0)
        if collective.kind == "ragged_all_to_all" and rows is not None:
            return min(sent, rows.num_bytes)
        return sent

    def timeline(self) -> Timeline:
        return Timeline(
            tuple(self.exchanges), self.work_s, self.waited_s, tuple(self.unknown_loops)
        )


def _is_end(operation: Operation) -> bool:
    return operation.opcode.endswith(DONE) and bool(operation.operands)
