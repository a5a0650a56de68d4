"""What a save sets in motion: which saver writes it, who carries it on, what is deleted for it."""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

from jaxfound.resources.checkpoint import choose, remote, steps, uploader
from jaxfound.resources.checkpoint.errors import CheckpointError, describe_error
from jaxfound.resources.checkpoint.manifest import Key
from jaxfound.resources.checkpoint.saving import (
    JoinedSaver,
    Origin,
    PartSaver,
    Saver,
    Storage,
    WholeSaver,
)
from jaxfound.resources.checkpoint.tiers import LocalTier, SharedTier, Tiers, new_attempt
from jaxfound.resources.control import ControlPlane

log = logging.getLogger(__name__)

# Between two looks at what an uploader has done.
POLL_S = 0.2

# What the uploader records, and what it is called here.
KINDS: Mapping[str, "NoteKind"] = {
    "done": "uploaded",
    "remote": "stored",
    "failed": "upload_failed",
    "damaged": "upload_failed",
}

type NoteKind = Literal["save_skipped", "uploaded", "stored", "upload_failed"]


class Note(NamedTuple):
    """Something about a save that is not its commit.

    Attributes:
        kind: a save was not taken (`save_skipped`), a step is whole on the shared tier (`uploaded`)
            or in the object store (`stored`), or an upload failed and is tried again
            (`upload_failed`).
        step: the step; 0 when a failure is not of one.
        values: plain numbers and words.
    """

    kind: NoteKind
    step: int
    values: Mapping[str, object]


@dataclass
class Transit:
    """How one process's saves of a run travel.

    Attributes:
        directory: the run's own, shared by all hosts.
        keep: newest steps that stay there.
        tiers: what else there is.
        plane: this process among those of the job.
        layout: the mesh, for the record.
        storage: writes whole states where one process has all.
    """

    directory: Path
    keep: int
    tiers: Tiers
    plane: ControlPlane
    layout: Mapping[str, int]
    storage: Storage
    local: LocalTier | None = None
    notes: list[Note] = field(default_factory=list[Note])
    num_skipped: int = 0
    _origin: Origin | None = None
    _read_bytes: int = 0
    _child: int | None = None

    def __post_init__(self) -> None:
        if self.tiers.local is not None:
            self.local = LocalTier.open(self.tiers.local, shared=self.directory)

    @property
    def is_plain(self) -> bool:
        """True when one process writes straight into the run's directory."""
        return self.local is None and self.plane.count == 1

    @property
    def origin(self) -> Origin:
        """Who saves; all processes meet here the first time."""
        if self._origin is None:
            host = self.local.host if self.local else f"{os.uname().nodename}"
            told = self.plane.gather("checkpoint/join", json.dumps([host, new_attempt()]))
            pairs = [cast(list[str], json.loads(text)) for text in told]
            hosts = tuple(host for host, _ in pairs)
            self._origin = Origin(pairs[0][1], self.layout, hosts, self.plane.process)
        return self._origin

    def saver(self) -> Saver:
        """Return what writes this process's snapshots."""
        if self.is_plain:
            return WholeSaver(self.directory, self.storage)
        if self.local is not None:
            return PartSaver(self._slot(self.local), self.local.host)
        return JoinedSaver(self.directory, self.plane)

    def skip(self, step: int) -> None:
        """Count a save that was not taken because the one before is not on disk yet."""
        self.num_skipped += 1
        log.warning("checkpoint.skipped", extra={"step": step, "num_skipped": self.num_skipped})
        self.notes.append(Note("save_skipped", step, {"num_skipped": self.num_skipped}))

    def after_commit(self, newest: int, *, damaged: set[int]) -> None:
        """Delete what is not to be kept below `newest` and send it on; in the writing thread."""
        try:
            self._prune(newest, damaged=damaged)
        except OSError as error:
            # The new step is safe; a disk that will not delete fills up, which the next save says.
            log.warning("checkpoint.prune_failed", extra={"error": str(error)})
        if self.local is not None:
            self._carry_on_or_tell(newest)
        elif self.tiers.remote and self.plane.is_first:
            self._store(newest)

    def carry_on(self) -> None:
        """Start an uploader if something waits for one and none runs."""
        if self.local is None or not any(True for _ in self.local.parts()):
            return
        self._reap()
        options = uploader.options_of(
            self.local,
            self.directory,
            mbps=self.tiers.upload_mbps,
            keep=self.keep,
            url=self.tiers.remote,
        )
        self._child = uploader.start(options, root=self.local.root) or self._child

    def _carry_on_or_tell(self, step: int) -> None:
        try:
            self.carry_on()
        except OSError as error:
            # The step is on this disk; the next save tries again.
            self.notes.append(Note("upload_failed", step, {"error": describe_error(error)}))

    def take_notes(self) -> list[Note]:
        """Return what happened since the last call; process 0 tells of uploads."""
        if self.local is not None and self.plane.is_first:
            self._read_records(self.local)
        notes, self.notes = self.notes, []
        return notes

    def finish(self, *, limit_s: float | int) -> bool:
        """Wait until the newest local step is whole on the shared tier; False when time is up.

        It is when this host's uploader has said so: a record that comes later would be told to
        nobody.
        """
        if self.local is None or self._origin is None:
            return True
        attempt = self._origin.attempt
        mine = [m.key for _, m in self.local.parts() if m.key.attempt == attempt]
        ends_s = time.monotonic() + limit_s
        shared = SharedTier(self.directory)
        while mine and not (max(mine) in shared.committed() and _is_done(self.local, max(mine))):
            if time.monotonic() > ends_s or shared.is_refused(max(mine)):
                log.warning("checkpoint.not_uploaded", extra={"step": max(mine).step})
                return False
            self.carry_on()
            time.sleep(POLL_S)
        return True

    def _read_records(self, local: LocalTier) -> None:
        path = local.root / uploader.RECORD
        size = path.stat().st_size if path.exists() else 0
        if size <= self._read_bytes:
            return
        records, self._read_bytes = uploader.read_records(local.root, first_byte=self._read_bytes)
        attempt = self._origin.attempt if self._origin else ""
        for record in records:
            key = cast(list[object] | None, record.get("key"))
            kind = KINDS.get(cast(str, record["kind"]))
            if kind is None or (key is not None and key[1] != attempt):
                continue
            step = cast(int, key[0]) if key else 0
            values = {k: v for k, v in record.items() if k not in ("kind", "key", "time")}
            self.notes.append(Note(kind, step, values))

    def _slot(self, local: LocalTier) -> Path:
        """Return this process's folder: those of one host each have one on its disk."""
        return local.slot(self.origin.hosts[: self.plane.process].count(local.host))

    def _prune(self, newest: int, *, damaged: set[int]) -> None:
        if self.local is not None:
            folder, keep = self._slot(self.local), self.tiers.keep_local
        else:
            folder, keep = self.directory, self.keep
            if not self.plane.is_first:
                return
        known = [step for step in steps.committed(folder) if step <= newest]
        if self.local is not None:
            self._prune_left_slots(self.local, newest)
        for step in choose.doomed(known, keep=keep, damaged=damaged - {newest}):
            steps.remove(folder, step)
            log.info("checkpoint.pruned", extra={"step": step})
        steps.sweep(folder)

    def _prune_left_slots(self, local: LocalTier, newest: int) -> None:
        """Delete parts of folders that no process of this host has any more."""
        used = {str(slot) for slot in range(self.origin.hosts.count(local.host))}
        for folder in steps.folders(local.root):
            if folder.name not in used and max(steps.committed(folder), default=0) < newest:
                steps.discard(folder)

    def _store(self, step: int) -> None:
        """Copy a step to the object store from here, where no uploader runs."""
        try:
            num_bytes = remote.push(self.directory / str(step), self.tiers.remote)
        except (OSError, CheckpointError) as error:
            fault = describe_error(error)
            log.warning("checkpoint.upload_failed", extra={"step": step, "error": fault})
            self.notes.append(Note("upload_failed", step, {"error": fault}))
            return
        self.notes.append(Note("stored", step, {"num_bytes": num_bytes}))

    def _reap(self) -> None:
        """Take note of the end of an uploader that this process started."""
        if self._child is not None:
            try:
                done, _ = os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:
                # Another thread was told first.
                done = self._child
            if done:
                self._child = None


def _is_done(local: LocalTier, key: Key) -> bool:
    """Say whether the uploader of this disk has seen a save become whole."""
    records, _ = uploader.read_records(local.root)
    done = (cast(list[object], r["key"]) for r in records if r["kind"] == "done")
    return any(tuple(found) == tuple(key) for found in done)
