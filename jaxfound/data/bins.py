"""Prepared data as it lies on disk: what is in the folder, how it is opened and checked."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxfound.data.documents import Dropped
from jaxfound.data.errors import DataError

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
# Up to this size every byte is checked on opening (well under a second); above it, sizes are.
VERIFY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class SplitCounts:
    """What one split holds.

    Attributes:
        documents: usable documents.
        pieces: stretches they were cut into.
        bins: rows of seq_len slots.
        tokens: next-token pairs, which is the number of filled slots.
        longest_tokens: tokens of the longest document, bos and eos included.
        slots: bins times seq_len.
    """

    documents: int
    pieces: int
    bins: int
    tokens: int
    longest_tokens: int
    slots: int

    @property
    def padding_share(self) -> float:
        """Share of the slots that hold no token, 0 … 1."""
        return 1 - self.tokens / self.slots


@dataclass(frozen=True)
class ArrayFile:
    """One array's file, relative to the folder, with its size and SHA-256."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of prepared bins holds and what it was made from.

    Attributes:
        format_version: layout of the folder.
        key: hash of everything that decides the bins; the folder's name.
        seq_len: slots of a bin.
        packing: `packed` or `padded`.
        tokenizer: name of the tokenizer.
        tokenizer_fingerprint: its `fingerprint`.
        pad_id: token in slots that hold none.
        files: names of the text files, as they were when the bins were made.
        dropped: records left out, by reason.
        train: counts of the documents to train on.
        eval: counts of the held-out documents; None if none were held out.
        arrays: every array's file.
    """

    format_version: int
    key: str
    seq_len: int
    packing: str
    tokenizer: str
    tokenizer_fingerprint: str
    pad_id: int
    files: tuple[str, ...]
    dropped: dict[str, Dropped]
    train: SplitCounts
    eval: SplitCounts | None
    arrays: tuple[ArrayFile, ...]

    def to_json(self) -> str:
        """Return the manifest as indented JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Return the manifest that `to_json` wrote; ValueError, KeyError or TypeError otherwise."""
        raw = json.loads(text)
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version={raw['format_version']}, this is {FORMAT_VERSION}")
        held_out = raw["eval"]
        return cls(
            **{
                **raw,
                "files": tuple(raw["files"]),
                "train": SplitCounts(**raw["train"]),
                "eval": None if held_out is None else SplitCounts(**held_out),
                "dropped": {reason: Dropped(**d) for reason, d in raw["dropped"].items()},
                "arrays": tuple(ArrayFile(**array) for array in raw["arrays"]),
            }
        )


@dataclass(frozen=True)
class Bins:
    """The rows of one split, memory-mapped; T is seq_len.

    Attributes:
        tokens: inputs, [n T].
        targets: the token after each input, [n T].
        segment_ids: 1, 2 … for the pieces of a row, 0 where there is none, [n T].
        piece_documents: document of each piece, in the order of rows and slots, [P].
        piece_offsets: row i holds pieces offsets[i] … offsets[i + 1] - 1, [n + 1].
        pad_id: token and target in slots that hold none.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    piece_documents: np.ndarray
    piece_offsets: np.ndarray
    pad_id: int

    @property
    def num_bins(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        """Slots of a row."""
        return self.tokens.shape[1]

    @property
    def most_pieces(self) -> int:
        """Most pieces that a row holds, which is its largest segment id."""
        return int(np.diff(self.piece_offsets).max(initial=0))

    def documents(self, row: int) -> tuple[int, ...]:
        """Return the documents of one row, in the order of their segments."""
        begin, end = self.piece_offsets[row : row + 2]
        return tuple(self.piece_documents[begin:end].tolist())


@dataclass(frozen=True)
class Prepared:
    """Bins that are ready to be loaded.

    Attributes:
        path: their folder.
        manifest: what they are.
    """

    path: Path
    manifest: Manifest

    @cached_property
    def train(self) -> Bins:
        """The rows to train on."""
        return _open_bins(self.path / "train", self.manifest.pad_id)

    @cached_property
    def eval(self) -> Bins | None:
        """The held-out rows; None if data.eval_fraction was 0."""
        if self.manifest.eval is None:
            return None
        return _open_bins(self.path / "eval", self.manifest.pad_id)

    def place(self, document: int) -> str:
        """Return `file:line` of a document."""
        file, line = np.load(self.path / "documents.npy", mmap_mode="r")[document]
        return f"{self.manifest.files[file]}:{line}"

    def remarks(self) -> list[str]:
        """Return what a user should know before training on this, a sentence each."""
        return [
            f"the {name} split holds {counts.tokens} tokens in {counts.documents} document(s), "
            f"less than one row of seq_len={self.manifest.seq_len}"
            for name, counts in (("train", self.manifest.train), ("eval", self.manifest.eval))
            if counts is not None and counts.tokens < self.manifest.seq_len
        ]

    def check(self, *, every_byte: bool) -> None:
        """Every array's file has its size (and its hash); DataError names the one that has not."""
        for array in self.manifest.arrays:
            path = self.path / array.path
            size = path.stat().st_size if path.is_file() else -1
            if size != array.size_bytes:
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise DataError(
                    f"{path} {found}, its manifest says {array.size_bytes}: the folder is damaged. "
                    f"Delete {self.path} and prepare again"
                )
            if every_byte and sha256_of(path) != array.sha256:
                raise DataError(
                    f"{path} has other bytes than its manifest's SHA-256 says: the folder is "
                    f"damaged. Delete {self.path} and prepare again"
                )


def open_prepared(path: Path) -> Prepared:
    """Return the prepared bins in `path`, checked.

    Raises:
        DataError: if the folder is missing, damaged or of another version.
    """
    manifest_path = path / MANIFEST
    try:
        manifest = Manifest.from_json(manifest_path.read_text("utf-8"))
    except OSError as err:
        raise DataError(
            f"no prepared data in {path}: {err.strerror}. Run `jaxfound data prepare CONFIG`"
        ) from err
    except (ValueError, KeyError, TypeError) as err:
        raise DataError(
            f"{manifest_path} cannot be read ({err}): the folder is damaged or of another version. "
            f"Delete {path} and prepare again"
        ) from err
    prepared = Prepared(path, manifest)
    total_bytes = sum(array.size_bytes for array in manifest.arrays)
    prepared.check(every_byte=total_bytes <= VERIFY_BYTES)
    return prepared


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _open_bins(folder: Path, pad_id: int) -> Bins:
    return Bins(
        tokens=np.load(folder / "tokens.npy", mmap_mode="r"),
        targets=np.load(folder / "targets.npy", mmap_mode="r"),
        segment_ids=np.load(folder / "segment_ids.npy", mmap_mode="r"),
        piece_documents=np.load(folder / "piece_documents.npy", mmap_mode="r"),
        piece_offsets=np.load(folder / "piece_offsets.npy", mmap_mode="r"),
        pad_id=pad_id,
    )
