"""Whether a job hangs, and who holds it up: judged from beats alone, without a clock.

With collectives every process shows the same completed step, so the phase decides: the one that is
not in `wait` holds up those that are.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxfound.resources.pulse import SLOW, Beat

# A step this many times as long as usual is no step any more.
TIMES_USUAL = 10


class Limits(NamedTuple):
    """How long a phase may last, in seconds.

    Attributes:
        fast_s: data, dispatch, wait, loop: at least this.
        slow_s: compile, save, restore, eval and the like.
        step_s: usual time of a step; 0 = not known yet.
    """

    fast_s: float | int
    slow_s: float | int
    step_s: float | int = 0.0

    def of(self, beat: Beat) -> float | int:
        """Return how long the phase of `beat` may last."""
        return self.slow_s if beat.phase in SLOW else max(self.fast_s, TIMES_USUAL * self.step_s)

    def exceeded(self, beat: Beat) -> bool:
        """Say whether `beat` is of a phase that lasts too long."""
        return beat.age_s > self.of(beat)


class Hang(NamedTuple):
    """A job that stands still.

    Attributes:
        guilty: the processes that hold it up; empty = all wait for each other.
        text: why, for people.
    """

    guilty: tuple[int, ...]
    text: str


def find_hang(
    beats: Mapping[int, Beat], *, process: int, limits: Limits, silent: frozenset[int] = frozenset()
) -> Hang | None:
    """Return why `process` stands still, None while it does not or somebody may hold it up.

    Args:
        beats: the last beat of each process, its own included.
        process: who asks.
        limits: how long phases may last.
        silent: processes whose beats have stopped.
    """
    if not limits.exceeded(beats[process]):
        return None
    # Slower than usual is not stuck: as long as one of them moves, the others wait for it.
    if any(_moves(beat, limits) for p, beat in beats.items() if p not in silent):
        return None
    guilty = tuple(sorted(silent)) or _not_waiting(beats) or _behind(beats)
    shown = ", ".join(
        f"process {p}: step {b.step}, {b.phase} for {b.age_s:.0f} s{' (silent)' * (p in silent)}"
        for p, b in sorted(beats.items())
    )
    who = (
        f"held up by process {', '.join(map(str, guilty))}"
        if guilty
        else ("every process waits for the others: the network between them, or a device")
    )
    limit = limits.of(beats[process])
    return Hang(guilty, f"no progress for more than {limit:.0f} s, {who}. {shown}")


def _moves(beat: Beat, limits: Limits) -> bool:
    """Say whether a process came to its phase lately, or is in one that may take long."""
    limit = limits.of(beat)
    return beat.age_s < (limit if beat.phase in SLOW else limit / 2)


def _not_waiting(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    others = tuple(p for p, b in sorted(beats.items()) if b.phase != "wait")
    return others if len(others) < len(beats) or len(beats) == 1 else ()


def _behind(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    lowest = min(b.step for b in beats.values())
    behind = tuple(p for p, b in sorted(beats.items()) if b.step == lowest)
    return behind if len(behind) < len(beats) else ()
