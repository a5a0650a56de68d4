"""What a run recorded, sorted: its curves, checkpoints, interruptions, samples, how it ended."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxfound.cli.pages.chart import Mark, Point
from jaxfound.resources.metrics import Record, read_metrics

State = Literal["finished", "stopped", "failed", "open", "empty"]

# Events that may follow the end of a run.
AFTERWARDS = ("sample", "checkpoint")


@dataclass(frozen=True)
class History:
    """The records of a run in the order in which they were written.

    Attributes:
        records: those that no later resume repeated.
        resumes, stops, non_finite, demoted: every one of them, also those before a resume.
        num_superseded: records of steps that a resume ran again.
    """

    records: tuple[Record, ...] = ()
    resumes: tuple[Record, ...] = ()
    stops: tuple[Record, ...] = ()
    non_finite: tuple[Record, ...] = ()
    demoted: tuple[Record, ...] = ()
    num_superseded: int = 0

    def of(self, event: str) -> list[Record]:
        """Return the records of one kind of event."""
        return [r for r in self.records if r["event"] == event]

    def curve(self, field: str, *, event: str = "train") -> list[Point]:
        """Return the values of one field over the steps."""
        found = ((step_of(r), number(r, field)) for r in self.of(event))
        return [Point(step, value) for step, value in found if value is not None]

    def last(self, field: str, *, event: str = "train") -> Point | None:
        """Return the last value of a field, None when there is none."""
        return next(reversed(self.curve(field, event=event)), None)

    def median(self, field: str) -> float | None:
        """Return the median of a field's finite values, None when there is none."""
        found = [p.value for p in self.curve(field) if math.isfinite(p.value)]
        return statistics.median(found) if found else None

    @property
    def num_steps(self) -> int:
        """Optimizer steps that the records know of."""
        return max((step_of(r) for r in self.records), default=0)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one step, None before the first was recorded."""
        for record in reversed(self.of("train")):
            rate, took = number(record, "tokens_per_s"), number(record, "step_time_s")
            if rate and took and math.isfinite(rate * took):
                return round(rate * took)
        return None

    @property
    def idle_share(self) -> float | None:
        """Share of the recorded step times in which the devices had nothing to do."""
        pairs = [(number(r, "idle_s"), number(r, "step_time_s")) for r in self.of("train")]
        known = [(idle, took) for idle, took in pairs if idle is not None and took is not None]
        took_s = sum(took for _, took in known)
        return sum(idle for idle, _ in known) / took_s if took_s > 0 else None

    @property
    def state(self) -> State:
        """How the run ended as far as its records say; `open` when they do not."""
        ends: Mapping[object, State] = {
            "finished": "finished",
            "stopped": "stopped",
            "non_finite": "failed",
        }
        events = [r["event"] for r in self.records if r["event"] not in AFTERWARDS]
        if not events:
            return "empty"
        return ends.get(events[-1], "open")

    @property
    def moments(self) -> list[float]:
        """Unix times of all records."""
        found = (number(r, "time_s") for r in self.records)
        return [t for t in found if t is not None and math.isfinite(t)]

    def marks(self) -> tuple[Mark, ...]:
        """Return the interruptions for the charts."""
        resumed = [
            Mark(step_of(r), "resume", f"resumed from step {step_of(r):,}") for r in self.resumes
        ]
        stopped = [
            Mark(step_of(r), "stopped", f"stopped by {r.get('signal')} at step {step_of(r):,}")
            for r in self.stops
        ]
        bad = [
            Mark(step_of(r), "bad", f"step {step_of(r):,} was not finite; its update was skipped")
            for r in self.non_finite
        ]
        return tuple(sorted([*resumed, *stopped, *bad]))


def read_history(path: Path) -> History:
    """Return the history in a run's record; an empty one when the file is not there.

    Raises:
        ValueError: if a line other than a torn last one is not a record; names the line.
    """
    if not path.exists():
        return History()
    return sorted_out(read_metrics(path, superseded="mark"))


def sorted_out(records: Iterable[Record]) -> History:
    """Return the history of records that say whether a resume repeated them."""
    every = list(records)
    kept = tuple(r for r in every if not r.get("superseded"))
    return History(
        records=kept,
        resumes=_events(every, "resume"),
        stops=_events(every, "stopped"),
        non_finite=_events(every, "non_finite"),
        demoted=_events(every, "demoted"),
        num_superseded=len(every) - len(kept),
    )


def number(record: Record, field: str) -> float | None:
    """Return a field as a number, None when it is absent or something else."""
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def step_of(record: Record) -> int:
    """Return the step of a record, 0 when it is no number."""
    step = number(record, "step")
    return int(step) if step is not None and math.isfinite(step) else 0


def _events(records: Iterable[Record], event: str) -> tuple[Record, ...]:
    return tuple(r for r in records if r["event"] == event)
