"""The record of a run: `metrics.jsonl`, one JSON object a line, readable after any crash.

Every record has `event` (train, eval, checkpoint, resume …), `step` and `time_s` (Unix time).
NaN and infinity are the words "NaN", "Infinity", "-Infinity", so every line is valid JSON;
`read_metrics` turns them back into floats.

A run that resumes from step R writes `event="resume", step=R`. It repeats the steps after R, so
every earlier record with a step above R is superseded. One that had saved nothing resumes from 0.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, cast

from jaxfound.resources import json_lines

log = logging.getLogger(__name__)

RESUME = "resume"
# Read backwards in pieces of this size when the end of the last whole line is looked for.
TAIL_BYTES = 64 * 1024

Record = dict[str, object]


class MetricsWriter:
    """Appends records to one file; each has left the process when `write` returns.

    A line that a crash cut short is removed when the file is opened.

    Args:
        path: the file; it and its folder are made when they are not there.
        clock: Unix time in seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        self.path = path
        self._clock = clock
        # Unbuffered: one record is one write call, which a crash of the process cannot split.
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, event: str, *, step: int, **fields: object) -> None:
        """Append one record; `fields` are plain data and host scalars.

        Raises:
            TypeError: if a field is an array on a device or no data at all.
        """
        record = {"event": event, "step": step, "time_s": self._clock(), **fields}
        self._file.write(json_lines.to_line(record).encode())

    def close(self) -> None:
        """Put all records on disk and close the file; again: nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def repair(path: Path) -> int:
    """Cut a torn last line off the file at `path` and return the bytes removed, 0 for none."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    whole = _end_of_lines(path, size)
    if whole == size:
        return 0
    os.truncate(path, whole)
    log.warning("metrics.torn_line", extra={"path": str(path), "bytes": size - whole})
    return size - whole


def read_metrics(path: Path, *, superseded: Literal["drop", "mark"] = "drop") -> Iterator[Record]:
    """Yield the records of `path` in the order they were written.

    A torn last line is passed over: its writer may be at work.

    Args:
        path: a file that `MetricsWriter` wrote.
        superseded: `drop` leaves out records of steps that a later resume repeated; `mark` yields
            all, each with a field `superseded`.
    Raises:
        ValueError: if a line is not a record; names the line.
    """
    resumes = [
        (number, cast(int, record["step"]))
        for number, record in _records(path)
        if record["event"] == RESUME
    ]
    for number, record in _records(path):
        while resumes and resumes[0][0] <= number:
            resumes.pop(0)
        repeated = any(cast(int, record["step"]) > step for _, step in resumes)
        if superseded == "mark":
            yield {**record, "superseded": repeated}
        elif not repeated:
            yield record


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield every whole line of `path` with its number, from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield number, _parse(line, where=f"{path}:{number}")


def _parse(line: bytes, *, where: str) -> Record:
    try:
        record = json_lines.from_plain(json.loads(line))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): remove the line") from error
    if not isinstance(record, dict) or not {"event", "step"} <= record.keys():
        raise ValueError(f"{where} is not a record: it needs `event` and `step`. Remove the line")
    return cast(Record, record)


def _end_of_lines(path: Path, size: int) -> int:
    """Return the offset after the last line end in the first `size` bytes of `path`."""
    with path.open("rb") as file:
        while size > 0:
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            size = start
    return 0
