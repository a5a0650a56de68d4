"""The results file: every call that measured, appended one after another, never overwritten."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pallas_kernels.bench.timing import Record

FORMAT_VERSION = 1


class ResultsError(ValueError):
    """A results file cannot be read or must not be written; the text says why."""


@dataclass(frozen=True)
class Call:
    """What one process measured.

    Attributes:
        commit: the source that was measured; `+` at the end if files differed from it.
        date: when it began, ISO 8601 in UTC; empty where that was not recorded.
        ceilings: bytes/s and FLOP/s that the machine reached in this process.
        seconds: from the first size to the last record, building included; None if not recorded.
    """

    commit: str
    date: str
    versions: Mapping[str, str]
    ceilings: Mapping[str, float]
    seconds: float | None
    records: tuple[Record, ...] = ()
    note: str = ""

    def to_json(self) -> str:
        """The call as text, one record a line, so that a change shows in a diff."""
        head = {
            "commit": self.commit,
            "date": self.date,
            "note": self.note,
            "versions": dict(self.versions),
            "ceilings": dict(self.ceilings),
            "seconds": self.seconds,
        }
        fields = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines = [f"    {json.dumps(record.as_json())}" for record in self.records]
        fields.append('   "records": [\n' + ",\n".join(lines) + "\n   ]")
        return "  {\n" + ",\n".join(fields) + "\n  }"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Call":
        """Read what `to_json` wrote.

        Raises:
            ResultsError: if it is not a call.
        """
        try:
            return cls(
                commit=data["commit"],
                date=data["date"],
                versions=dict(data["versions"]),
                ceilings=dict(data["ceilings"]),
                seconds=data["seconds"],
                records=tuple(Record.from_json(record) for record in data["records"]),
                note=data.get("note", ""),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ResultsError(f"one of its calls is not one: {error!r}.") from error


@dataclass(frozen=True)
class Results:
    """All calls of a file, oldest first."""

    calls: tuple[Call, ...] = ()

    def with_call(self, call: Call) -> "Results":
        """Return these results and one call more."""
        return Results((*self.calls, call))

    def to_json(self) -> str:
        """The whole file."""
        calls = ",\n".join(call.to_json() for call in self.calls)
        return f'{{\n "format_version": {FORMAT_VERSION},\n "calls": [\n{calls}\n ]\n}}\n'


def read(path: Path) -> Results:
    """Return what the file at `path` holds.

    Raises:
        ResultsError: if there is no such file, or it is damaged or of another format.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"there is no results file {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultsError(f"{path} is not a results file: {error}.") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION or not isinstance(data.get("calls"), list):
        raise ResultsError(
            f"{path} has format_version={version}; this version reads {FORMAT_VERSION}. "
            "Nothing was changed in it; write to another file."
        )
    try:
        return Results(tuple(Call.from_json(call) for call in data["calls"]))
    except ResultsError as error:
        raise ResultsError(f"{path}: {error} Nothing was changed in it.") from error


def write(results: Results, path: Path) -> None:
    """Write `results` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(results.to_json())
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


class Recorder:
    """Appends one call to a file, again after every size, so that a run that is cut keeps it."""

    def __init__(self, path: Path | None, call: Call) -> None:
        """Read what the file at `path` holds already; without a path nothing is written.

        Raises:
            ResultsError: if there is a file that cannot be read: it would be lost.
        """
        self._path = path
        self._before = read(path) if path is not None and path.exists() else Results()
        self.call = call

    def set_ceilings(self, ceilings: Mapping[str, float]) -> None:
        """Take what the machine was found to reach."""
        self.call = replace(self.call, ceilings=ceilings)

    def add(self, records: tuple[Record, ...], *, seconds: float) -> None:
        """Take the records of a size and write the file."""
        self.call = replace(self.call, records=(*self.call.records, *records), seconds=seconds)
        if self._path is not None:
            write(self._before.with_call(self.call), self._path)
