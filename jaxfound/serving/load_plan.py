"""What a load test sends, and when: lengths and arrivals, drawn before anything is sent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxfound.config.schema import ConfigError


@dataclass(frozen=True)
class Lengths:
    """How many tokens: always `low`, evenly from low to high, or lognormal around a median.

    Attributes:
        kind: which of the three.
        low: smallest, or the median of lognormal lengths.
        high: largest of even ones.
        sigma: standard deviation of the logarithm of lognormal ones.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Return the lengths that `128`, `64-256` or `lognormal:200:0.6` (median, sigma) names.

        Raises:
            ConfigError: it is none of the three, or a number is out of its range.
        """
        refusal = ConfigError(
            f"{text!r} is no length: write 128, 64-256, or lognormal:MEDIAN:SIGMA such as "
            "lognormal:200:0.6; lengths are at least 1, SIGMA is from 0 to 4"
        )
        try:
            if text.startswith("lognormal:"):
                _, median, sigma = text.split(":")
                found = cls("lognormal", int(median), int(median), float(sigma))
            else:
                low, _, high = text.partition("-")
                found = cls("uniform" if high else "fixed", int(low), int(high or low))
        except ValueError as error:
            raise refusal from error
        if not (1 <= found.low <= found.high and 0.0 <= found.sigma <= 4.0):
            raise refusal
        return found

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        """Return `num` lengths, each at least 1."""
        if self.kind == "lognormal":
            drawn = rng.lognormal(math.log(self.low), self.sigma, num)
            return np.maximum(np.rint(drawn), 1).astype(int).tolist()
        return rng.integers(self.low, self.high, num, endpoint=True).tolist()


@dataclass(frozen=True)
class Workload:
    """A load test.

    Attributes:
        num_requests: in all.
        prompt: lengths of prompts, tokens.
        output: lengths of continuations, tokens; eos does not end them.
        concurrency: closed loop: so many clients, each of which asks again when it has its answer.
        rate: open loop: requests a second, arriving by a Poisson process whatever is answered.
        shared_prefix: tokens that all prompts begin with, of those of `prompt`.
        seed: of lengths, arrivals and ids.

    Raises:
        ConfigError: not exactly one of concurrency and rate.
    """

    num_requests: int
    prompt: Lengths
    output: Lengths
    concurrency: int | None = None
    rate: float | None = None
    shared_prefix: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError(
                f"concurrency={self.concurrency} and rate={self.rate}: a load is a closed loop of "
                "so many clients, or arrivals at a rate. Give one of them"
            )

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.rate is None:
            return f"{self.concurrency} clients"
        return f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class Shot:
    """One request of a load test.

    Attributes:
        number: in order of arrival.
        at_s: when it arrives, seconds after the start; 0 in a closed loop.
        prompt: token ids.
        max_tokens: length of the continuation.
    """

    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def plan_shots(workload: Workload, *, ids: Sequence[int], max_length: int) -> list[Shot]:
    """Return the requests of a workload; the same seed gives the same ones.

    Args:
        workload: what is wanted.
        ids: token ids that prompts are drawn from.
        max_length: most tokens of prompt and continuation; longer ones are cut, the prompt last.
    """
    rng = np.random.default_rng(workload.seed)
    num = workload.num_requests
    outputs = [min(n, max_length - 1) for n in workload.output.draw(num, rng)]
    prompts = workload.prompt.draw(num, rng)
    gaps_s = np.zeros(num) if workload.rate is None else rng.exponential(1 / workload.rate, num)
    arrivals_s = np.cumsum(gaps_s) - gaps_s[:1].sum()
    shared = rng.choice(np.asarray(ids), workload.shared_prefix).tolist()
    shots: list[Shot] = []
    for i, (length, more, at_s) in enumerate(zip(prompts, outputs, arrivals_s, strict=True)):
        room = min(length, max_length - more)
        own = rng.choice(np.asarray(ids), max(room - len(shared), 0)).tolist()
        shots.append(Shot(i, float(at_s), tuple([*shared, *own][:room]), more))
    return shots
