"""Writes a published folder: shards of a size, their index, config.json; whole or not at all."""

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import INDEX, SHARD, SINGLE, Json
from jaxfound.models.weights.layout import DTYPES, LENGTH_BYTES, METADATA, Stored

# Arrays start at a multiple of this: a reader may map them.
HEADER_MULTIPLE = 8
# Published loaders refuse a file that does not say which framework's names it holds.
FILE_METADATA = {"format": "pt"}


class Planned(NamedTuple):
    """An array that will be written: its name, format and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return Stored(Path(), self.dtype, self.shape, 0).num_bytes

    @property
    def num_rows(self) -> int:
        """Size of the first dim."""
        return self.shape[0]


class NewFolder:
    """A folder that appears under its name when it is complete, and not before.

    Args:
        path: the folder; it must not exist, or be empty.
    Raises:
        WeightsError: if there is something at `path`.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise WeightsError(f"{path} is there already: give a new folder, or remove it first")
        self._path = path
        self.partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        self.partial.mkdir(parents=True)
        return self.partial

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            shutil.rmtree(self.partial)
            return
        if self._path.exists():
            self._path.rmdir()
        self.partial.rename(self._path)


class ArrayWriter:
    """Writes arrays into the files of one folder, in any order, every row exactly once.

    Args:
        folder: an empty folder.
        planned: every array, in the order of the files.
        max_shard_bytes: arrays of one file; a larger array has a file to itself.
    """

    def __init__(
        self, folder: Path, planned: Sequence[Planned], *, max_shard_bytes: int = 1 << 62
    ) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._places: dict[str, tuple[int, int, Planned]] = {}
        self._missing_rows = {p.name: p.num_rows for p in planned}
        self._shards = split(planned, max_shard_bytes=max_shard_bytes)
        names = [SINGLE] if len(self._shards) == 1 else [
            SHARD.format(i, len(self._shards)) for i in range(1, len(self._shards) + 1)
        ]  # fmt: skip
        self._files = dict(zip(names, self._shards, strict=True))

    def __enter__(self) -> "ArrayWriter":
        for name, planned in self._files.items():
            self._start(self._folder / name, planned)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()
        if error is None:
            missing = {name: rows for name, rows in self._missing_rows.items() if rows}
            assert not missing, f"rows never written, or twice: {dict(list(missing.items())[:8])}"
            self._write_index()

    def write(self, name: str, rows: np.ndarray, *, start: int = 0) -> None:
        """Write the rows of one array from `start` on; format and other dims are the planned ones.

        Args:
            name: of the array.
            rows: all of them by default.
            start: the first row.
        """
        file, offset, planned = self._places[name]
        assert rows.shape[1:] == planned.shape[1:], (name, rows.shape, planned)
        assert rows.dtype == DTYPES[planned.dtype], (name, rows.dtype, planned)
        self._missing_rows[name] -= len(rows)
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        position = offset + start * (planned.num_bytes // max(planned.num_rows, 1))
        written = 0
        while written < data.size:
            written += os.pwrite(file, data[written : written + (1 << 30)], position + written)

    def _start(self, path: Path, planned: Sequence[Planned]) -> None:
        """Write a file's header and open it for its arrays."""
        # Wide formats first, so that every array starts at a multiple of its element.
        order = sorted(planned, key=lambda p: -DTYPES[p.dtype].itemsize)
        header: Json = {METADATA: FILE_METADATA}
        ends = np.cumsum([p.num_bytes for p in order]).tolist()
        begins = [0, *ends[:-1]]
        for p, begin, end in zip(order, begins, ends, strict=True):
            header[p.name] = {"dtype": p.dtype, "shape": p.shape, "data_offsets": [begin, end]}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(LENGTH_BYTES + len(raw)) % HEADER_MULTIPLE)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._opened.callback(_sync_and_close, file)
        os.write(file, struct.pack("<Q", len(raw)) + raw)
        for p, begin in zip(order, begins, strict=True):
            self._places[p.name] = (file, LENGTH_BYTES + len(raw) + begin, p)

    def _write_index(self) -> None:
        if len(self._files) == 1:
            return
        weight_map = {p.name: file for file, planned in self._files.items() for p in planned}
        total = sum(p.num_bytes for planned in self._files.values() for p in planned)
        index: Json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(self._folder / INDEX, index)


def split(planned: Sequence[Planned], *, max_shard_bytes: int = 1 << 62) -> list[list[Planned]]:
    """Return the arrays of each file: filled in order, none above the size unless by one array."""
    shards: list[list[Planned]] = [[]]
    held = 0
    for one in planned:
        if shards[-1] and held + one.num_bytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(one)
        held += one.num_bytes
    return shards


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _sync_and_close(file: int) -> None:
    """Wait until a file is on disk: the rename that follows says that it is."""
    try:
        os.fsync(file)
    finally:
        os.close(file)
