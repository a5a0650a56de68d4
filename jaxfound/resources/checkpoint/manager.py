"""Save, list, prune and restore the steps of one run; the newest committed step is never lost.

A save returns when the state is copied to host memory; a thread writes the copy, sums the files,
and commits the step by one rename. Only then are older steps pruned. One process, one writer per
directory; any number of readers.
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
from jaxfound.resources.checkpoint import snapshot, steps
from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.leaves import (
    LeafPath,
    check_fits,
    describe,
    flatten,
    unwrap_abstract,
    wrap,
)
from jaxfound.resources.checkpoint.manifest import Manifest
from jaxfound.resources.checkpoint.writer import (
    STATE,
    Job,
    SaveReport,
    Storage,
    Writer,
    describe_error,
)

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a restore gives back: the step, the state on its devices, the caller's metadata."""

    step: int
    state: object
    metadata: Mapping[str, object]


class CheckpointManager:
    """The checkpoints of one run in one directory.

    Args:
        directory: folder of the steps; made by the first save.
        keep: newest committed steps that stay; 0 keeps all.
        mode: `async` writes in a thread, `sync` returns when the step is committed.
        storage: turns arrays into files and back; Orbax when None.
    Raises:
        ValueError: if `keep` is negative.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        mode: Literal["async", "sync"] = "async",
        storage: Storage | None = None,
    ) -> None:
        if keep < 0:
            raise ValueError(f"keep={keep} is negative: use 0 to keep every checkpoint, or 1, 2 …")
        self.directory = directory
        self._keep = keep
        self._mode = mode
        self._storage = storage or _orbax()
        self._writer = Writer(directory, storage=self._storage, committed=self._after_commit)
        # Steps whose state is this run's own: saving one again has nothing to do.
        self._own: set[int] = set()
        self._damaged: set[int] = set()
        self._named: set[str] = set()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def save(self, step: int, state: object, metadata: Mapping[str, object]) -> bool:
        """Take a snapshot of `state` and write it as `step`; later donation cannot change it.

        A save that is still being written is waited for first, so at most one snapshot is in
        memory. False: this very step was saved or restored by this manager, nothing to do.

        Args:
            step: optimizer steps that `state` has seen; above every committed step.
            state: pytree of jax arrays; random keys are allowed.
            metadata: JSON values that belong to the step, e.g. the position in the data.
        Raises:
            CheckpointError: if the previous save failed, a leaf or the metadata cannot be stored,
                or a committed step that this run does not continue is in the way.
        """
        started_s = time.monotonic()
        self.wait()
        if not self._is_new(step):
            return False
        plain = _as_json(metadata)
        table = cast(dict[LeafPath, jax.Array], flatten(state))
        leaves = describe(table)
        arrays = snapshot.take(table)
        blocked_s = time.monotonic() - started_s
        self._writer.start(Job(step, arrays, leaves, plain, started_s, blocked_s))
        if self._mode == "sync":
            self.wait()
        return True

    def wait(self) -> None:
        """Return when no save is being written.

        Raises:
            CheckpointError: if the save that was being written failed. Older steps are intact.
        """
        self._writer.wait()

    def close(self) -> None:
        """Wait for the last save and end the writing thread; raises as `wait` does."""
        self._writer.close()

    def is_saving(self) -> bool:
        """Say whether a save would have to wait for an earlier one."""
        return self._writer.is_busy

    def take_reports(self) -> list[SaveReport]:
        """Return the finished saves that no earlier call returned; raises as `wait` does."""
        return self._writer.take_reports()

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, smallest first; unfinished ones are logged once, by name."""
        for name in steps.incomplete(self.directory):
            if name not in self._named and name != self._writer.current_name:
                self._named.add(name)
                log.warning(
                    "checkpoint.incomplete", extra={"dir": str(self.directory), "checkpoint": name}
                )
        return steps.committed(self.directory)

    def latest(self) -> int | None:
        """Return the newest committed step, None when there is none; nothing is verified."""
        return max(self.steps(), default=None)

    def latest_good(self) -> int | None:
        """Return the newest committed step whose files are the ones that were written.

        Raises:
            CheckpointError: if there are committed steps and every one is damaged: to go on from
                nothing would overwrite them.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            damage = self._find_damage(step)
            if not damage:
                return step
            self._damaged.add(step)
            reasons.append(f"step {step}: {'; '.join(damage)}")
            log.warning("checkpoint.damaged", extra={"step": step, "reason": "; ".join(damage)})
        if reasons:
            raise DamagedCheckpointError(
                f"every checkpoint in {self.directory} is damaged. " + ". ".join(reasons) + ". "
                "Bring back a copy, or move the directory away to start from step 0"
            )
        return None

    def metadata(self, step: int) -> Mapping[str, object]:
        """Return what the caller stored with `step`; raises as `manifest` does."""
        return self.manifest(step).metadata

    def manifest(self, step: int) -> Manifest:
        """Return the leaves, files and metadata of a committed step.

        Raises:
            CheckpointError: if `step` is not committed or its manifest is damaged.
        """
        known = self.steps()
        if step not in known:
            raise CheckpointError(
                f"no committed step {step} in {self.directory}; there are {list(known)}"
            )
        return manifests.read(self._path(step))

    def restore(
        self, step: int, *, like: object, unread: Literal["refuse", "allow"] = "refuse"
    ) -> Restored:
        """Return the state of `step` in the tree, dtypes and shardings of `like`.

        Args:
            step: a committed step.
            like: pytree of ShapeDtypeStructs (or arrays); a leaf without sharding goes to the first
                local device. The mesh may be another than the one that saved.
            unread: whether the checkpoint may hold leaves that `like` does not ask for.
        Raises:
            CheckpointError: if the tree does not fit, before anything is read; names the leaves.
            DamagedCheckpointError: if a file is not as it was written; names the file.
        """
        manifest = self.manifest(step)
        self._check_fits(manifest, like=like, unread=unread)
        damage = manifests.find_damage(self._path(step), manifest)
        if damage:
            self._damaged.add(step)
            raise DamagedCheckpointError(
                f"step {step} is damaged: {'; '.join(damage)}. Restore another of "
                f"{[s for s in self.steps() if s != step]}, or bring back a copy"
            )
        return self._load(manifest, like=like)

    def restore_latest(
        self, *, like: object, unread: Literal["refuse", "allow"] = "refuse"
    ) -> Restored | None:
        """Return the newest step that is intact, None when nothing was ever committed.

        A damaged step is passed over with a warning that names the file; a step that does not fit
        is an error, because an older one would not fit either. Arguments and errors: `restore`.
        """
        step = self.latest_good()
        if step is None:
            return None
        manifest = self.manifest(step)
        self._check_fits(manifest, like=like, unread=unread)
        return self._load(manifest, like=like)

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
        for newer in [s for s in self.steps() if s > step]:
            steps.remove(self.directory, newer)
            self._own.discard(newer)
            log.warning("checkpoint.discarded", extra={"step": newer, "after": step})

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _is_new(self, step: int) -> bool:
        """Say whether `step` is to be written; raise when a foreign step is in the way."""
        if step < 0:
            raise ValueError(f"step={step} is negative: it counts optimizer steps")
        ahead = [s for s in self.steps() if s >= step and s not in self._damaged]
        if ahead == [step] and step in self._own:
            log.debug("checkpoint.exists", extra={"step": step})
            return False
        if ahead:
            raise CheckpointError(
                f"step {step} cannot be saved in {self.directory}: steps {ahead} are committed and "
                "would be restored in its place. Resume from the newest, call discard_after with "
                "the step you went back to, or use another run name"
            )
        return True

    def _find_damage(self, step: int) -> list[str]:
        try:
            manifest = manifests.read(self._path(step))
        except DamagedCheckpointError as error:
            return [str(error)]
        return manifests.find_damage(self._path(step), manifest)

    def _check_fits(
        self, manifest: Manifest, *, like: object, unread: Literal["refuse", "allow"]
    ) -> None:
        check_fits(
            manifest.leaves,
            describe(flatten(like)),
            where=f"checkpoint {self._path(manifest.step)}",
            allow_unread=unread == "allow",
        )

    def _load(self, manifest: Manifest, *, like: object) -> Restored:
        """Read the leaves of `like` from a step that fits and is intact."""
        table = flatten(like)
        targets = {path: unwrap_abstract(leaf) for path, leaf in table.items()}
        try:
            arrays = self._storage.read(self._path(manifest.step) / STATE, targets)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"step {manifest.step} in {self.directory} is intact but cannot be read: "
                f"{describe_error(error)}. Install the Orbax version that wrote it"
            ) from error
        leaves = [wrap(arrays[path], like=leaf) for path, leaf in table.items()]
        state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
        self._own.add(manifest.step)
        return Restored(manifest.step, state, manifest.metadata)

    def _after_commit(self, newest: int) -> None:
        """Delete what `keep` does not cover below `newest`; runs in the writing thread."""
        self._own.add(newest)
        self._damaged.discard(newest)
        committed = steps.committed(self.directory)
        kept = [s for s in committed if s not in self._damaged][-self._keep :]
        doomed = [s for s in committed if s < newest and s not in kept] if self._keep else []
        try:
            for step in doomed:
                steps.remove(self.directory, step)
                log.info("checkpoint.pruned", extra={"step": step})
            steps.sweep(self.directory)
        except OSError as error:
            # The new step is safe; a disk that will not delete fills up, which the next save says.
            log.warning("checkpoint.prune_failed", extra={"error": str(error)})


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
