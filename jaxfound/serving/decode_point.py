"""What a measurement of decoding yields: times of steps, beside the time that reading takes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxfound.config.model import ModelConfig
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.models.build import Arrays
from jaxfound.resources.platform import package_versions
from jaxfound.serving.decode_floor import STREAMED, weight_bytes_read
from pallas_kernels import hardware

# Steps before any is timed: the first ones meet cold caches and a card that has rested.
NUM_WARM = 8


@dataclass(frozen=True)
class Load:
    """What decodes.

    Attributes:
        rows: numbers of rows, each a point of its own.
        context: tokens of each row in the last step.
        steps: timed in a round.
        rounds: of each point.
    """

    rows: tuple[int, ...]
    context: int
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1 or self.context <= self.steps + NUM_WARM:
            raise ConfigError(
                f"{self}: rows must be at least 1, and the context longer than the {NUM_WARM} + "
                f"{self.steps} steps that reach it. Use a longer context or fewer steps"
            )


class Times(NamedTuple):
    """Seconds of the steps of one round, and the most memory that was in use, where it is told."""

    step_s: tuple[float, ...]
    peak_bytes: int | None


@dataclass(frozen=True)
class Point:
    """One cache with one number of rows.

    Attributes:
        cache: "pages" (what is served) or "heads" (keys and values of every head, a slot a token).
        rows: that decode, one token each a step.
        context: tokens of each row in the last step.
        weight_bytes: of weights that a step reads, experts chosen evenly.
        cache_bytes: of the cache that a step reads.
        floor_s: seconds of reading both at the bandwidth that streaming gets.
        rounds: seconds of every step.
        peak_bytes: most memory in use.
    """

    cache: str
    rows: int
    context: int
    weight_bytes: int
    cache_bytes: int
    floor_s: float
    rounds: tuple[tuple[float, ...], ...]
    peak_bytes: int | None

    @property
    def token_s(self) -> float:
        """Median over rounds of the median step: the time per token of each row."""
        return statistics.median(statistics.median(steps) for steps in self.rounds)

    @property
    def share(self) -> float:
        """Of its own floor: 1 is as fast as memory is read."""
        return self.floor_s / self.token_s

    def as_dict(self) -> dict[str, object]:
        """Return it as plain data; of each round the median, the least and the largest step."""
        medians = [statistics.median(steps) for steps in self.rounds]
        return {
            "cache": self.cache,
            "rows": self.rows,
            "context": self.context,
            "token_s": self.token_s,
            "tokens_per_s": self.rows / self.token_s,
            "floor_s": self.floor_s,
            "share_of_floor": self.share,
            "weight_bytes_read": self.weight_bytes,
            "cache_bytes_read": self.cache_bytes,
            "peak_bytes": self.peak_bytes,
            "steps_per_round": len(self.rounds[0]),
            "median_step_s_by_round": medians,
            "least_step_s": min(min(steps) for steps in self.rounds),
            "largest_step_s": max(max(steps) for steps in self.rounds),
        }


def facts(cfg: RunConfig, *, name: str) -> dict[str, object]:
    """Return what a record says of where and what was measured, under the name of a model."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": package_versions(),
        "model": name,
        "precision": cfg.precision.model_dump(mode="json"),
        "cache_format": cfg.serve.cache_format,
    }


def point_of(
    cache: str,
    model: ModelConfig,
    arrays: Arrays,
    load: Load,
    *,
    rows: int,
    token_bytes: int,
    rounds: Sequence[Times],
) -> Point:
    """Return a point, with what a step in the middle of a round reads."""
    middle = load.context - load.steps // 2
    weights = weight_bytes_read(model, arrays, num_tokens=rows)
    read = rows * middle * token_bytes
    peaks = [each.peak_bytes for each in rounds if each.peak_bytes is not None]
    return Point(
        cache=cache,
        rows=rows,
        context=load.context,
        weight_bytes=weights,
        cache_bytes=read,
        floor_s=(weights + read) / (STREAMED * hardware.current().memory_bps),
        rounds=tuple(each.step_s for each in rounds),
        peak_bytes=max(peaks, default=None),
    )


def peak_bytes() -> int | None:
    """Return the most memory of the first device that was in use; None where it is not told."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
