"""Interleaved timing of candidates, and the records that it yields."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from pallas_kernels.bench import clock

MAX_CALLS = 400
# Rest before each round of a sweep of tiles, seconds: no tile pays for the power of another.
SWEEP_REST_S = 0.05


@dataclass(frozen=True)
class Candidate:
    """One implementation to time.

    Attributes:
        start: starts call number i on operand set i modulo the number of sets; does not wait.
        wait: returns when what it is given, the result of `start`, is done.
        memory_bytes: finds the device memory of one call: operands, results and scratch; may run
            it. None if there is no knowing.
    """

    name: str
    start: Callable[[int], Any]
    wait: Callable[[Any], object] = jax.block_until_ready
    memory_bytes: Callable[[], int | None] = lambda: None


def untimed[**P, T](run: Callable[P, T]) -> Callable[P, T]:
    """`run` compiled without autotuning, which takes seconds a product: for what is not timed."""
    # Options of XLA's GPU compiler; a CPU's takes and ignores them.
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(run, compiler_options=options)


def compiled_candidate(
    name: str, run: Callable[..., Any], operand_sets: Sequence[tuple[Any, ...]]
) -> Candidate:
    """Compile `run` and return it as a candidate that goes through `operand_sets` in turn."""
    compiled = jax.jit(run).lower(*operand_sets[0]).compile()
    return Candidate(
        name,
        lambda index: compiled(*operand_sets[index % len(operand_sets)]),
        memory_bytes=lambda: program_bytes(compiled),
    )


def program_bytes(compiled: Compiled) -> int | None:
    """Bytes of arguments, results and scratch, as the compiler counts them; None if it does not."""
    counted = compiled.memory_analysis()
    if counted is None:
        return None
    return (
        counted.argument_size_in_bytes
        + counted.output_size_in_bytes
        + counted.temp_size_in_bytes
        - counted.alias_size_in_bytes
    )


@dataclass(frozen=True)
class Record:
    """One measurement: op x sizes x backend.

    Attributes:
        rounds_us: kernel time of one call in each interleaved round, microseconds.
        against: of a peer, the backend of ours that solves its problem; empty for our own.
        floor_us: the time below which the machine's measured ceilings do not allow to go.
        row_error: worst row's cosine difference from the reference; None if not checked.
        memory_bytes: device memory of one call. Of a JAX program what its compiler counts:
            arguments, results and scratch; of torch the operands and the most that its allocator
            gave during a call.
        power_w: what the card drew while this ran alone, watts.
        note: why there is no number, where there is none; else what is special about it.
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
    against: str = ""
    memory_bytes: int | None = None
    power_w: float | None = None
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Read what `as_json` wrote; derived figures are left out.

        Raises:
            ValueError: if a field is missing or of another type.
        """
        try:
            known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            known["rounds_us"] = tuple(float(us) for us in known.get("rounds_us", ()))
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"not a record: {error}") from error


def interleaved(
    candidates: Sequence[Candidate],
    *,
    num_rounds: int = 9,
    round_s: float = 0.02,
    rest_s: float = 0.0,
    settle_s: float = 0.0,
) -> dict[str, tuple[float, ...]]:
    """Return microseconds of kernel time a call of each candidate, for each round.

    Every round times every candidate, in an order of its own: a candidate that always followed a
    power-hungry one would always find the clocks that the other had left.

    Args:
        round_s: seconds of one candidate's kernels in a round.
        rest_s: seconds for which the card idles before, so that no candidate pays for the power
            that another drew: what is timed is a burst.
        settle_s: seconds for which the candidate runs untimed before, so that the clocks are those
            which its own power allows: what is timed is its sustained speed.
    """
    num_calls: dict[str, tuple[int, int]] = {}
    for candidate in candidates:
        first = max(_round_us(candidate, 3, num_before=1), 0.1)
        timed, before = (
            int(min(max(seconds * 1e6 / first, least), MAX_CALLS))
            for seconds, least in ((round_s, 3), (settle_s, 1))
        )
        num_calls[candidate.name] = timed, before
    rounds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for index in range(num_rounds):
        for place in np.random.default_rng(index).permutation(len(candidates)):
            candidate = candidates[place]
            timed, before = num_calls[candidate.name]
            time.sleep(rest_s)
            rounds[candidate.name].append(_round_us(candidate, timed, num_before=before))
    return {name: tuple(times) for name, times in rounds.items()}


def _round_us(candidate: Candidate, num_calls: int, *, num_before: int) -> float:
    def run(count: int = num_calls) -> None:
        result = None
        for index in range(count):
            result = candidate.start(index)
        candidate.wait(result)

    run(num_before)
    return clock.kernel_seconds(run) * 1e6 / num_calls


@dataclass(frozen=True)
class Ratio:
    """A median, of ratios or of times, with its 95 % interval over the rounds."""

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


def median_interval(rounds: Sequence[float]) -> Ratio:
    """Return the median of `rounds` with its bootstrap 95 % interval.

    Raises:
        ValueError: if there are none.
    """
    return paired_ratio(rounds, [1.0] * len(rounds))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(np.asarray(values, np.float64)))))
