"""A folder of text files, such as a tree of source code, as one .jsonl file of documents."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxfound.data.errors import DataError


@dataclass(frozen=True)
class Collected:
    """What a file of documents holds.

    Attributes:
        documents: how many.
        num_bytes: of their text, in UTF-8.
        left_out: files that were not taken, by reason.
        sha256: of the file.
    """

    documents: int
    num_bytes: int
    left_out: Mapping[str, int]
    sha256: str


def collect(folder: Path, out: Path, *, pattern: str, most_bytes: int = 0) -> Collected:
    """Write the files of a folder as records `{"path": …, "text": …}`, in the order of their paths.

    The same files make the same bytes. Each text is taken once; blank files, files that are not
    UTF-8 and hidden ones are left out.

    Args:
        folder: searched all the way down.
        out: a .jsonl file; there whole or not at all.
        pattern: of the files' names, e.g. `*.py`.
        most_bytes: of text; the first file that would go beyond ends it. 0 = all.

    Raises:
        DataError: if the folder has no such file, or `out` is not a .jsonl file.
    """
    if out.suffix != ".jsonl":
        raise DataError(f"{out} is no .jsonl file: records are written one a line. Name it so")
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: name the top of a tree of text files")
    left_out: Counter[str] = Counter()
    digest, documents, num_bytes = hashlib.sha256(), 0, 0
    part = out.with_suffix(f".{os.getpid()}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as stream:
            for path, text in within(texts(folder, pattern, left_out=left_out), most_bytes):
                record = json.dumps({"path": path, "text": text}, ensure_ascii=False) + "\n"
                stream.write(record.encode())
                digest.update(record.encode())
                documents, num_bytes = documents + 1, num_bytes + len(text.encode())
        if not documents:
            raise DataError(
                f"nothing in {folder} matches {pattern!r} and is text within the limit: "
                f"{dict(left_out) or 'no such file'}. Name another pattern, e.g. '*.txt'"
            )
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return Collected(documents, num_bytes, dict(left_out), digest.hexdigest())


def within(found: Iterable[tuple[str, str]], most_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield paths and texts up to the first text that would go beyond a limit; 0 = all."""
    room = most_bytes or math.inf
    for path, text in found:
        room -= len(text.encode())
        if room < 0:
            return
        yield path, text


def texts(folder: Path, pattern: str, *, left_out: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield the path in `folder` and the text of each file; count what is left out."""
    seen: set[bytes] = set()
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        try:
            data = path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            left_out["not UTF-8" if isinstance(error, UnicodeDecodeError) else "unreadable"] += 1
            continue
        key = hashlib.sha256(data).digest()
        reason = "blank" if not text.strip() else "a text that was taken" if key in seen else ""
        if reason:
            left_out[reason] += 1
            continue
        seen.add(key)
        yield str(name), text
