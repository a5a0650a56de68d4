"""How a snapshot becomes files: whole, as a part on this host's disk, or joined with others' parts.

One process writes a standard Orbax checkpoint into the run's directory. Several write their boxes:
each to its host's own disk, from where an uploader brings them together, or straight to the shared
folder, where process 0 joins them when all have said that theirs are there.
"""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast, runtime_checkable

import jax

from jaxfound.resources.checkpoint import database, publish, snapshot, steps
from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint.errors import CheckpointError, describe_error
from jaxfound.resources.checkpoint.fingerprint import Prints
from jaxfound.resources.checkpoint.leaves import (
    LeafPath,
    LeafSpec,
    describe,
    flatten,
    target_sharding,
    unwrap_abstract,
)
from jaxfound.resources.checkpoint.manifest import Box, Key, Manifest, Part
from jaxfound.resources.checkpoint.shards import Piece, ProcessOf, process_of, take_pieces
from jaxfound.resources.checkpoint.sums import sum_files
from jaxfound.resources.checkpoint.tiers import COPIES, STATE, SharedTier, new_attempt, part_name
from jaxfound.resources.control import ControlPlane
from jaxfound.resources.failpoint import reach

# How long processes wait for each other where one may have much more to write or read.
SLOW_S = 3600.0


@runtime_checkable
class Storage(Protocol):
    """How a checkpoint's arrays become files; steps, checksums and commits are none of its work."""

    def write(self, directory: Path, arrays: Mapping[LeafPath, jax.Array]) -> None:
        """Write `arrays` into `directory`, which does not exist yet; files are whole on return."""
        ...

    def read(
        self, directory: Path, like: Mapping[LeafPath, jax.ShapeDtypeStruct]
    ) -> dict[LeafPath, jax.Array]:
        """Return the arrays that `like` names, each with the sharding that `like` gives it."""
        ...


class Origin(NamedTuple):
    """Who saves: the attempt, its mesh, its hosts, and this process among them."""

    attempt: str
    layout: Mapping[str, int]
    hosts: tuple[str, ...]
    process: int = 0


class Snapshot(NamedTuple):
    """A copy of a state that later steps cannot change.

    Attributes:
        arrays: the leaves, one replica each; empty when they are saved in pieces.
        pieces: the boxes of this process; empty when leaves are saved whole.
        shapes: the shape of every leaf that has elements, as integers for random keys.
        chunks: the shape of their boxes.
        prints: the fingerprints, which may still be computed.
    """

    arrays: Mapping[LeafPath, jax.Array]
    pieces: Mapping[LeafPath, tuple[Piece, ...]]
    shapes: Mapping[LeafPath, tuple[int, ...]]
    chunks: Mapping[LeafPath, tuple[int, ...]]
    prints: Prints


class Job(NamedTuple):
    """A snapshot on its way to disk; the times are of `time.monotonic`."""

    step: int
    copy: Snapshot
    leaves: tuple[LeafSpec, ...]
    metadata: Mapping[str, object]
    started_s: float
    blocked_s: float

    def manifest(self, origin: Origin, *, files: Path, part: Part | None = None) -> Manifest:
        """Return the manifest of this save, of the files that are in the folder `files`."""
        return Manifest(
            self.step,
            self.metadata,
            self.leaves,
            sum_files(files, apart_from=manifests.MANIFEST),
            fingerprints=self.copy.prints.read(),
            attempt=origin.attempt,
            layout=origin.layout,
            hosts=origin.hosts,
            part=part,
        )


@runtime_checkable
class Saver(Protocol):
    """One way to save; `take` runs in the training thread, `write` beside it."""

    directory: Path
    in_pieces: bool

    def write(self, job: Job, origin: Origin) -> Manifest:
        """Commit the snapshot and return what was written."""
        ...


@dataclass
class WholeSaver:
    """One process, straight into the run's directory, by `storage`."""

    directory: Path
    storage: Storage
    in_pieces: bool = False

    def write(self, job: Job, origin: Origin) -> Manifest:
        """Write, sum and commit one snapshot; nothing is left of one that fails."""
        with steps.writing(self.directory, job.step) as saving:
            reach("save.local")
            self.storage.write(saving / STATE, job.copy.arrays)
            reach("save.manifest")
            manifest = job.manifest(origin, files=saving)
            manifests.write(saving, manifest)
        return manifest


@dataclass
class PartSaver:
    """Each process to its host's own disk; no process waits for another."""

    directory: Path
    host: str
    in_pieces: bool = True

    def write(self, job: Job, origin: Origin) -> Manifest:
        """Write, sum and commit this process's part; nothing is left of one that fails."""
        with steps.writing(self.directory, job.step) as saving:
            part = write_part(saving, job, origin, host=self.host, copies=True)
            manifest = job.manifest(origin, files=saving, part=part)
            manifests.write(saving, manifest)
        return manifest


@dataclass
class JoinedSaver:
    """All processes into the shared folder; process 0 joins the parts and commits."""

    directory: Path
    plane: ControlPlane
    in_pieces: bool = True

    def write(self, job: Job, origin: Origin) -> Manifest:
        """Write this process's part; committed on return, for all processes or for none.

        Raises:
            CheckpointError: on every process, if one could not write its part or join them.
        """
        shared = SharedTier(self.directory)
        key = Key(job.step, origin.attempt)
        try:
            manifest = self._write_part(shared.uploading(key), job, origin)
            fault = ""
        except (OSError, ValueError) as error:
            fault, manifest = describe_error(error), None
        votes = self.plane.gather("checkpoint/part", fault, timeout_s=SLOW_S)
        faults = [f"process {p}: {vote}" for p, vote in enumerate(votes) if vote]
        told = ""
        if self.plane.is_first:
            if faults:
                steps.discard(shared.uploading(key))
            else:
                told = _join(shared, key)
        told = self.plane.broadcast("checkpoint/joined", told, timeout_s=SLOW_S)
        if faults or told or manifest is None:
            raise CheckpointError("; ".join([*faults, *([told] if told else [])]))
        return manifest

    def _write_part(self, target: Path, job: Job, origin: Origin) -> Manifest:
        host = origin.hosts[origin.process]
        part = write_part(target, job, origin, host=host, copies=False)
        state = target / STATE
        mine = job.manifest(origin, files=state / f"{database.PROCESS}{origin.process}", part=part)
        files = {
            f"{STATE}/{database.PROCESS}{origin.process}/{name}": file
            for name, file in mine.files.items()
        }
        if origin.process == 0:
            files |= {f"{STATE}/{k}": v for k, v in publish.sum_structure(state).items()}
        mine = publish.with_files(mine, files)
        manifests.write(target, mine, name=part_name(origin.process))
        return mine


def _join(shared: SharedTier, key: Key) -> str:
    """Join the parts and commit; return what was wrong, empty when nothing was."""
    try:
        publish.publish(shared, key, is_first=True)
    except (OSError, ValueError, CheckpointError) as error:
        return describe_error(error)
    return ""


def write_part(target: Path, job: Job, origin: Origin, *, host: str, copies: bool) -> Part:
    """Write the pieces of `job` below `target`, with copies of others' boxes or without."""
    owned = {path: tuple(p for p in found if p.owned) for path, found in job.copy.pieces.items()}
    others = {
        path: tuple(p for p in found if not p.owned) for path, found in job.copy.pieces.items()
    }
    if not copies:
        others = {}
    state = target / STATE
    state.mkdir(parents=True, exist_ok=True)
    reach("save.local")
    database.write_boxes(
        state / f"{database.PROCESS}{origin.process}", owned, shapes=job.copy.shapes
    )
    if any(others.values()):
        database.write_boxes(target / COPIES, others, shapes=job.copy.shapes)
    if origin.process == 0:
        database.write_structure(state, job.copy.chunks)
    reach("save.manifest")
    return Part(
        origin.process, len(origin.hosts), host, owned=_boxes_of(owned), copies=_boxes_of(others)
    )


def snapshot_of(
    table: Mapping[LeafPath, jax.Array],
    *,
    process: int,
    in_pieces: bool,
    whose: ProcessOf = process_of,
    stage: snapshot.Stage | None = None,
) -> Snapshot:
    """Return copies of the leaves of `table` that later steps cannot change."""
    plain = {path: unwrap_abstract(leaf) for path, leaf in table.items() if leaf.size}
    arrays = {} if in_pieces else snapshot.take(table, stage=stage)
    # Copies on one device that computes in the host's memory can be counted while training goes
    # on. Programs of several devices are started by one thread only: two could wait for each other.
    is_alone = all(copy.sharding.num_devices == 1 for copy in arrays.values())
    can_wait = bool(arrays) and is_alone and snapshot.is_in_host_memory(table)
    return Snapshot(
        arrays=arrays,
        pieces=take_pieces(table, process=process, whose=whose, stage=stage) if in_pieces else {},
        shapes={path: tuple(leaf.shape) for path, leaf in plain.items()},
        chunks={
            path: target_sharding(leaf).shard_shape(leaf.shape) for path, leaf in plain.items()
        },
        prints=Prints(arrays, when="on_read") if can_wait else Prints(table),
    )


def save_unchanging(directory: Path, step: int, state: object, *, storage: Storage) -> Manifest:
    """Commit `state`, a pytree that nothing changes meanwhile, as `step`, without a copy of it."""
    table = cast(dict[LeafPath, jax.Array], flatten(state))
    copy = Snapshot(table, {}, {}, {}, Prints(table, when="on_read"))
    origin = Origin(new_attempt(), {}, (os.uname().nodename,))
    return WholeSaver(directory, storage).write(
        Job(step, copy, describe(table), {}, 0.0, 0.0), origin
    )


def _boxes_of(pieces: Mapping[LeafPath, tuple[Piece, ...]]) -> dict[LeafPath, tuple[Box, ...]]:
    return {path: tuple(piece.box for piece in found) for path, found in pieces.items() if found}
