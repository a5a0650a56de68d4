"""Interleaved timing of candidates, and the records that it yields."""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import jax
import numpy as np

from pallas_kernels import mosaic

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "flashinfer-python", "triton")


@dataclass(frozen=True)
class Candidate:
    """One implementation to time.

    Attributes:
        start: starts call number i on operand set i modulo the number of sets; does not wait.
        wait: returns when what it is given, the result of `start`, is done.
    """

    name: str
    start: Callable[[int], Any]
    wait: Callable[[Any], object] = jax.block_until_ready


@dataclass(frozen=True)
class Record:
    """One measurement: op x sizes x backend.

    Attributes:
        rounds_us: kernel time of one call in each interleaved round, microseconds.
        floor_us: the time below which the machine's measured ceilings do not allow to go.
        row_error: worst row's cosine difference from the reference; None if not checked.
        note: why there is no number, where there is none.
    """

    op: str
    sizes: Mapping[str, int]
    backend: str
    rounds_us: tuple[float, ...] = ()
    flops: int = 0
    bytes_moved: int = 0
    floor_us: float = 0.0
    total_error: float | None = None
    row_error: float | None = None
    settings: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def median_us(self) -> float:
        """Median over the rounds; nan if it did not run."""
        return statistics.median(self.rounds_us) if self.rounds_us else float("nan")

    @property
    def spread(self) -> float:
        """Largest over smallest round, minus one."""
        return max(self.rounds_us) / min(self.rounds_us) - 1 if self.rounds_us else float("nan")

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the median."""
        return self.flops / self.median_us / 1e6

    @property
    def gbps(self) -> float:
        """GB/s at the median, each byte counted once."""
        return self.bytes_moved / self.median_us / 1e3

    def as_json(self) -> dict[str, object]:
        """Fields and derived figures as plain data."""
        derived = {
            "median_us": self.median_us,
            "spread": self.spread,
            "tflops": self.tflops,
            "gbps": self.gbps,
            "floor_share": self.floor_us / self.median_us,
        }
        known = {name: value for name, value in derived.items() if np.isfinite(value)}
        plain = asdict(self)
        return {**plain, "sizes": dict(self.sizes), "settings": dict(self.settings), **known}


def interleaved(
    candidates: Sequence[Candidate], *, num_rounds: int = 9, round_s: float = 0.02
) -> dict[str, tuple[float, ...]]:
    """Return microseconds of kernel time a call of each candidate, for each round.

    Every round times every candidate, so that clock and temperature are the same for all; a
    round lasts `round_s` seconds for each.
    """
    num_calls: dict[str, int] = {}
    for candidate in candidates:
        first = _round_us(candidate, 3)
        num_calls[candidate.name] = int(min(max(round_s * 1e6 / max(first, 0.1), 3), 400))
    rounds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for index in range(num_rounds):
        # Another order each round: the one after a memory-bound candidate finds a cooler chip.
        shift = index % len(candidates)
        for candidate in (*candidates[shift:], *candidates[:shift]):
            rounds[candidate.name].append(_round_us(candidate, num_calls[candidate.name]))
    return {name: tuple(times) for name, times in rounds.items()}


def _round_us(candidate: Candidate, num_calls: int) -> float:
    def run() -> None:
        result = None
        for index in range(num_calls):
            result = candidate.start(index)
        candidate.wait(result)

    candidate.wait(candidate.start(0))
    return mosaic.kernel_seconds(run) * 1e6 / num_calls


@dataclass(frozen=True)
class Ratio:
    """How many times faster one candidate is, with a 95 % interval over the rounds."""

    median: float
    low: float
    high: float


def paired_ratio(
    slower: Sequence[float], faster: Sequence[float], *, num_resamples: int = 2000
) -> Ratio:
    """Return the ratio of times round by round, with its bootstrap interval.

    Raises:
        ValueError: if the rounds are not paired.
    """
    if len(slower) != len(faster) or not slower:
        raise ValueError(f"{len(slower)} rounds cannot be paired with {len(faster)}.")
    ratios = np.asarray(slower, np.float64) / np.asarray(faster, np.float64)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(ratios), (num_resamples, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(np.asarray(values, np.float64)))))


def versions() -> Mapping[str, str]:
    """Versions of what a measurement depends on; packages that are absent are left out."""
    found = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def ceilings() -> Mapping[str, float]:
    """Return what the machine does now: bytes/s of a copy, FLOP/s of bfloat16 and 8-bit products.

    Measured with XLA in this process: a share of the datasheet says less than a share of what
    this card reaches under its own power limit.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    big = jax.random.normal(keys[0], (1 << 29,), jax.numpy.float32)
    copy = jax.jit(lambda x: x + 1.0).lower(big).compile()
    seconds = min(interleaved([Candidate("copy", lambda i: copy(big))], num_rounds=3)["copy"])
    found = {"copy_bps": 2 * big.nbytes / (seconds * 1e-6)}
    big.delete()
    for name, dtype in (
        ("bfloat16_flops", jax.numpy.bfloat16),
        ("float8_flops", jax.numpy.float8_e4m3fn),
    ):
        x = jax.random.normal(keys[1], (8192, 8192), jax.numpy.bfloat16).astype(dtype)
        dot = jax.jit(
            lambda x: jax.lax.dot_general(
                x, x, (((1,), (1,)), ((), ())), preferred_element_type=jax.numpy.bfloat16
            )
        )
        compiled = dot.lower(x).compile()
        times = interleaved([Candidate(name, lambda i, c=compiled, x=x: c(x))], num_rounds=3)
        found[name] = 2 * 8192**3 / (min(times[name]) * 1e-6)
    return found
