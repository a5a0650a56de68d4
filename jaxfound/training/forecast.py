"""What the plan said of a step's memory and time, beside what was measured."""

import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import jax

from jaxfound.data.batch import Batch
from jaxfound.parallelism.explain import bytes_text, seconds_text
from jaxfound.parallelism.mesh import OnMesh
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.training.aot import memory_of
from jaxfound.training.compiled_step import Memory
from jaxfound.training.events import Event
from jaxfound.training.state import TrainState
from jaxfound.training.step import TrainStep

FORMAT_VERSION = 1
# From these shares of what was measured on, a plan is said to be off.
MEMORY_LIMIT, TIME_LIMIT = 0.10, 0.15
# Steps of an attempt after which its plan is checked, and the fewest whose median says anything.
# The first one, which compiles, does not count.
CHECK_AFTER, FEWEST = 20, 3


class Beside(NamedTuple):
    """What was planned beside what was measured; bytes of one device, or seconds of a step.

    Attributes:
        what: of which quantity.
        planned: by the plan.
        measured: by the compiler, the allocator or the clock; None where nothing tells it apart.
    """

    what: str
    planned: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """The plan's error as a share of what was measured; None where there is nothing to say."""
        return self.planned / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class Forecast:
    """What a plan says before anything runs.

    Attributes:
        device: kind of the devices.
        ledger: bytes of one device by kind, margin left out.
        argument_bytes: of the ledger, state and batch.
        terms_s: seconds of a step by what takes them; empty where they are not predicted.
        refused: why no time is predicted; empty where it is.
    """

    device: str
    ledger: Mapping[str, int]
    argument_bytes: int
    terms_s: Mapping[str, float]
    refused: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.ledger.values())

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where they are not predicted."""
        return sum(self.terms_s.values()) if self.terms_s else None


@dataclass(frozen=True)
class Checked:
    """A forecast beside a run's first steps.

    Attributes:
        forecast: of the plan.
        steps: whose median is measured.
        step_s: median seconds of a step, completion to completion.
        memory: the compiler's bytes of one device.
        peak_bytes: the most that the allocator held; 0 where the device does not say.
        measured_s: seconds of a step by term, from a profile; empty where there is none.
    """

    forecast: Forecast
    steps: int
    step_s: float
    memory: Memory
    peak_bytes: int
    measured_s: Mapping[str, float]

    @property
    def bytes_beside(self) -> tuple[Beside, ...]:
        """Memory: each kind that can be told apart, the compiler's sum, the allocator's peak."""
        forecast, memory = self.forecast, self.memory
        inside = forecast.total_bytes - forecast.argument_bytes
        rows = [
            Beside("arguments", forecast.argument_bytes, memory.arguments),
            Beside("inside the step", inside, memory.total - memory.arguments),
            Beside("the program", forecast.total_bytes, memory.total),
        ]
        if self.peak_bytes:
            rows.append(Beside("peak of the allocator", forecast.total_bytes, self.peak_bytes))
        return tuple(rows)

    @property
    def seconds_beside(self) -> tuple[Beside, ...]:
        """Time: each term, and the step; nothing where no time is predicted."""
        planned, measured = self.forecast.terms_s, self.measured_s
        if self.forecast.step_s is None:
            return ()
        names = dict.fromkeys((*planned, *measured))
        rows = [Beside(name, planned.get(name, 0.0), measured.get(name)) for name in names]
        return (*rows, Beside("the step", self.forecast.step_s, self.step_s))

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data for JSON, with its format_version."""
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "bytes": [beside_data(row) for row in self.bytes_beside],
            "seconds": [beside_data(row) for row in self.seconds_beside],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Checked":
        """Return what `as_data` gave."""
        named = {key: data[key] for key in ("steps", "step_s", "peak_bytes", "measured_s")}
        return cls(forecast=Forecast(**data["forecast"]), memory=Memory(**data["memory"]), **named)


def beside_data(row: Beside) -> dict[str, object]:
    """Return a comparison as plain data, with its error."""
    return {**row._asdict(), "error": row.error}


def forecast_of(plan: ParallelPlan) -> Forecast:
    """Return what a plan says of memory and time.

    Of the traffic all seconds count: how much of it arithmetic hides, only the compiled program or
    a profile can say.
    """
    kind = plan.topology.device_kind if plan.topology is not None else "this device"
    ledger = {e.kind: e.num_bytes for e in plan.ledger.entries if e.kind != "margin"}
    terms, refused = {}, ""
    if plan.terms is None:
        refused = f"no peak is on record for {kind}, so its seconds are not predicted"
    elif plan.wire_s is None:
        refused = f"the links between {kind} are not known, so a step's seconds are not predicted"
    else:
        terms = {name: s for name, s in plan.terms._asdict().items() if s or name != "waiting"}
        terms |= {"collectives": plan.wire_s} if plan.wires else {}
    return Forecast(kind, ledger, plan.ledger.argument_bytes, terms, refused)


def allocator_peak() -> int:
    """Return the most bytes that this process's allocators have held of one device; 0 = not said.

    Of several devices, the fullest one.
    """
    found = (device.memory_stats() or {} for device in jax.local_devices())
    return max((stats.get("peak_bytes_in_use", 0) for stats in found), default=0)


def make_check(
    plan: ParallelPlan, step: TrainStep, state: TrainState, batch: Batch
) -> Callable[[int, float], Checked]:
    """Return what puts a plan beside the first steps: their number and median seconds.

    Args:
        plan: of the run.
        step: jitted; it has run when the result is called.
        state: what the first step is given.
        batch: the same, or its shapes.
    """
    # The state itself is gone by then: a step consumes it.
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )

    def check(steps: int, step_s: float) -> Checked:
        # Both are there since the first step: nothing is traced or compiled anew.
        memory = memory_of(cast(OnMesh, step).lower(like, batch).compile())
        return Checked(forecast_of(plan), steps, step_s, memory, allocator_peak(), {})

    return check


def with_check[T](
    events: Generator[Event, None, T], *, check: Callable[[int, float], Checked], last_step: int
) -> Generator[Event, None, T]:
    """Yield the events of an attempt, and `planned` once its first steps are done.

    Args:
        events: of the attempt.
        check: called with the steps whose median was taken, and its seconds.
        last_step: of the run; a short one is checked there.
    """
    times: list[float] = []
    told = False
    while True:
        try:
            event = next(events)
        except StopIteration as finished:
            return finished.value
        yield event
        if told or event.kind != "step":
            continue
        times.append(cast(float, event.values["step_time_s"]))
        timed = times[1:]
        due = len(times) > CHECK_AFTER or event.step == last_step
        if due and len(timed) >= FEWEST:
            told = True
            found = check(len(timed), statistics.median(timed))
            yield Event("planned", event.step, found.as_data())


def report_lines(checked: Checked) -> Iterator[str]:
    """Yield planned versus measured as text."""
    yield f"planned and measured, by {checked.steps} steps:"
    for name, num_bytes in checked.forecast.ledger.items():
        if num_bytes:
            yield f"    {name:<20} {bytes_text(num_bytes):>10}"
    # The ledger is of GPUs: another compiler keeps other things.
    is_judged = not checked.forecast.refused
    for row in checked.bytes_beside:
        yield beside_line(row, bytes_text, limit=MEMORY_LIMIT if is_judged else math.inf)
    if checked.forecast.refused:
        yield f"  {checked.forecast.refused}; measured: {seconds_text(checked.step_s)} a step"
    for row in checked.seconds_beside:
        yield beside_line(row, seconds_text, limit=TIME_LIMIT)


def beside_line(row: Beside, text: Callable[[float], str], *, limit: float) -> str:
    """Return a comparison as a line."""
    told = f"  {row.what:<22} {text(row.planned):>10}"
    if row.measured is None or row.error is None:
        return told
    off = f" more than {limit:.0%} off" if abs(row.error) > limit else ""
    return f"{told} {text(row.measured):>10}  {row.error:+.1%}{off}"
