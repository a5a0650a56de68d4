"""Documents out of files: what a record must be, and what happens to one that is not."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from jaxfound.data.errors import DataError
from jaxfound.data.source import Kind, SourceFile

log = logging.getLogger(__name__)

OnBadRecord = Literal["refuse", "skip"]


@dataclass(frozen=True)
class Document:
    """One text and where it came from (`line`: its first line, or its row in a table; from 1)."""

    text: str
    file: str
    line: int


@dataclass(frozen=True)
class Fault:
    """Why a record is no document.

    Attributes:
        reason: what it is counted under.
        detail: what exactly was found.
        way_out: what its owner can do.
        rule: `policy` follows data.on_bad_record; an empty text is always skipped and counted; a
            record without the field is always refused, since the config is wrong, not the record.
    """

    reason: str
    detail: str
    way_out: str
    rule: Literal["policy", "skip", "refuse"] = "policy"


@dataclass(frozen=True)
class Dropped:
    """How many records were left out for one reason, and the `file:line` of the first."""

    count: int
    first_place: str


# What a reader yields: the line a record begins on, and its text or its fault.
Record = tuple[int, str | Fault]

EMPTY = Fault("empty text", "no text but blanks", "", "skip")


def read_documents(
    files: Iterable[SourceFile],
    *,
    text_field: str,
    on_bad_record: OnBadRecord,
    dropped: dict[str, Dropped],
) -> Iterator[Document]:
    """Yield every usable document in the order of the files; count the others in `dropped`.

    Args:
        files: from `find_files`.
        text_field: field of a .jsonl record or column of a .parquet table that holds the text.
        on_bad_record: what happens to a damaged record.
        dropped: grows by each record left out, by reason.

    Raises:
        DataError: at the first damaged record if `on_bad_record` is `refuse`; at a record that
            has no `text_field` in any case. Names file and line.
    """
    for file in files:
        for line, record in READERS[file.kind](file, text_field):
            if isinstance(record, str):
                yield Document(record, file.name, line)
                continue
            refuse_or_count(record, place=f"{file.name}:{line}", policy=on_bad_record, to=dropped)


def refuse_or_count(
    fault: Fault, *, place: str, policy: OnBadRecord, to: dict[str, Dropped]
) -> None:
    """Count the faulty record in `to`, or raise DataError where the rule says so."""
    if fault.rule == "refuse" or (fault.rule == "policy" and policy == "refuse"):
        leave = ", or leave such records out with data.on_bad_record=skip"
        raise DataError(
            f"{place}: {fault.reason}: {fault.detail}. {fault.way_out}"
            f"{leave if fault.rule == 'policy' else ''}"
        )
    before = to.get(fault.reason)
    # One warning a reason: a corpus may hold millions of such records, and they are counted.
    log.log(
        logging.WARNING if before is None else logging.DEBUG,
        "data.skipped",
        extra={"place": place, "reason": fault.reason, "detail": fault.detail},
    )
    first = Dropped(0, place) if before is None else before
    to[fault.reason] = replace(first, count=first.count + 1)


def read_txt(file: SourceFile, text_field: str) -> Iterator[Record]:
    """Yield the runs of non-blank lines: in a .txt file, blank lines separate documents.

    Text whose own blank lines matter belongs into a .jsonl file.
    """
    del text_field
    lines: list[bytes] = []
    first = 1
    number = 0
    for number, raw in enumerate(file.lines(), 1):
        if raw.strip():
            first = first if lines else number
            lines.append(raw)
        elif lines:
            yield decode(b"\n".join(lines), first_line=first)
            lines = []
    if lines:
        yield decode(b"\n".join(lines), first_line=first)


def read_jsonl(file: SourceFile, text_field: str) -> Iterator[Record]:
    """Yield the text of each line's JSON object; blank lines separate nothing and are left out."""
    for number, raw in enumerate(file.lines(), 1):
        if not raw.strip():
            continue
        line, text = decode(raw, first_line=number)
        yield line, text if isinstance(text, Fault) else parse_record(text, text_field)


def read_parquet(file: SourceFile, text_field: str) -> Iterator[Record]:
    """Yield the text of each row; only the text's column is read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as err:
        raise DataError(
            f"reading {file.name} needs the `pyarrow` package: pip install 'jaxfound[data]', or "
            "convert it to .jsonl"
        ) from err
    try:
        with pq.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                yield 1, missing_field(text_field, names)
                return
            kind = table.schema_arrow.field(text_field).type
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            batches = table.iter_batches(columns=[text_field])
            # As bytes, so that text which is not UTF-8 is a fault of its own row.
            columns = (
                batch.column(0).cast(pa.large_binary()) if is_text else batch.column(0)
                for batch in batches
            )
            values = chain.from_iterable(column.to_pylist() for column in columns)
            for row, value in enumerate(values, 1):
                yield row, check_cell(value, text_field)
    except (pa.ArrowException, OSError) as err:
        raise DataError(f"cannot read {file.name}: {err}. Repair it or leave it out") from err


READERS: dict[Kind, Callable[[SourceFile, str], Iterator[Record]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}


def decode(raw: bytes, *, first_line: int) -> Record:
    """Return `raw` as text, or the line and the fault of the byte that is none."""
    zero = raw.find(b"\x00")
    if zero >= 0:
        line = first_line + raw[:zero].count(b"\n")
        fault = Fault("NUL bytes", "the line holds zero bytes, as a hole in a file does", REPAIR)
        return line, fault
    try:
        return first_line, raw.decode("utf-8")
    except UnicodeDecodeError as err:
        line = first_line + raw[: err.start].count(b"\n")
        column = err.start - (raw.rfind(b"\n", 0, err.start) + 1) + 1
        detail = f"byte 0x{raw[err.start]:02x} at byte {column} of the line ({err.reason})"
        return line, Fault("not UTF-8", detail, REWRITE)


REWRITE = "Write the file again as UTF-8 (for example iconv -f LATIN1 -t UTF-8)"
REPAIR = "Repair or remove the line"


def parse_record(line: str, text_field: str) -> str | Fault:
    """Return the text of one JSON object, or what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as err:
        return Fault("not JSON", f"{err.msg} (character {err.colno})", REPAIR)
    except (ValueError, RecursionError) as err:  # a number or a nesting beyond Python's limits
        return Fault("not JSON", str(err), REPAIR)
    if not isinstance(record, dict):
        kind = type(record).__name__
        return Fault("not an object", f"the line holds a {kind}, not {{…}}", REPAIR)
    if text_field not in record:
        return missing_field(text_field, list(record))
    return check_text(record[text_field], text_field)


def missing_field(text_field: str, found: list[str]) -> Fault:
    """Return the fault of a record that has other fields than the one that was asked for."""
    names = ", ".join(map(repr, found)) or "none"
    detail = f"{text_field!r} is not among the fields found: {names}"
    return Fault("no such field", detail, "Set data.text_field to the one that is text", "refuse")


def check_cell(value: object, text_field: str) -> str | Fault:
    """Return the text of a table's cell, bytes being read as UTF-8, or what it is instead."""
    if not isinstance(value, bytes):
        return check_text(value, text_field)
    try:
        return check_text(value.decode("utf-8"), text_field)
    except UnicodeDecodeError as err:
        detail = f"byte 0x{value[err.start]:02x} at byte {err.start + 1} ({err.reason})"
        return Fault("not UTF-8", detail, "Write the table again as UTF-8")


def check_text(value: object, text_field: str) -> str | Fault:
    """Return `value` if it is text that can be encoded, else what it is instead."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return Fault("not text", f"{text_field!r} is {kind}, not a string", REPAIR)
    if not value.strip():
        return EMPTY
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        detail = f"half of a surrogate pair at character {err.start + 1}"
        return Fault("not text", detail, REPAIR)
    return value
