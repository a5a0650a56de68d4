"""What a committed checkpoint consists of: every file's sum, every leaf, where it came from.

It is the last file written before the rename that commits a checkpoint, and it carries its own
sum. A host's own disk holds parts: the manifest of a part says which boxes of which leaf it has.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.leaves import LeafPath, LeafSpec
from jaxfound.resources.checkpoint.sums import FileSum, sum_text

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
# The sum of files and of the manifest itself, by format version.
ALGORITHMS: Mapping[int, str] = {1: "crc32", 2: "xxh3"}

# First and last-but-one index of every dimension.
type Box = tuple[tuple[int, int], ...]


class Key(NamedTuple):
    """What tells one save from every other: its step, and the start of the program that saved it.

    Parts of different attempts are never put together, even if they are of one step.
    """

    step: int
    attempt: str = ""


@dataclass(frozen=True)
class Part:
    """What one process saved of a state that several hold.

    Attributes:
        process: its number in the job that saved.
        count: how many parts make the whole.
        host: the identity of the disk that it was written to.
        owned: boxes by leaf that are this process's to bring to the shared tier.
        copies: boxes by leaf that it holds and another process owns.
    """

    process: int
    count: int
    host: str
    owned: Mapping[LeafPath, tuple[Box, ...]] = field(
        default_factory=dict[LeafPath, tuple[Box, ...]]
    )
    copies: Mapping[LeafPath, tuple[Box, ...]] = field(
        default_factory=dict[LeafPath, tuple[Box, ...]]
    )

    def has(self, path: LeafPath, box: Box) -> bool:
        """Say whether the part can give this box of this leaf."""
        return box in self.owned.get(path, ()) or box in self.copies.get(path, ())


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint, or of one process's part of it.

    Attributes:
        step: number of optimizer steps that the state has seen.
        metadata: the caller's own values, as JSON gave them back.
        leaves: every array of the state.
        files: every file but this one, by path relative to the checkpoint.
        fingerprints: one number a leaf that does not depend on the mesh; empty in format 1.
        attempt: the start of the program that saved it.
        layout: the mesh that saved it, as degrees by axis.
        hosts: the disks or machines of its processes, in their order.
        part: what is here when it is not all.
    """

    step: int
    metadata: Mapping[str, object]
    leaves: tuple[LeafSpec, ...]
    files: Mapping[str, FileSum]
    fingerprints: Mapping[LeafPath, int] = field(default_factory=dict[LeafPath, int])
    attempt: str = ""
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    hosts: tuple[str, ...] = ()
    part: Part | None = None

    @property
    def key(self) -> Key:
        """The save that this is of."""
        return Key(self.step, self.attempt)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def tree_hash(self) -> str:
        """A digest of the paths, shapes and dtypes: equal for states that fit each other."""
        text = json.dumps([[leaf.path, leaf.shape, leaf.dtype] for leaf in self.leaves])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write(directory: Path, manifest: Manifest, *, name: str = MANIFEST) -> None:
    """Write `manifest` as `name` into `directory`, whole or not at all; on disk on return."""
    body = _to_json(manifest)
    body["own_sum"] = sum_body(body)
    half = directory / f"{name}.part"
    with half.open("w") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    half.rename(directory / name)


def read(directory: Path, *, name: str = MANIFEST) -> Manifest:
    """Return the manifest `name` in `directory`.

    Raises:
        DamagedCheckpointError: if it is unreadable or was changed after it was written.
        CheckpointError: if it was written in a format that this version does not know.
    """
    path = directory / name
    try:
        body = cast(dict[str, Any], json.loads(path.read_bytes()))
        version = body["format_version"]
        own = body.pop("own_crc32" if version == 1 else "own_sum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error})") from error
    # A later format may sum itself in another way; this one's is tried where it is not known.
    if own != sum_body(body):
        raise DamagedCheckpointError(f"{path} was changed after it was written: checksum {own}")
    if version not in ALGORITHMS:
        raise CheckpointError(
            f"{path} has format_version={version}; this version reads {list(ALGORITHMS)}. "
            "Use the jaxfound version that wrote it"
        )
    return _of_json(body)


def read_step(directory: Path, step: int) -> Manifest:
    """Return the manifest of the committed `step` under `directory`; raises as `read` does."""
    found = read(directory / str(step))
    if found.step != step:
        raise DamagedCheckpointError(
            f"{directory / str(step)} holds step {found.step}: it was renamed or copied over"
        )
    return found


def sum_body(body: Mapping[str, object]) -> str:
    """Return the sum of a manifest's fields, whatever the spacing of its text."""
    algorithm = ALGORITHMS.get(cast(int, body["format_version"]), ALGORITHMS[FORMAT_VERSION])
    return sum_text(json.dumps(body, sort_keys=True, separators=(",", ":")), algorithm)


def _to_json(manifest: Manifest) -> dict[str, object]:
    prints = manifest.fingerprints
    body: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "metadata": dict(manifest.metadata),
        "layout": dict(manifest.layout),
        "hosts": list(manifest.hosts),
        "tree_hash": manifest.tree_hash,
        "leaves": [
            {
                "path": leaf.path,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "fingerprint": prints.get(leaf.path),
            }
            for leaf in manifest.leaves
        ],
        "files": {
            name: {"bytes": file.num_bytes, file.algorithm: file.digest}
            for name, file in manifest.files.items()
        },
    }
    if manifest.part is not None:
        body["part"] = _part_to_json(manifest.part)
    return body


def _part_to_json(part: Part) -> dict[str, object]:
    held = {"owned": part.owned, "copies": part.copies}
    return {
        "process": part.process,
        "count": part.count,
        "host": part.host,
        **{
            name: [{"path": path, "boxes": boxes} for path, boxes in table.items()]
            for name, table in held.items()
        },
    }


def _of_json(body: dict[str, Any]) -> Manifest:
    algorithm = ALGORITHMS[body["format_version"]]
    leaves = cast(list[dict[str, Any]], body["leaves"])
    files = cast(dict[str, dict[str, Any]], body["files"])
    return Manifest(
        step=body["step"],
        metadata=body["metadata"],
        leaves=tuple(
            LeafSpec(tuple(leaf["path"]), tuple(leaf["shape"]), leaf["dtype"]) for leaf in leaves
        ),
        files={
            name: FileSum(file["bytes"], file[algorithm], algorithm) for name, file in files.items()
        },
        fingerprints={
            tuple(leaf["path"]): leaf["fingerprint"]
            for leaf in leaves
            if leaf.get("fingerprint") is not None
        },
        attempt=body.get("attempt", ""),
        layout=body.get("layout", {}),
        hosts=tuple(body.get("hosts", ())),
        part=_part_of_json(body["part"]) if "part" in body else None,
    )


def _part_of_json(body: dict[str, Any]) -> Part:
    def table(name: str) -> dict[LeafPath, tuple[Box, ...]]:
        return {
            tuple(entry["path"]): tuple(_box(box) for box in entry["boxes"])
            for entry in cast(list[dict[str, Any]], body[name])
        }

    return Part(
        body["process"], body["count"], body["host"], owned=table("owned"), copies=table("copies")
    )


def _box(value: list[list[int]]) -> Box:
    return tuple((first, end) for first, end in value)
