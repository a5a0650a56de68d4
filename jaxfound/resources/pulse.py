"""How far a process is and what it does: what its watchdog, its agent and its peers see."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

Phase = Literal[
    "start", "restore", "compile", "data", "dispatch", "wait", "loop", "eval", "save", "end"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Phases whose length says nothing about the next: they have a limit of their own.
SLOW: frozenset[Phase] = frozenset({"start", "restore", "compile", "eval", "save", "end"})
# Weight of the newest step in the moving mean of step times.
NEWEST = 0.1


class Beat(NamedTuple):
    """One look at a process.

    Attributes:
        number: grows with every look, so that one that is silent can be told from one that waits.
        step: optimizer steps handed to the devices.
        phase: what its main thread does.
        age_s: for how long already.
        committed: newest step on disk; -1 = none yet.
    """

    number: int
    step: int
    phase: Phase
    age_s: float | int
    committed: int

    def to_text(self) -> str:
        """Return it as JSON; `parse` reads it back."""
        return json.dumps(self._asdict())

    @classmethod
    def parse(cls, text: str) -> "Beat":
        """Return the beat of a text that `to_text` gave."""
        return cls(**json.loads(text))


class Pulse:
    """What the main thread tells of itself; other threads only look.

    Args:
        clock: monotonic seconds.

    Attributes:
        hears: called by the main thread with each phase that begins and the steps so far.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.hears: Callable[[Phase, int], None] = lambda phase, step: None
        # One tuple, replaced as a whole: a thread that looks never sees half of a change.
        self._now: tuple[Phase, int, float] = ("start", 0, clock())
        self._spent_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._looks = 0
        self.step_s = 0.0
        self.committed = -1

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Say that `phase` begins, and that `step` steps were handed over if it is given."""
        before, steps, since = self._now
        now = self._clock()
        self._spent_s[before] += now - since
        done = steps if step is None else step
        self._now = (phase, done, now)
        self.hears(phase, done)

    def step_took(self, seconds: float | int) -> None:
        """Take a step's duration into the moving mean `step_s`."""
        before = self.step_s
        self.step_s = seconds if not before else before + NEWEST * (seconds - before)

    def take_spent(self) -> Mapping[Phase, float]:
        """Return the seconds in each phase since the last call, the present one left out."""
        spent, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return spent

    def forgive(self) -> None:
        """Count the present phase from now on: the whole process was stopped for a time."""
        phase, step, _ = self._now
        self._now = (phase, step, self._clock())

    def look(self) -> Beat:
        """Return where the process is; for one thread only."""
        phase, step, since = self._now
        self._looks += 1
        return Beat(self._looks, step, phase, self._clock() - since, self.committed)


def write_heartbeat(path: Path, beat: Beat, *, attempt: int) -> None:
    """Put `beat` into the file at `path`, whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({**beat._asdict(), "attempt": attempt}), "utf-8")
    os.replace(beside, path)


class Heartbeat(NamedTuple):
    """What an agent reads of a process: its last beat, the attempt it joined, and how old that is.

    Attributes:
        beat: the last one.
        attempt: of the job.
        silent_s: since it was written.
    """

    beat: Beat
    attempt: int
    silent_s: float


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return what was written to `path` last; None before the first time."""
    try:
        values = json.loads(path.read_text("utf-8"))
        silent_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    attempt = cast(int, values.pop("attempt"))
    return Heartbeat(Beat(**values), attempt, silent_s)
