"""Save, list, prune and restore the steps of one run; the newest committed step is never lost.

A save returns when later steps cannot change its copy; a thread writes that, sums the files, and
commits the step by one rename. Only then are older steps pruned. One writer per directory; any
number of readers. Where the state goes and how processes share the work: `saving.py`; how one of
the checkpoints is chosen: `restoring.py`.
"""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, cast

import jax

from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint import saving, snapshot, steps
from jaxfound.resources.checkpoint.choose import Candidate
from jaxfound.resources.checkpoint.errors import CheckpointError
from jaxfound.resources.checkpoint.fingerprint import Prints
from jaxfound.resources.checkpoint.leaves import LeafPath, describe, flatten
from jaxfound.resources.checkpoint.manifest import Manifest
from jaxfound.resources.checkpoint.restoring import Loaded, Restorer
from jaxfound.resources.checkpoint.saving import Job, Storage
from jaxfound.resources.checkpoint.tiers import Tiers
from jaxfound.resources.checkpoint.transit import Note, Transit
from jaxfound.resources.checkpoint.writer import SaveReport, Writer
from jaxfound.resources.control import ControlPlane, LocalStore

log = logging.getLogger(__name__)

type Saved = Literal["saved", "skipped", "exists"]


class Restored(NamedTuple):
    """What a restore gives back: the step, the state on its devices, the caller's metadata."""

    step: int
    state: object
    metadata: Mapping[str, object]


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: folder of the steps, the same for all processes; made by the first save.
        keep: newest committed steps that stay; 0 keeps all.
        mode: `async` writes in a thread, `sync` returns when the step is committed.
        storage: turns whole arrays into files and back; Orbax when None.
        tiers: this host's own disk and an object store, if they are used.
        plane: this process among those of the job; alone when None. All of a job call `save`,
            `latest` and the restores in the same order.
        layout: the mesh, as degrees by axis; recorded in what is saved.
    Raises:
        ValueError: if `keep` is negative.
        CheckpointError: if the local disk cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        mode: Literal["async", "sync"] = "async",
        storage: Storage | None = None,
        tiers: Tiers | None = None,
        plane: ControlPlane | None = None,
        layout: Mapping[str, int] | None = None,
    ) -> None:
        if keep < 0:
            raise ValueError(f"keep={keep} is negative: use 0 to keep every checkpoint, or 1, 2 …")
        self.directory = directory
        self._keep = keep
        self._mode = mode
        self._plane = plane or ControlPlane(0, 1, LocalStore())
        self._transit = Transit(
            directory,
            keep=keep,
            tiers=tiers or Tiers(),
            plane=self._plane,
            layout=layout or {},
            storage=storage or _orbax(),
        )
        self._restorer = Restorer(
            directory,
            storage=self._transit.storage,
            tiers=self._transit.tiers,
            local=self._transit.local,
            plane=self._plane,
        )
        self._writer: Writer | None = None
        self._stage = snapshot.Stage()
        # Steps whose state is this run's own: saving one again has nothing to do.
        self._own: set[int] = set()
        self._last: int | None = None
        self._named: set[str] = set()
        self._ahead: tuple[int, ...] | None = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: object,
        metadata: Mapping[str, object],
        *,
        must: bool = False,
    ) -> Saved:
        """Take a snapshot of `state` and write it as `step`; later donation cannot change it.

        At most one snapshot is in memory. While an earlier one is still being written on some
        process, the save is `skipped` and counted, on all processes: training does not wait.
        `exists`: this very step was saved or restored by this manager, nothing to do.

        Args:
            step: optimizer steps that `state` has seen; above every committed step.
            state: pytree of jax arrays; random keys are allowed.
            metadata: JSON values that belong to the step, e.g. the position in the data.
            must: wait for the earlier save instead, e.g. at the end or before a preemption.
        Raises:
            CheckpointError: if the previous save failed, a leaf or the metadata cannot be stored,
                or a committed step that this run does not continue is in the way.
        """
        started_s = time.monotonic()
        if must or self._mode == "sync":
            self.wait()
        if not self._is_new(step):
            return "exists"
        if self._is_busy_anywhere():
            self._transit.skip(step)
            return "skipped"
        self.wait()
        plain = _as_json(metadata)
        table = cast(dict[LeafPath, jax.Array], flatten(state))
        origin, writer = self._transit.origin, self._open_writer()
        in_pieces = not self._transit.is_plain
        # Before the first save, no step may have shown what it takes.
        stage = None if self._last is None else self._stage
        copy = saving.snapshot_of(table, process=origin.process, in_pieces=in_pieces, stage=stage)
        blocked_s = time.monotonic() - started_s
        self._last = step
        writer.start(Job(step, copy, describe(table), plain, started_s, blocked_s), origin)
        if self._mode == "sync":
            self.wait()
        return "saved"

    def warm(self, state: object) -> None:
        """Allocate and compile what the first save would, and later ones would not."""
        table = cast(dict[LeafPath, jax.Array], flatten(state))
        if not (is_host := snapshot.is_in_host_memory(table)):
            snapshot.warm(table)
        if not (is_host and self._transit.is_plain):
            Prints(table).read()

    def wait(self) -> None:
        """Return when no save is being written; uploads go on.

        Raises:
            CheckpointError: if the save being written failed; PeerError: if it lost a process.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Wait for the last save and end the writing thread; raises as `wait` does."""
        if self._writer is not None:
            self._writer.close()

    def is_saving(self) -> bool:
        """Say whether an earlier save of this process is still being written."""
        return self._writer is not None and self._writer.is_busy

    def take_reports(self) -> list[SaveReport]:
        """Return the finished saves that no earlier call returned; raises as `wait` does."""
        return [] if self._writer is None else self._writer.take_reports()

    def take_notes(self) -> list[Note]:
        """Return the saves that were skipped, uploaded, stored or failed to be, since last time."""
        return self._transit.take_notes()

    def finish_uploads(self, *, limit_s: float | int) -> bool:
        """Return whether the newest local step came to the shared tier within `limit_s` seconds.

        True at once where saves go there directly.
        """
        return self._transit.finish(limit_s=limit_s)

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps of the run's directory, smallest first.

        Unfinished ones are logged once, by name.
        """
        current = self._writer.current_name if self._writer else ""
        for name in steps.incomplete(self.directory):
            if name not in self._named and name != current:
                self._named.add(name)
                log.warning(
                    "checkpoint.incomplete", extra={"dir": str(self.directory), "checkpoint": name}
                )
        return steps.committed(self.directory)

    def latest(self) -> int | None:
        """Return the newest step on any tier, None when there is none; nothing is verified."""
        if self._transit.is_plain and not self._transit.tiers.remote:
            return max(self.steps(), default=None)
        return max((c.key.step for c in self._restorer.candidates()), default=None)

    def latest_good(self) -> int | None:
        """Return the newest step whose files are the ones that were written.

        Raises:
            CheckpointError: if there are committed steps and every one is damaged: to go on from
                nothing would overwrite them.
        """
        self.steps()
        found = self._restorer.first_good(self._restorer.candidates())
        return found.key.step if found else None

    def metadata(self, step: int) -> Mapping[str, object]:
        """Return what the caller stored with `step`; raises as `manifest` does."""
        return self.manifest(step).metadata

    def manifest(self, step: int) -> Manifest:
        """Return the leaves, files and metadata of a committed step of the run's directory.

        Raises:
            CheckpointError: if `step` is not committed or its manifest is damaged.
        """
        known = self.steps()
        if step not in known:
            raise CheckpointError(
                f"no committed step {step} in {self.directory}; there are {list(known)}"
            )
        return manifests.read_step(self.directory, step)

    def restore(
        self, step: int, *, like: object, unread: Literal["refuse", "allow"] = "refuse"
    ) -> Restored:
        """Return the state of `step` in the tree, dtypes and shardings of `like`.

        Args:
            step: a committed step of the run's directory.
            like: pytree of ShapeDtypeStructs (or arrays); a leaf without sharding goes to the first
                local device. The mesh may be another than the one that saved.
            unread: whether the checkpoint may hold leaves that `like` does not ask for.
        Raises:
            CheckpointError: if the tree does not fit, before anything is read; names the leaves.
            DamagedCheckpointError: if a file is not as it was written; names the file.
        """
        candidate = Candidate(self.manifest(step).key, "shared")
        return self._taken(self._restorer.restore(candidate, like=like, unread=unread))

    def restore_latest(
        self, *, like: object, unread: Literal["refuse", "allow"] = "refuse"
    ) -> Restored | None:
        """Return the newest step that is whole for all processes and intact, wherever it is.

        A damaged one is passed over with a warning that says what is wrong with it; one that does
        not fit is an error, because an older one would not fit either. None when nothing was ever
        committed. Arguments and errors: `restore`.
        """
        self.steps()
        found = self._restorer.latest(like=like, unread=unread)
        return None if found is None else self._taken(found)

    def restore_weights(self, step: int | None, *, like: object) -> Restored:
        """Return `like`'s leaves of `step`, or of the newest intact one; others stay unread.

        Raises:
            CheckpointError: if nothing was committed yet; otherwise as `restore`.
        """
        if step is not None:
            return self.restore(step, like=like, unread="allow")
        found = self.restore_latest(like=like, unread="allow")
        if found is None:
            raise CheckpointError(
                f"{self.directory} holds no committed checkpoint yet: train, or wait for the "
                "first, or name another run"
            )
        return found

    def discard_after(self, step: int) -> None:
        """Delete every step above the committed `step`, so that a run can go on from there.

        Raises:
            CheckpointError: if `step` is not committed.
        """
        self.wait()
        self.manifest(step)
        self._ahead = None
        for newer in [s for s in self.steps() if s > step]:
            steps.remove(self.directory, newer)
            self._own.discard(newer)
            log.warning("checkpoint.discarded", extra={"step": newer, "after": step})

    def _open_writer(self) -> Writer:
        if self._writer is None:
            if not self._transit.is_plain and self._plane.is_first:
                # An uploader would take them for newer than what this run saves next.
                for step in self._restorer.damaged:
                    steps.set_aside(self.directory, step)
            self._writer = Writer(self._transit.saver(), committed=self._after_commit)
        return self._writer

    def _is_busy_anywhere(self) -> bool:
        """Say whether some process still writes; raise on all when a save failed on one."""
        busy = "busy" if self.is_saving() else ""
        if self._plane.count == 1:
            return bool(busy)
        failure = self._writer.failure() if self._writer else ""
        votes = self._plane.gather("checkpoint/busy", failure or busy)
        failed = [f"process {p}: {v}" for p, v in enumerate(votes) if v not in ("", "busy")]
        if failed:
            raise CheckpointError(
                f"the last save failed on {len(failed)} of {self._plane.count} processes: "
                f"{'; '.join(failed)}. Older checkpoints are intact. Free space or mend the disk, "
                "then start again"
            )
        return "busy" in votes

    def _is_new(self, step: int) -> bool:
        """Say whether `step` is to be written; raise when a foreign step is in the way."""
        if step < 0:
            raise ValueError(f"step={step} is negative: it counts optimizer steps")
        if step == self._last:
            self.wait()
        damaged = self._restorer.damaged
        ahead = [s for s in self._foreign() if s >= step and s not in damaged]
        if step in self._own and not set(ahead) - {step}:
            log.debug("checkpoint.exists", extra={"step": step})
            return False
        if ahead:
            raise CheckpointError(
                f"step {step} cannot be saved in {self.directory}: steps {ahead} are committed and "
                "would be restored in its place. Resume from the newest, call discard_after with "
                "the step you went back to, or use another run name"
            )
        return True

    def _foreign(self) -> tuple[int, ...]:
        """Return the committed steps that a save could be behind.

        Where others write as well, as they were when this process began: what an uploader of an
        earlier start commits meanwhile does not end the run.
        """
        if self._transit.is_plain:
            return self.steps()
        if self._ahead is None:
            told = json.dumps(self.steps() if self._plane.is_first else ())
            told = self._plane.broadcast("checkpoint/ahead", told)
            self._ahead = tuple(cast(list[int], json.loads(told)))
        return self._ahead

    def _after_commit(self, newest: int) -> None:
        """Go on from a committed step; runs in the writing thread."""
        self._own.add(newest)
        self._restorer.damaged.discard(newest)
        self._transit.after_commit(newest, damaged=self._restorer.damaged)

    def _taken(self, found: Loaded) -> Restored:
        """Return what was restored; to save it again there is nothing to do."""
        step = found.manifest.step
        self._own.add(step)
        return Restored(step, found.state, found.manifest.metadata)


def _as_json(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """Return `metadata` as JSON gives it back, so that later changes to it do not count."""
    try:
        return cast(dict[str, object], json.loads(json.dumps(dict(metadata), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata cannot be stored as JSON: {error}. Use text, finite numbers, lists and "
            "dicts; arrays belong into the state"
        ) from error


def _orbax() -> Storage:
    """Return the default storage; the reason for the late import is in its file."""
    from jaxfound.resources.checkpoint.storage import OrbaxStorage

    return OrbaxStorage()
