"""Where text comes from: files, folders, patterns and the embedded corpus, as a list of files."""

import glob
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxfound.data.errors import DataError

Kind = Literal[".txt", ".jsonl", ".parquet"]
KINDS: tuple[Kind, ...] = (".txt", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".xz")


@dataclass(frozen=True)
class Corpus:
    """A text that ships with the package.

    Attributes:
        path: where it lies.
        sha256: hash of its decompressed bytes.
    """

    path: Path
    sha256: str


CORPORA: dict[str, Corpus] = {
    "pydocs": Corpus(
        Path(__file__).parent / "corpus" / "pydocs.jsonl.xz",
        "5736d97b6cfb560821c7e825e9cc94d43922aa970b8e242e7f7fdf3f8cb555bd",
    ),
}


@dataclass(frozen=True)
class SourceFile:
    """One file of documents.

    Attributes:
        name: what messages call it.
        path: where it lies.
        kind: how it is read.
    """

    name: str
    path: Path
    kind: Kind

    def lines(self) -> Iterator[bytes]:
        """Yield the file's lines, decompressed, without a byte-order mark or line ends.

        Only a line feed ends a line (a carriage return before it belongs to it): characters such
        as U+2028 are text.

        Raises:
            DataError: if the file cannot be opened or its compressed stream is damaged.
        """
        try:
            with self._open() as stream:
                for number, line in enumerate(stream):
                    clean = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                    yield clean.removesuffix(b"\n").removesuffix(b"\r")
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as err:
            raise DataError(f"cannot read {self.name}: {err}. Repair it or leave it out") from err

    def _open(self) -> io.BufferedIOBase:
        if self.path.suffix == ".gz":
            return gzip.GzipFile(self.path, "rb")
        if self.path.suffix == ".xz":
            return lzma.LZMAFile(self.path, "rb")
        return self.path.open("rb")

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes as they lie on disk."""
        try:
            with self.path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as err:
            raise DataError(f"cannot read {self.name}: {err.strerror}") from err


def find_files(source: str | tuple[str, ...]) -> tuple[SourceFile, ...]:
    """Return the files that `source` names, each once, folders and patterns in sorted order.

    Args:
        source: names of embedded corpora, .txt, .jsonl or .parquet files (.txt and .jsonl also as
            .gz or .xz), folders (searched all the way down, hidden names left out) and shell
            patterns. `pydocs` is the corpus; `./pydocs` is a file or folder of that name.

    Raises:
        DataError: if an entry names nothing, or a file of a kind that cannot be read.
    """
    entries = (source,) if isinstance(source, str) else source
    if not entries:
        raise DataError(f"data.source is empty: name a file, a folder or one of {list(CORPORA)}")
    found: dict[Path, SourceFile] = {}
    for entry in entries:
        for file in _expand(entry):
            found.setdefault(file.path.resolve(), file)
    return tuple(found.values())


def check_corpus(name: str) -> None:
    """The embedded corpus holds the text that was recorded; DataError if it does not."""
    corpus = CORPORA[name]
    try:
        data = lzma.decompress(corpus.path.read_bytes())
    except (OSError, lzma.LZMAError) as err:
        raise DataError(
            f"the embedded corpus {name} cannot be read: {err}. Install jaxfound again"
        ) from err
    actual = hashlib.sha256(data).hexdigest()
    if actual != corpus.sha256:
        raise DataError(
            f"the embedded corpus {name} has SHA-256 {actual} where {corpus.sha256} is recorded: "
            "the file was changed. Install jaxfound again"
        )


def _expand(entry: str) -> list[SourceFile]:
    if entry in CORPORA:
        check_corpus(entry)
        return [SourceFile(entry, CORPORA[entry].path, ".jsonl")]
    path = Path(entry).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [_one_file(path)]
    matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise DataError(
            f"data.source={entry!r} names nothing: no such file or folder, no file matches it as a "
            f"pattern, and the embedded corpora are {list(CORPORA)}"
        )
    return [_one_file(match) for match in matches if match.is_file()]


def _in_folder(folder: Path) -> list[SourceFile]:
    files = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        kind = kind_of(path)
        if kind and path.is_file() and not hidden:
            files.append(SourceFile(str(path), path, kind))
    if not files:
        raise DataError(
            f"the folder {folder} holds no {', '.join(KINDS)} file, at any depth: put text there "
            "or name another data.source"
        )
    return files


def _one_file(path: Path) -> SourceFile:
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"data.source={str(path)!r} is of no known kind: documents are read from "
            f"{', '.join(KINDS)} (.txt and .jsonl also as {' or '.join(COMPRESSED)}). Rename it to "
            "what it holds, or convert it to .jsonl, one JSON object a line"
        )
    return SourceFile(str(path), path, kind)


def kind_of(path: Path) -> Kind | None:
    """Return how the file would be read, by its name; None if it would not."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    for kind in KINDS:
        if name.suffix == kind and (kind != ".parquet" or name is path):
            return kind
    return None
