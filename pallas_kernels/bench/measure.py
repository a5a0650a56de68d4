"""From sizes to records: build all candidates of several sizes first, then time size by size.

Building compiles, and XLA's autotuning runs kernels, so nothing is built while something is timed.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from pallas_kernels.accuracy import Difference
from pallas_kernels.bench.power import Meter, watts_under
from pallas_kernels.bench.timing import MAX_CALLS, Candidate, Record, interleaved

log = logging.getLogger(__name__)

# What a candidate's FLOPs are held against; "none" has no floor but its bytes.
Unit = Literal["float8", "bfloat16", "none"]
# Says how far a candidate's result is off; None where it solves another problem.
Check = Callable[[str, Any], Difference | None]


class NotCarriedError(RuntimeError):
    """A peer is not on this machine or refuses the case; the text says why."""


class Work(NamedTuple):
    """What one call must do at least: useful FLOPs, and bytes, each moved once."""

    flops: int
    bytes_moved: int
    unit: Unit

    def floor_us(self, ceilings: Mapping[str, float]) -> float:
        """Microseconds that the machine's measured ceilings leave it at least."""
        seconds = self.bytes_moved / ceilings["copy_bps"]
        if self.unit != "none":
            seconds = max(seconds, self.flops / ceilings[f"{self.unit}_flops"])
        return 1e6 * seconds


@dataclass(frozen=True)
class Part:
    """One candidate of a problem, not built yet.

    Attributes:
        build: compiles it; raises NotCarriedError where it cannot be had.
        against: of a peer, the part of ours that it is compared with; empty for our own.
        after: says more about a candidate that was timed, e.g. its time on the clock.
    """

    name: str
    work: Work
    build: Callable[[], Candidate]
    against: str = ""
    settings: Mapping[str, int] | None = None
    note: str = ""
    after: Callable[[Candidate], str] | None = None


@dataclass(frozen=True)
class Problem:
    """One size of an op with its operands: what to build, and how a result is checked.

    Attributes:
        expect: computes what is right; returns the check.
    """

    op: str
    sizes: Mapping[str, int]
    parts: Sequence[Part]
    expect: Callable[[], Check]


@dataclass(frozen=True)
class Plan:
    """One size of an op before its operands exist.

    Attributes:
        operand_bytes: about what the operands of all candidates take on the device.
    """

    op: str
    sizes: Mapping[str, int]
    operand_bytes: int
    make: Callable[[], Problem]


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        round_s: seconds of kernels of one candidate in one round.
        rest_s: seconds for which the card idles before.
        settle_s: seconds for which it then runs untimed.
        without: beginnings of the names of candidates that are left out.
        num_threads: threads that compile; 1 = this thread, which keeps its JAX contexts.
        batch_size: sizes that are prepared before they are timed.
        batch_bytes: device memory that the operands of those may take.
        meter: reads the power; None = it is not measured.
    """

    num_rounds: int = 9
    round_s: float = 0.02
    rest_s: float = 0.1
    settle_s: float = 0.0
    without: tuple[str, ...] = ()
    num_threads: int = 16
    batch_size: int = 14
    batch_bytes: int = 50 * 10**9
    meter: Meter | None = None


@dataclass(frozen=True)
class Finished:
    """The records of one size, and what they cost.

    Attributes:
        prepare_s: this size's share of the time in which its batch was prepared.
    """

    op: str
    sizes: Mapping[str, int]
    records: tuple[Record, ...]
    prepare_s: float
    measure_s: float


@dataclass
class _Prepared:
    plan: Plan
    problem: Problem
    check: Check
    candidates: list[tuple[Part, Candidate]]
    missing: list[Record]


# What may go wrong with one size or one candidate: the compiler, the device's memory, a peer's
# checks. It must not end a call whose minutes are scarce, so it becomes a record that says so.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError)


def measure(
    plans: Sequence[Plan], *, ceilings: Mapping[str, float], options: Options
) -> Iterator[Finished]:
    """Yield each size as soon as it is timed."""
    for batch in batches(plans, options):
        start = time.perf_counter()
        prepared = _prepare(batch, options)
        prepare_s = (time.perf_counter() - start) / len(batch)
        while prepared:
            one = prepared.pop(0)
            start = time.perf_counter()
            records = (*one.missing, *_time(one, ceilings=ceilings, options=options))
            found = (one.plan.op, one.plan.sizes, records)
            # Operands live in the closures of the candidates.
            del one
            gc.collect()
            yield Finished(*found, prepare_s=prepare_s, measure_s=time.perf_counter() - start)


def batches(plans: Sequence[Plan], options: Options) -> Iterator[list[Plan]]:
    """Cut `plans` into runs that fit the device together; one that fits nowhere goes alone."""
    batch: list[Plan] = []
    for plan in plans:
        total = sum(p.operand_bytes for p in batch) + plan.operand_bytes
        if batch and (len(batch) == options.batch_size or total > options.batch_bytes):
            yield batch
            batch = []
        batch.append(plan)
    if batch:
        yield batch


def in_threads[T](calls: Sequence[Callable[[], T]], *, num_threads: int) -> list[T]:
    """Run `calls`, side by side if there are threads for it, and return their results in order."""
    if num_threads <= 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda call: call(), calls))


def _prepare(plans: Sequence[Plan], options: Options) -> list[_Prepared]:
    num_threads = options.num_threads
    made = in_threads([partial(_make, plan) for plan in plans], num_threads=num_threads)
    prepared = [
        _Prepared(plan, problem, _no_check, [], missing)
        for plan, (problem, missing) in zip(plans, made, strict=True)
    ]
    places = [
        (one, part)
        for one in prepared
        for part in one.problem.parts
        if not part.name.startswith(options.without)
    ]
    # References first: they are the longest to compile.
    calls: list[Callable[[], Any]] = [partial(_expect, one) for one in prepared]
    calls += [partial(_build, one.problem, part) for one, part in places]
    built = in_threads(calls, num_threads=num_threads)[len(prepared) :]
    for (one, part), found in zip(places, built, strict=True):
        if isinstance(found, Record):
            one.missing.append(found)
        else:
            one.candidates.append((part, found))
    return prepared


def _no_check(name: str, result: Any) -> None:
    return None


def _make(plan: Plan) -> tuple[Problem, list[Record]]:
    try:
        return plan.make(), []
    except FAILURES as error:
        empty = Problem(plan.op, plan.sizes, (), lambda: _no_check)
        return empty, [_failed(empty, "operands", error)]


def _expect(one: _Prepared) -> None:
    try:
        one.check = one.problem.expect()
    except FAILURES as error:
        one.missing.append(_failed(one.problem, "reference", error))


# Triton keeps compiled kernels in one place without a lock.
TRITON = threading.Lock()


def _build(problem: Problem, part: Part) -> Candidate | Record:
    try:
        with TRITON if "jax_triton" in part.name else nullcontext():
            return part.build()
    except NotCarriedError as error:
        return _without_times(problem, part.name, f"not carried: {error}", against=part.against)
    except FAILURES as error:
        return _failed(problem, part.name, error, against=part.against)


def _without_times(problem: Problem, backend: str, note: str, *, against: str = "") -> Record:
    return Record(problem.op, problem.sizes, backend, against=against, note=note)


def _failed(problem: Problem, backend: str, error: Exception, *, against: str = "") -> Record:
    log.warning("bench.failed", extra={"op": problem.op, "backend": backend}, exc_info=error)
    said = str(error).strip().splitlines() or [type(error).__name__]
    return _without_times(problem, backend, f"failed: {said[0][:300]}", against=against)


def _time(
    prepared: _Prepared, *, ceilings: Mapping[str, float], options: Options
) -> Iterator[Record]:
    problem = prepared.problem
    differences: dict[str, Difference | None] = {}
    alive: list[tuple[Part, Candidate]] = []
    for part, candidate in prepared.candidates:
        try:
            result = candidate.start(0)
            candidate.wait(result)
            differences[part.name] = prepared.check(part.name, result)
            alive.append((part, candidate))
            del result
        except FAILURES as error:
            yield _failed(problem, part.name, error, against=part.against)
    if not alive:
        return
    try:
        rounds = interleaved(
            [candidate for _, candidate in alive],
            num_rounds=options.num_rounds,
            round_s=options.round_s,
            rest_s=options.rest_s,
            settle_s=options.settle_s,
        )
    except FAILURES as error:
        yield _failed(problem, "rounds", error)
        return
    for part, candidate in alive:
        difference = differences[part.name]
        record = Record(
            op=problem.op,
            sizes=problem.sizes,
            backend=part.name,
            rounds_us=rounds[part.name],
            flops=part.work.flops,
            bytes_moved=part.work.bytes_moved,
            floor_us=part.work.floor_us(ceilings),
            total_error=difference.total if difference else None,
            row_error=difference.row if difference else None,
            against=part.against,
            memory_bytes=candidate.memory_bytes(),
            settings=part.settings or {},
        )
        yield _with_remarks(record, part, candidate, options)


def _with_remarks(record: Record, part: Part, candidate: Candidate, options: Options) -> Record:
    """`record` with the power and with what is special about the candidate."""
    notes = [part.note, part.after(candidate) if part.after else ""]
    power_w = None
    if options.meter is not None:
        num_calls = int(min(max(10_000 / record.median_us, 1), MAX_CALLS))
        power_w = watts_under(candidate, options.meter, num_calls=num_calls)
    return replace(record, power_w=power_w, note="; ".join(note for note in notes if note))
