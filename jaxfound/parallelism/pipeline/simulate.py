"""How long a schedule takes and what it keeps when each rank runs as soon as it can."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxfound.parallelism.pipeline.schedule import Action, Schedule, ScheduleError, Step, results

# Whole numbers are as good: they keep the published formulas exact.
type Number = float | int


@dataclass(frozen=True)
class Costs:
    """How long the passes of one micro-batch through one stage take, in any one unit.

    Attributes:
        forward: F.
        input_grad: I.
        weight_grad: W.
        pair: F beside a whole B of another micro-batch; without it their sum.
    """

    forward: Number = 1
    input_grad: Number = 1
    weight_grad: Number = 1
    pair: Number | None = None

    @property
    def backward(self) -> Number:
        """A whole B."""
        return self.input_grad + self.weight_grad

    def duration(self, step: Step) -> Number:
        """Return how long a step takes; only a whole B of another micro-batch overlaps its F."""
        alone = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }
        overlaps = len(step) == 2 and step[1].op == "B"
        if self.pair is not None and overlaps and step[0].microbatch != step[1].microbatch:
            return self.pair
        return sum(alone[action.op] for action in step)


class TimedStep(NamedTuple):
    """A step with its times."""

    step: Step
    start: Number
    end: Number


@dataclass(frozen=True)
class Simulation:
    """A schedule as it runs.

    Attributes:
        steps: the steps of each rank with their times, in order.
        makespan: from the first start to the last end.
        bubbles: how long each rank waits in that time.
        peaks: most micro-batches that each rank holds at once, from F until B, or until W.
    """

    steps: tuple[tuple[TimedStep, ...], ...]
    makespan: Number
    bubbles: tuple[Number, ...]
    peaks: tuple[int, ...]

    @property
    def bubble(self) -> Number:
        """The longest wait of a rank."""
        return max(self.bubbles)

    @property
    def bubble_share(self) -> float:
        """The part of all ranks' time that is waiting, 0 to 1."""
        return sum(self.bubbles) / (len(self.bubbles) * self.makespan)

    @property
    def efficiency(self) -> float:
        """The part of all ranks' time that is work, 0 to 1."""
        return 1 - self.bubble_share


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Return when every step runs: in order, once its rank is free and what it waits for is there.

    Messages take no time.

    Raises:
        ScheduleError: if the ranks end up waiting for each other.
    """
    ready: dict[Action, Number] = {}
    timed: list[list[TimedStep]] = [[] for _ in schedule.orders]
    moving = True
    while moving:
        moving = False
        for order, done in zip(schedule.orders, timed, strict=True):
            while len(done) < len(order) and _run(order[len(done)], done, ready, schedule, costs):
                moving = True
    if any(len(done) < len(order) for order, done in zip(schedule.orders, timed, strict=True)):
        raise ScheduleError(deadlock(schedule, [len(done) for done in timed], ready))
    return summarize(schedule, timed, makespan=max(done[-1].end for done in timed if done))


def summarize(schedule: Schedule, timed: list[list[TimedStep]], *, makespan: Number) -> Simulation:
    """Return the simulation of ranks that run their steps at these times."""
    busy = [sum(one.end - one.start for one in done) for done in timed]
    return Simulation(
        steps=tuple(tuple(done) for done in timed),
        makespan=makespan,
        bubbles=tuple(makespan - time for time in busy),
        peaks=tuple(_peak(order) for order in schedule.orders),
    )


def deadlock(schedule: Schedule, positions: list[int], there: dict[Action, Number]) -> str:
    """Return which ranks wait for what, for a schedule that cannot go on."""
    waiting: list[str] = []
    for rank, (order, position) in enumerate(zip(schedule.orders, positions, strict=True)):
        if position == len(order):
            continue
        missing = [text(one) for one in schedule.waits_for(order[position]) if one not in there]
        step = " + ".join(text(action) for action in order[position])
        waiting.append(f"rank {rank} before {step} for {' and '.join(missing)}")
    return (
        f"{schedule.name} deadlocks, every rank that is not done waits: {'; '.join(waiting)}. "
        "Move the steps that produce these results forward in their ranks' orders"
    )


def text(action: Action) -> str:
    """Return an action as a reader says it."""
    return f"{action.op} of micro-batch {action.microbatch} at stage {action.stage}"


def _run(
    step: Step,
    done: list[TimedStep],
    ready: dict[Action, Number],
    schedule: Schedule,
    costs: Costs,
) -> bool:
    """Run a rank's next step if what it waits for is known; return whether it was."""
    needed = schedule.waits_for(step)
    if not all(result in ready for result in needed):
        return False
    start = max([done[-1].end if done else 0, *(ready[result] for result in needed)])
    end = start + costs.duration(step)
    done.append(TimedStep(step, start, end))
    ready.update((result, end) for result in results(step))
    return True


def _peak(order: tuple[Step, ...]) -> int:
    held = most = 0
    for step in order:
        held += sum(action.op == "F" for action in step)
        most = max(most, held)
        held -= sum(action.op in ("B", "W") for action in step)
    return most
