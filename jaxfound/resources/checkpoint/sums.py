"""Files and their sums: a restore trusts nothing that no sum stands for.

The array format below does not notice a flipped byte. XXH3 reads faster than disks write; CRC-32 is
what checkpoints of format 1 hold.
"""

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import xxhash

# Large enough that the loop is not what costs, small enough for a cache.
CHUNK_BYTES = 4 * 1024 * 1024
# Both sums leave the interpreter lock while they work, so files are read side by side.
NUM_READERS = 4

type Depth = Literal["full", "size"]


@runtime_checkable
class Sum(Protocol):
    """A sum that grows with what it is given."""

    def update(self, data: bytes, /) -> None:
        """Add `data`."""
        ...

    def hexdigest(self) -> str:
        """Return the sum of all that was added, as hex digits."""
        ...


class _Crc32:
    """CRC-32 in the form of a `Sum`."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


SUMS: Mapping[str, Callable[[], Sum]] = {"crc32": _Crc32, "xxh3": xxhash.xxh3_128}


class FileSum(NamedTuple):
    """A file's size in bytes, and its sum as hex digits of `algorithm`, a key of SUMS."""

    num_bytes: int
    digest: str
    algorithm: str = "xxh3"


def sum_text(text: str, algorithm: str = "xxh3") -> str:
    """Return the sum of `text`."""
    total = SUMS[algorithm]()
    total.update(text.encode())
    return total.hexdigest()


def sum_file(path: Path, algorithm: str = "xxh3") -> FileSum:
    """Return the size and sum of `path`; OSError as the file system gives it."""
    num_bytes, total = 0, SUMS[algorithm]()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
            num_bytes += len(chunk)
    return FileSum(num_bytes, total.hexdigest(), algorithm)


def sum_files(directory: Path, *, apart_from: str = "") -> dict[str, FileSum]:
    """Return the sums of all files under `directory`, the one named `apart_from` not among them."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / apart_from)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        sums = pool.map(sum_file, paths)
        names = (path.relative_to(directory).as_posix() for path in paths)
        return dict(zip(names, sums, strict=True))


def find_damage(
    directory: Path,
    files: Mapping[str, FileSum],
    *,
    depth: Depth = "full",
    share: slice = slice(None),
) -> list[str]:
    """Return one sentence for every file that is not as it was written; empty when all are.

    Args:
        directory: where the files are.
        files: what was written, by relative path.
        depth: `full` reads and sums every file, `size` only asks for its size.
        share: the files that this process looks at, of all in the order of their names.
    """
    names = sorted(files)[share]
    paths, sums = [directory / name for name in names], [files[name] for name in names]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return [fault for fault in pool.map(_fault, paths, sums, repeat(depth)) if fault]


def _fault(path: Path, expected: FileSum, depth: Depth) -> str:
    """Return what is wrong with the file at `path`; empty when nothing is."""
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path} has {size} bytes, {expected.num_bytes} were written"
        if depth == "size":
            return ""
        actual = sum_file(path, expected.algorithm)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if actual != expected:
        return f"{path} has checksum {actual.digest}, {expected.digest} was written"
    return ""
