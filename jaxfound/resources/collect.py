"""The logs of all processes of a run as one, ordered by process 0's clock."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from jaxfound.resources.clock import OFFSET_EVENT

_PLACE = re.compile(r"attempt-(\d+)/process-(\d+)\.jsonl(?:\.(\d+))?\Z")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class LogLine(NamedTuple):
    """One record.

    Attributes:
        at_s: Unix time by process 0's clock.
        attempt: of the job.
        process: that wrote it.
        record: as it was written, with the process's own `time_s`.
    """

    at_s: float
    attempt: int
    process: int
    record: Mapping[str, object]


@dataclass
class Collected:
    """What was found.

    Attributes:
        lines: in order of time; of equals, by attempt and process.
        torn: lines that could not be read, by file: the last one of a process that was killed.
    """

    lines: list[LogLine] = field(default_factory=list[LogLine])
    torn: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))


def collect(runs: Iterable[Path], *, since_s: float | int = 0) -> Collected:
    """Return the records of all processes in the folders of a run, one folder a host or one in all.

    Times are corrected by the offset that a process measured last before it wrote, or first after.

    Args:
        runs: folders that have `logs/attempt-K/process-I.jsonl`.
        since_s: Unix time by process 0's clock before which records are left out.
    """
    found = Collected()
    by_process: dict[tuple[int, int], list[dict[str, object]]] = defaultdict(list)
    for place, path in sorted(files(runs)):
        by_process[place[:2]] += _records(path, found.torn)
    for (attempt, process), records in by_process.items():
        offsets = [r for r in records if r.get("event") == OFFSET_EVENT]
        offset_s = _number(offsets[0], "offset_s") if offsets else 0.0
        for record in records:
            if record.get("event") == OFFSET_EVENT:
                offset_s = _number(record, "offset_s")
            at_s = _number(record, "time_s") + offset_s
            if at_s >= since_s:
                found.lines.append(LogLine(at_s, attempt, process, record))
    found.lines.sort(key=lambda line: line[:3])
    return found


def files(runs: Iterable[Path]) -> Iterator[tuple[tuple[int, int, int], Path]]:
    """Yield the log files of a run with attempt, process, and age: older files sort first."""
    for run in runs:
        for path in run.glob("logs/attempt-*/process-*.jsonl*"):
            match = _PLACE.search(path.as_posix())
            if match is not None:
                yield (int(match[1]), int(match[2]), -int(match[3] or 0)), path


def since(text: str, *, now_s: float | int) -> float:
    """Return the Unix time that a text means: `90s`, `10m`, `2h`, `1d` ago, or seconds.

    Raises:
        ValueError: if it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is neither a time ago (90s, 10m, 2h, 1d) nor Unix seconds")
    number = float(match[1])
    return now_s - number * UNITS[match[2]] if match[2] else number


def next_attempt(logs: Path) -> int:
    """Return the number after those of the attempts that have a folder in `logs`."""
    found = (re.fullmatch(r"attempt-(\d+)", path.name) for path in logs.glob("attempt-*"))
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _records(path: Path, torn: dict[str, int]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("time_s"), int | float):
            found.append(cast(dict[str, object], record))
        else:
            torn[str(path)] += 1
    return found


def _number(record: Mapping[str, object], name: str) -> float:
    return float(cast(float, record[name]))
