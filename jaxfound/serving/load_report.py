"""What a load test found: times of each request, and what they come to."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Shown:
    """One request as its client saw it; seconds are from the start of the test.

    Attributes:
        number: of its shot.
        planned_s: when it was to arrive.
        sent_s: when it was sent.
        first_s: when its first token came; None without one.
        end_s: when it ended.
        num_prompt: tokens of the prompt.
        num_tokens: tokens of the continuation.
        gaps_s: between news that held tokens.
        queue_s: wait for a first step, as the engine says; None where it does not.
        error: why it failed; empty otherwise.
    """

    number: int
    planned_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    num_prompt: int
    num_tokens: int
    gaps_s: tuple[float, ...] = ()
    queue_s: float | None = None
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Time to the first token, from when the request was to arrive: waiting counts."""
        return math.nan if self.first_s is None else self.first_s - self.planned_s

    @property
    def per_token_s(self) -> float:
        """Mean time of each token after the first; NaN for a single one."""
        if self.first_s is None or self.num_tokens < 2:
            return math.nan
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Spread:
    """Percentiles, mean and largest of a time, in seconds; NaN where nothing was measured."""

    p50: float
    p90: float
    p99: float
    mean: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of the values that are numbers."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(*[math.nan] * 5)
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(p50, p90, p99, float(np.mean(known)), max(known))


@dataclass(frozen=True)
class Limits:
    """When a request counts as good.

    Attributes:
        first_token_s: most seconds to its first token.
        per_token_s: most seconds of each token after it, on average.
    """

    first_token_s: float = math.inf
    per_token_s: float = math.inf

    def met_by(self, shown: Shown) -> bool:
        """Whether the request was answered, and in time."""
        slow = shown.per_token_s > self.per_token_s
        return not shown.error and shown.first_token_s <= self.first_token_s and not slow


@dataclass(frozen=True)
class LoadReport:
    """A load test in figures.

    Attributes:
        name: of the workload.
        num_requests: sent.
        failures: how many failed, by reason.
        duration_s: from the start to the last end.
        request_rate: answered requests a second.
        prompt_rate: their prompts' tokens a second.
        token_rate: their continuations' tokens a second.
        first_token_s: time to the first token.
        per_token_s: time per token after the first.
        gap_s: between news that held tokens.
        queue_s: wait for a first step, where the engine says.
        whole_s: from arrival to the end.
        lag_s: sent later than planned; large ones say that the client was the limit.
        good_share: requests within the limits, of all.
        goodput: requests within the limits, a second.
    """

    name: str
    num_requests: int
    failures: dict[str, int]
    duration_s: float
    request_rate: float
    prompt_rate: float
    token_rate: float
    first_token_s: Spread
    per_token_s: Spread
    gap_s: Spread
    queue_s: Spread
    whole_s: Spread
    lag_s: Spread
    good_share: float
    goodput: float

    def as_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def summarise(name: str, shown: Sequence[Shown], *, limits: Limits) -> LoadReport:
    """Return the figures of a test of at least one request."""
    answered = [each for each in shown if not each.error]
    duration_s = max(max(each.end_s for each in shown), 1e-9)
    num_good = sum(map(limits.met_by, shown))

    def spread(value: Callable[[Shown], float]) -> Spread:
        return Spread.of(map(value, answered))

    return LoadReport(
        name=name,
        num_requests=len(shown),
        failures=dict(Counter(each.error for each in shown if each.error)),
        duration_s=duration_s,
        request_rate=len(answered) / duration_s,
        prompt_rate=sum(each.num_prompt for each in answered) / duration_s,
        token_rate=sum(each.num_tokens for each in answered) / duration_s,
        first_token_s=spread(lambda each: each.first_token_s),
        per_token_s=spread(lambda each: each.per_token_s),
        gap_s=Spread.of(gap for each in answered for gap in each.gaps_s),
        queue_s=spread(lambda each: math.nan if each.queue_s is None else each.queue_s),
        whole_s=spread(lambda each: each.end_s - each.planned_s),
        lag_s=spread(lambda each: each.sent_s - each.planned_s),
        good_share=num_good / len(shown),
        goodput=num_good / duration_s,
    )
