"""Where the seconds of a run go: one activity at any moment, so that they sum to the clock's.

`goodput.jsonl` has for each attempt a record `begin`, and records `spans` that follow each other
without a gap. `jaxfound.training.goodput` reads them.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from jaxfound.resources.metrics import MetricsWriter
from jaxfound.resources.pulse import Phase

Activity = Literal["init", "restore", "compile", "step", "data_wait", "eval", "checkpoint_block"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
# What the main thread does, as time is accounted for.
ACTIVITY_OF: Mapping[Phase, Activity] = {
    "start": "init",
    "restore": "restore",
    "compile": "compile",
    "data": "data_wait",
    "dispatch": "step",
    "wait": "step",
    "loop": "step",
    "eval": "eval",
    "save": "checkpoint_block",
    "end": "checkpoint_block",
}


class TimeLedger:
    """Seconds of each activity since the last `take`; the first activity is `init`.

    Args:
        clock: seconds, of any origin.
        unix: Unix time in seconds, read once.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._since_s = clock()
        self.began_s = unix()
        self.activity: Activity = "init"
        self.step = 0
        self._seconds: dict[Activity, float] = {}

    def enter(self, activity: Activity) -> None:
        """Begin an activity, which ends the one before."""
        now_s = self._clock()
        spent_s = self._seconds.get(self.activity, 0.0) + now_s - self._since_s
        self._seconds[self.activity] = spent_s
        self._since_s, self.activity = now_s, activity

    def hear(self, phase: Phase, step: int) -> None:
        """Begin the activity of a phase, after so many steps; what a `Pulse` calls."""
        self.step = step
        self.enter(ACTIVITY_OF[phase])

    def take(self) -> dict[Activity, float]:
        """Return the seconds of each activity since the last call, and begin anew."""
        self.enter(self.activity)
        seconds, self._seconds = self._seconds, {}
        return seconds


class TimeLedgerFile:
    """Appends what a ledger holds to a run's `goodput.jsonl`, the rest of it on exit.

    Args:
        path: the file.
        ledger: of this attempt, from its start.
        first_step: optimizer steps done when the attempt goes on.
    """

    def __init__(self, path: Path, ledger: TimeLedger, *, first_step: int) -> None:
        self._ledger = ledger
        self._writer = MetricsWriter(path)
        ledger.step = first_step
        self._from_step = first_step
        self._writer.write("begin", step=first_step, began_s=ledger.began_s)

    def write(self) -> None:
        """Append the seconds since the last call, and the steps they went into."""
        step, seconds = self._ledger.step, self._ledger.take()
        self._writer.write("spans", step=step, from_step=self._from_step, seconds=seconds)
        self._from_step = step

    def __enter__(self) -> "TimeLedgerFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.write()
        self._writer.close()
