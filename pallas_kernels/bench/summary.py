"""What all calls of a results file say together: medians, paired ratios, regressions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pallas_kernels.bench.results import Results
from pallas_kernels.bench.timing import Ratio, Record, median_interval, paired_ratio

# A median that is less than this much slower is no regression, whatever its interval says:
# the card's power and clocks move the same kernel by as much between calls.
NOISE = 0.03

Sizes = tuple[tuple[str, int], ...]


class Key(NamedTuple):
    """One op at one size."""

    op: str
    sizes: Sizes


@dataclass(frozen=True)
class Line:
    """One backend at one size, over all calls.

    Attributes:
        times: of each call that timed it, the microseconds of its rounds.
        record: the newest one, for what does not vary between rounds.
        ratio: for a peer its time over ours, round by round; None if never timed together.
    """

    key: Key
    backend: str
    times: tuple[tuple[float, ...], ...]
    record: Record
    ratio: Ratio | None = None

    @property
    def is_ours(self) -> bool:
        """True for a backend of ours."""
        return not self.record.against

    @property
    def num_calls(self) -> int:
        """Calls that timed it."""
        return len(self.times)

    @property
    def num_rounds(self) -> int:
        """Rounds of all calls."""
        return sum(len(rounds) for rounds in self.times)

    @cached_property
    def time_us(self) -> Ratio:
        """Median of all rounds, with its interval, microseconds."""
        return median_interval([us for rounds in self.times for us in rounds])

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the median."""
        return self.record.flops / self.time_us.median / 1e6

    @property
    def gbps(self) -> float:
        """GB/s at the median, each byte counted once."""
        return self.record.bytes_moved / self.time_us.median / 1e3

    @property
    def floor_share(self) -> float:
        """The floor, by the newest call's ceilings, over the median."""
        return self.record.floor_us / self.time_us.median


def key_of(record: Record) -> Key:
    """The op and the size of a record."""
    return Key(record.op, tuple(record.sizes.items()))


def summary(results: Results) -> tuple[Line, ...]:
    """Return a line for each op, size and backend that was timed, in the order of first sight."""
    by_call = [_timed(call.records) for call in results.calls]
    seen = {place: record for call in by_call for place, record in call.items()}
    lines: list[Line] = []
    for (key, backend), record in seen.items():
        timed = [call for call in by_call if (key, backend) in call]
        times = tuple(call[key, backend].rounds_us for call in timed)
        ratio = None
        if record.against:
            pairs = [(call[key, backend], call.get((key, record.against))) for call in timed]
            ratio = _pooled([(peer, own) for peer, own in pairs if own is not None])
        lines.append(Line(key, backend, times, record, ratio))
    return tuple(lines)


def _timed(records: Sequence[Record]) -> dict[tuple[Key, str], Record]:
    return {(key_of(r), r.backend): r for r in records if r.rounds_us}


def _pooled(pairs: Sequence[tuple[Record, Record]]) -> Ratio | None:
    """The ratio over the rounds of all calls; a round is only held against one of its own call."""
    paired = [(a, b) for a, b in pairs if len(a.rounds_us) == len(b.rounds_us)]
    if not paired:
        return None
    slower = [us for a, _ in paired for us in a.rounds_us]
    faster = [us for _, b in paired for us in b.rounds_us]
    return paired_ratio(slower, faster)


def without_times(results: Results) -> dict[tuple[str, str], str]:
    """Return why a backend of an op was never timed, by (op, backend)."""
    notes: dict[tuple[str, str], str] = {}
    timed: set[tuple[str, str]] = set()
    for call in results.calls:
        for record in call.records:
            if record.rounds_us:
                timed.add((record.op, record.backend))
            else:
                notes[record.op, record.backend] = record.note
    return {place: note for place, note in notes.items() if place not in timed}


class Regression(NamedTuple):
    """A backend of ours that became slower than both spreads explain."""

    key: Key
    backend: str
    old_us: Ratio
    new_us: Ratio


def regressions(old: Results, new: Results) -> tuple[Regression, ...]:
    """Return what of ours is slower in `new` than in `old`, of what both timed.

    Slower means: the intervals of the two medians do not overlap, and the medians are more than
    3 % apart.
    """
    before = {(line.key, line.backend): line for line in summary(old)}
    found: list[Regression] = []
    for line in summary(new):
        earlier = before.get((line.key, line.backend))
        if earlier is None or not line.is_ours:
            continue
        was, now = earlier.time_us, line.time_us
        if now.low > was.high and now.median > (1 + NOISE) * was.median:
            found.append(Regression(line.key, line.backend, was, now))
    return tuple(found)
