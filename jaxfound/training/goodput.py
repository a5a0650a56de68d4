"""What a run's seconds were good for, over all its attempts; they sum to the wall clock.

Steps that a later attempt did again are lost: their seconds move to `lost_steps`. Between the last
word of an attempt and the beginning of the next the run was `down`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from jaxfound.resources.metrics import Record
from jaxfound.training.time_ledger import ACTIVITIES

# What making a step takes, and what is therefore lost with it.
OF_STEPS = ("step", "data_wait")


@dataclass(frozen=True)
class Goodput:
    """An account of a run.

    Attributes:
        seconds: by activity, `lost_steps` and `down` among them.
        wall_s: from the beginning of the first attempt to the last word of the last.
        attempts: how often the run was started.
        steps: optimizer steps that stayed.
        lost_steps: that were done again later.
    """

    seconds: Mapping[str, float]
    wall_s: float
    attempts: int
    steps: int
    lost_steps: int

    @property
    def share(self) -> float:
        """Share of the wall clock that went into steps that stayed."""
        return self.seconds["step"] / self.wall_s if self.wall_s else 0.0

    @property
    def unexplained_s(self) -> float:
        """Seconds of the wall clock that no activity accounts for; negative if some count twice."""
        return self.wall_s - sum(self.seconds.values())

    def as_dict(self) -> dict[str, object]:
        """Return the account as JSON data."""
        data = {"format_version": 1, "goodput": self.share, "wall_s": self.wall_s}
        counts = {"attempts": self.attempts, "steps": self.steps, "lost_steps": self.lost_steps}
        return {**data, **counts, "seconds": dict(self.seconds)}


@dataclass
class Attempt:
    """One start of the run.

    Attributes:
        began_s: Unix time of its beginning.
        first_step: steps that were done already.
        ended_s: Unix time of its last word.
        spans: steps from and to, and the seconds of each activity.
    """

    began_s: float
    first_step: int
    ended_s: float
    spans: list[tuple[int, int, Mapping[str, float | int]]] = field(default_factory=list)


def account(records: Iterable[Record]) -> Goodput:
    """Return the account of the records of a `goodput.jsonl`, in the order they were written.

    Raises:
        ValueError: if no attempt has begun.
    """
    attempts = attempts_of(records)
    if not attempts:
        raise ValueError("no attempt is on record: the run has not begun, or an older version ran")
    seconds: dict[str, float] = dict.fromkeys((*ACTIVITIES, "lost_steps", "down"), 0.0)
    steps = lost = 0
    for number, attempt in enumerate(attempts):
        later = [a.first_step for a in attempts[number + 1 :]]
        stays = min(later, default=attempt.spans[-1][1] if attempt.spans else attempt.first_step)
        for begin, end, spent in attempt.spans:
            gone = max(0, end - max(begin, stays))
            steps, lost = steps + end - begin - gone, lost + gone
            add(seconds, spent, lost_share=gone / (end - begin) if end > begin else 0.0)
        if number:
            seconds["down"] += max(0.0, attempt.began_s - attempts[number - 1].ended_s)
    wall_s = attempts[-1].ended_s - attempts[0].began_s
    return Goodput(seconds, wall_s, len(attempts), steps, lost)


def attempts_of(records: Iterable[Record]) -> list[Attempt]:
    """Return the attempts on record, the first one first."""
    attempts: list[Attempt] = []
    for record in records:
        time_s, step = number_of(record, "time_s"), cast(int, record["step"])
        if record["event"] == "begin":
            attempts.append(Attempt(number_of(record, "began_s"), step, time_s))
        elif record["event"] == "spans" and attempts:
            attempts[-1].ended_s = time_s
            spent = cast(Mapping[str, float | int], record["seconds"])
            attempts[-1].spans.append((cast(int, record["from_step"]), step, spent))
    return attempts


def number_of(record: Record, name: str) -> float:
    """Return a field of a record that is a number."""
    return float(cast(float, record[name]))


def add(seconds: dict[str, float], spent: Mapping[str, float | int], *, lost_share: float) -> None:
    """Add the seconds of a span; a share of those of its steps is lost."""
    for activity, value in spent.items():
        lost_s = value * lost_share if activity in OF_STEPS else 0.0
        seconds[activity] = seconds.get(activity, 0.0) + value - lost_s
        seconds["lost_steps"] += lost_s
