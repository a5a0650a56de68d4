"""Parts become one checkpoint on the shared tier: joined, summed, committed by one rename.

Any host may do it when all parts are there, and any may do it again after a crash in between. No
device is touched and no array is moved.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxfound.resources.checkpoint import choose, database, steps
from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint.errors import DamagedCheckpointError
from jaxfound.resources.checkpoint.manifest import Key, Manifest
from jaxfound.resources.checkpoint.sums import FileSum, find_damage, sum_file, sum_files
from jaxfound.resources.checkpoint.tiers import STATE, SharedTier, part_name
from jaxfound.resources.failpoint import reach

log = logging.getLogger(__name__)

LOCK = ".publishing.lock"
# The database that refers to those of the processes: its tree and its head.
JOINED_TREE, JOINED_HEAD = "d", "manifest.ocdbt"
# A file system that has no locks at all.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})


def with_files(manifest: Manifest, files: Mapping[str, FileSum]) -> Manifest:
    """Return `manifest` of other files."""
    return replace(manifest, files=files)


def sum_structure(state: Path) -> dict[str, FileSum]:
    """Return the sum of the file that tells plain Orbax the tree."""
    return {database.STRUCTURE: sum_file(state / database.STRUCTURE)}


def parts_there(gathering: Path) -> dict[int, Manifest]:
    """Return the parts in the folder of an upload that are all there, by process."""
    found = (manifests.read(path.parent, name=path.name) for path in gathering.glob("part-*.json"))
    return {manifest.part.process: manifest for manifest in found if manifest.part is not None}


def is_complete(parts: Mapping[int, Manifest]) -> bool:
    """Say whether the parts of all processes are there."""
    counts = {manifest.part.count for manifest in parts.values() if manifest.part is not None}
    return bool(parts) and set(parts) == set(range(max(counts)))


def publish(shared: SharedTier, key: Key, *, is_first: bool) -> Path | None:
    """Join the parts of `key` and commit them; None when parts are missing or another host did it.

    Args:
        shared: where the parts are.
        key: the save.
        is_first: whether this is the host of process 0, which alone acts where files have no locks.
    Raises:
        DamagedCheckpointError: if the parts are not of one state, or a file is not there.
    """
    gathering = shared.uploading(key)
    with _lock(shared.root) as has_lock:
        if not (has_lock or is_first) or not gathering.is_dir():
            return None
        parts = parts_there(gathering)
        if not is_complete(parts):
            return None
        reach("save.merge")
        whole = _join(gathering, parts)
        manifests.write(gathering, whole)
        final = steps.commit(gathering)
    log.info("checkpoint.published", extra={"step": key.step, "num_bytes": whole.num_bytes})
    return final


def prune(shared: SharedTier, *, newest: Key, keep: int) -> list[int]:
    """Delete what `keep` does not cover up to the step just committed, and what it overtook."""
    known = [step for step in steps.committed(shared.root) if step <= newest.step]
    doomed = choose.doomed(known, keep=keep)
    for step in doomed:
        steps.remove(shared.root, step)
        log.info("checkpoint.pruned", extra={"step": step})
    for key, path in shared.begun().items():
        if key.step <= newest.step and key != newest:
            steps.discard(path)
    for path in steps.folders(shared.root):
        step = path.name.removesuffix(steps.DAMAGED)
        if path.name.endswith(steps.DAMAGED) and int(step) <= newest.step:
            steps.discard(path)
    return doomed


def _join(gathering: Path, parts: Mapping[int, Manifest]) -> Manifest:
    """Return the manifest of the whole, whose database is written here."""
    _check_one_state(gathering, parts)
    state = gathering / STATE
    # What an earlier try left.
    steps.discard(state / JOINED_TREE)
    for path in (state / JOINED_HEAD, gathering / manifests.MANIFEST):
        path.unlink(missing_ok=True)
    files = {name: file for manifest in parts.values() for name, file in manifest.files.items()}
    damage = find_damage(gathering, files, depth="size")
    if damage:
        raise DamagedCheckpointError(f"{gathering}: {'; '.join(damage)}")
    database.merge(state)
    files[f"{STATE}/{JOINED_HEAD}"] = sum_file(state / JOINED_HEAD)
    tree = sum_files(state / JOINED_TREE)
    files |= {f"{STATE}/{JOINED_TREE}/{name}": file for name, file in tree.items()}
    files |= {part_name(process): sum_file(gathering / part_name(process)) for process in parts}
    return replace(parts[0], files=files, part=None)


def _check_one_state(gathering: Path, parts: Mapping[int, Manifest]) -> None:
    first = parts[0]
    for process, manifest in parts.items():
        same = manifest.key == first.key and manifest.tree_hash == first.tree_hash
        if not same or manifest.fingerprints != first.fingerprints:
            raise DamagedCheckpointError(
                f"{gathering}: the parts of processes 0 and {process} are not of one state"
            )


@contextmanager
def _lock(root: Path) -> Generator[bool]:
    """Hold the lock of the shared tier; False where files have no locks."""
    handle = os.open(root / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        yield _locked(handle, root)
    finally:
        os.close(handle)


def _locked(handle: int, root: Path) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("checkpoint.no_locks", extra={"dir": str(root), "error": str(error)})
        return False
    return True
