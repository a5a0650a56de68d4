"""What a committed checkpoint consists of: every file's size and checksum, every leaf's shape.

The array format below does not notice a flipped byte, so a restore trusts this file instead. It is
the last file written before the rename that commits a checkpoint, and it carries its own checksum.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.leaves import LeafSpec

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# Large enough that the loop is not what costs, small enough for a cache.
CHUNK_BYTES = 4 * 1024 * 1024
# zlib leaves the interpreter lock while it sums, so files are read side by side.
NUM_READERS = 4


class FileSum(NamedTuple):
    """A file's size in bytes and its CRC-32, eight hex digits."""

    num_bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        step: number of optimizer steps that the state has seen.
        metadata: the caller's own values, as JSON gave them back.
        leaves: every array of the state.
        files: every file but this one, by path relative to the checkpoint.
    """

    step: int
    metadata: Mapping[str, object]
    leaves: tuple[LeafSpec, ...]
    files: Mapping[str, FileSum]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def tree_hash(self) -> str:
        """A digest of the paths, shapes and dtypes: equal for states that fit each other."""
        text = json.dumps([[leaf.path, leaf.shape, leaf.dtype] for leaf in self.leaves])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sum_file(path: Path) -> FileSum:
    """Return the size and checksum of `path`; OSError as the file system gives it."""
    total, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            total += len(chunk)
    return FileSum(total, f"{crc:08x}")


def sum_files(directory: Path) -> dict[str, FileSum]:
    """Return the checksums of all files under `directory`, the manifest apart."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        sums = pool.map(sum_file, paths)
        names = (path.relative_to(directory).as_posix() for path in paths)
        return dict(zip(names, sums, strict=True))


def write(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` into `directory`; it is on disk when this returns."""
    body: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "metadata": dict(manifest.metadata),
        "tree_hash": manifest.tree_hash,
        "leaves": [
            {"path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype}
            for leaf in manifest.leaves
        ],
        "files": {
            name: {"bytes": file.num_bytes, "crc32": file.crc32}
            for name, file in manifest.files.items()
        },
    }
    body["own_crc32"] = _sum_body(body)
    with (directory / MANIFEST).open("w") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint in `directory`.

    Raises:
        DamagedCheckpointError: if the manifest is unreadable or was changed after it was written.
        CheckpointError: if it was written in a format that this version does not know.
    """
    path = directory / MANIFEST
    try:
        body = cast(dict[str, Any], json.loads(path.read_bytes()))
        own = body.pop("own_crc32")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error})") from error
    if own != _sum_body(body):
        raise DamagedCheckpointError(f"{path} was changed after it was written: checksum {own}")
    if body["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version={body['format_version']}; this version reads "
            f"{FORMAT_VERSION}. Use the jaxfound version that wrote it"
        )
    return Manifest(
        step=body["step"],
        metadata=body["metadata"],
        leaves=tuple(
            LeafSpec(tuple(leaf["path"]), tuple(leaf["shape"]), leaf["dtype"])
            for leaf in body["leaves"]
        ),
        files={name: FileSum(file["bytes"], file["crc32"]) for name, file in body["files"].items()},
    )


def find_damage(directory: Path, manifest: Manifest) -> list[str]:
    """Return one sentence for every file that is not as it was written; empty when all are."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        paths = [directory / name for name in manifest.files]
        found = pool.map(_fault, paths, manifest.files.values())
        return [fault for fault in found if fault]


def _fault(path: Path, expected: FileSum) -> str:
    """Return what is wrong with the file at `path`; empty when nothing is."""
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path} has {size} bytes, {expected.num_bytes} were written"
        actual = sum_file(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if actual != expected:
        return f"{path} has checksum {actual.crc32}, {expected.crc32} was written"
    return ""


def _sum_body(body: Mapping[str, object]) -> str:
    """Return the checksum of a manifest's fields, whatever the spacing of its text."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
