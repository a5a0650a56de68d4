"""Honest step times: from the completion of one step to the completion of the next.

Dispatch is asynchronous, so the time around a call of the step says nothing. The caller passes in
when it dispatched a step and when it saw the step's result; there is no clock here.
"""

import statistics
from collections import deque
from typing import NamedTuple


class StepTime(NamedTuple):
    """One finished step.

    Attributes:
        step: its number.
        duration_s: since the previous step (or `restart`) was complete; for the first step, since
            its dispatch, compilation included.
        idle_s: the part of it in which the device had no step to work on.
        tokens_per_s: tokens of a step over `duration_s`.
    """

    step: int
    duration_s: float
    idle_s: float
    tokens_per_s: float


class StepTimer:
    """Turns dispatch and completion times into step times; pure.

    Args:
        tokens_per_step: tokens that one step trains on.
        num_steps: steps of the whole run, for the time that is left.
        window: steps that the moving median and the idle share look back over.
    """

    def __init__(self, *, tokens_per_step: int, num_steps: int, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"window={window}: the median needs one step or more")
        self._tokens_per_step = tokens_per_step
        self._num_steps = num_steps
        self._dispatched: deque[tuple[int, float]] = deque()
        self._times: deque[StepTime] = deque(maxlen=window)
        # When the device finished what it did last; None before the first step.
        self._free_since_s: float | None = None
        self._is_first = True

    def dispatched(self, step: int, *, now: float) -> None:
        """Note that `step` was handed to the device at `now` (seconds, any origin)."""
        self._dispatched.append((step, now))

    def completed(self, step: int, *, now: float) -> StepTime:
        """Return the time of `step`, whose result was there at `now`.

        Raises:
            ValueError: if `step` is not the oldest dispatched one, or completed before that.
        """
        if not self._dispatched or self._dispatched[0][0] != step:
            waiting = [number for number, _ in self._dispatched]
            raise ValueError(f"step {step} completed, but the steps dispatched are {waiting}")
        at = self._dispatched.popleft()[1]
        before = at if self._free_since_s is None else self._free_since_s
        if now < max(at, before):
            raise ValueError(
                f"step {step} completed at {now}, before its dispatch at {at} or the previous "
                f"completion at {before}: use one monotonic clock"
            )
        duration = now - before
        rate = self._tokens_per_step / duration if duration > 0 else 0.0
        time = StepTime(step, duration, max(0.0, at - before), rate)
        # The first step holds the compilation, which says nothing about the others.
        if not self._is_first:
            self._times.append(time)
        self._is_first = False
        self._free_since_s = now
        return time

    def restart(self, *, now: float) -> None:
        """Measure the next step from `now`: the device did something else, e.g. an evaluation."""
        self._free_since_s = now

    @property
    def median_s(self) -> float | None:
        """Median duration over the window, None before the second step."""
        if not self._times:
            return None
        return statistics.median(time.duration_s for time in self._times)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second at the median duration, None before the second step."""
        median = self.median_s
        return self._tokens_per_step / median if median else None

    @property
    def idle_share(self) -> float | None:
        """Share of the window in which the device waited for a dispatch, 0 to 1."""
        total = sum(time.duration_s for time in self._times)
        return sum(time.idle_s for time in self._times) / total if total else None

    def eta_s(self, step: int) -> float | None:
        """Return the seconds from the completion of `step` to the end of the run, at the median."""
        median = self.median_s
        return None if median is None else max(0, self._num_steps - step) * median
