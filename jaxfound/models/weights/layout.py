"""The safetensors layout: an u64 header length, a JSON header, then raw little-endian arrays.

Read here and not through a library: numpy has no fp8, and a header is not to be trusted. What a
header says is checked against the file before any array is read.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ml_dtypes
import numpy as np

from jaxfound.models.weights.errors import WeightsError, listed

LENGTH_BYTES = 8
# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FP8 = ("F8_E4M3",)
# What a weight may be stored in: float32 holds each of them, so that none is rounded.
WEIGHTS = ("F32", "F16", "BF16", *FP8)
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Stored:
    """One array of a file.

    Attributes:
        path: the file.
        dtype: the format's name, a key of `DTYPES`.
        shape: dimensions, row-major.
        offset: first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.num_elements * DTYPES[self.dtype].itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows from `start` to `stop` of the first dim, the whole array by default.

        Raises:
            WeightsError: if the file ends early.
        """
        shape = self.shape
        if shape:
            stop = shape[0] if stop is None else stop
            shape = (stop - start, *shape[1:])
        dtype = DTYPES[self.dtype]
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        count = math.prod(shape) * dtype.itemsize
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + start * row_bytes)
        if raw.size != count:
            raise WeightsError(
                f"{self.path} ended while it was read: {raw.size} of {count} bytes from byte "
                f"{self.offset + start * row_bytes}. Is it still being downloaded?"
            )
        return raw.view(dtype).reshape(shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Return the arrays of a file by name, after checking the whole header against the file.

    Raises:
        WeightsError: if the file is truncated or has bytes left over, if arrays overlap, leave
            holes or do not have the bytes that shape and dtype ask for, if a name comes twice.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(LENGTH_BYTES)
        if first and LFS_POINTER.startswith(first):
            raise WeightsError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`")
        if len(first) < LENGTH_BYTES:
            raise WeightsError(f"{path} has {size} bytes: too short for a safetensors file")
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise WeightsError(
                f"{path} says that its header has {length:,} bytes, but the file has {size:,} and "
                f"a header at most {MAX_HEADER_BYTES:,}: it is truncated, or no safetensors file"
            )
        entries = _parse(file.read(length), path)
    data = LENGTH_BYTES + length
    stored: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        begin, end, stored[name] = _entry(name, entry, path=path, data=data)
        spans.append((begin, end, name))
    _check_spans(spans, path=path, data_bytes=size - data)
    return stored


def _parse(raw: bytes, path: Path) -> dict[str, object]:
    """Return the header's entries, the metadata apart."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        counts = Counter(name for name, _ in pairs)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise WeightsError(f"{path}: the header names {listed(twice)} twice")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path}: the header is not UTF-8 ({error.reason})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is a {type(header).__name__}, not an object")
    header.pop(METADATA, None)
    return header


def _entry(name: str, entry: object, *, path: Path, data: int) -> tuple[int, int, Stored]:
    """Return where one entry begins and ends after the header, and what it is."""
    try:
        fields = cast(Mapping[str, object], entry)
        dtype = str(fields["dtype"])
        shape = _whole_numbers(fields["shape"])
        begin, end = _whole_numbers(fields["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(
            f"{path}: {name}: takes dtype, shape and two data_offsets; got {entry!r}"
        ) from error
    if dtype not in DTYPES:
        raise WeightsError(f"{path}: {name}: dtype {dtype} is none of {', '.join(DTYPES)}")
    stored = Stored(path, dtype, shape, data + begin)
    if end - begin != stored.num_bytes:
        raise WeightsError(
            f"{path}: {name}: offsets {begin}…{end} hold {end - begin} bytes, but {dtype} "
            f"{list(shape)} has {stored.num_bytes}"
        )
    return begin, end, stored


def _whole_numbers(value: object) -> tuple[int, ...]:
    """Return a JSON list of numbers ≥ 0; TypeError for anything else."""
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise TypeError(value)
    return tuple(cast(list[int], value))


def _check_spans(spans: list[tuple[int, int, str]], *, path: Path, data_bytes: int) -> None:
    """Refuse arrays that overlap, leave holes, or do not end where the file ends."""
    position, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps" if begin < position else "leaves a hole after"
            raise WeightsError(
                f"{path}: {name} at bytes {begin}…{end} {what} {before}, which ends at {position}"
            )
        position, before = end, name
    if position > data_bytes:
        raise WeightsError(
            f"{path} is truncated: its header describes {position:,} bytes of arrays, the file has "
            f"{data_bytes:,}. {before} is cut. Download it again"
        )
    if position < data_bytes:
        raise WeightsError(
            f"{path} has {data_bytes - position:,} bytes after its last array {before}"
        )
