"""The checkpoint directory: which steps are committed, how one becomes so, how one goes away.

40/             committed: the name is the step, the manifest is inside
60.saving/      being written; becomes 60 by one rename
60.damaged/     set aside: found damaged when a run went on from an older step
20.deleting/    no longer a checkpoint; what a killed deletion left
"""

import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jaxfound.resources.checkpoint.manifest import MANIFEST

SAVING = ".saving"
DELETING = ".deleting"
DAMAGED = ".damaged"


def committed(directory: Path) -> tuple[int, ...]:
    """Return the committed steps under `directory`, smallest first, compared as numbers."""
    return tuple(sorted(int(p.name) for p in folders(directory) if is_step(p) and is_committed(p)))


def incomplete(directory: Path) -> tuple[str, ...]:
    """Return the names of saves that never became checkpoints."""
    return tuple(
        p.name
        for p in folders(directory)
        if p.name.endswith(SAVING) or (is_step(p) and not is_committed(p))
    )


def folders(directory: Path) -> list[Path]:
    """Return the sub-directories of `directory`, none when it does not exist."""
    return sorted(p for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []


def is_step(path: Path) -> bool:
    """Say whether `path` has a name that a committed step could have."""
    return path.name.isdecimal() and path.name == str(int(path.name))


def is_committed(path: Path) -> bool:
    """Say whether the directory `path` holds a manifest."""
    return (path / MANIFEST).is_file()


def begin(directory: Path, step: int) -> Path:
    """Return an empty directory in which `step` can be written."""
    saving = directory / f"{step}{SAVING}"
    discard(saving)
    saving.mkdir(parents=True)
    return saving


@contextmanager
def writing(directory: Path, step: int) -> Generator[Path]:
    """Give an empty directory for `step`, and commit it at the end; a failure leaves nothing."""
    saving = begin(directory, step)
    with ExitStack() as undo:
        undo.callback(discard, saving)
        yield saving
        commit(saving)
        undo.pop_all()


def commit(saving: Path) -> Path:
    """Turn the finished directory `saving`, STEP and a suffix, into the committed step STEP.

    Everything inside is on disk before the rename, and the rename is on disk afterwards; a
    committed step of the same number goes away in between.
    """
    for path in [saving, *saving.rglob("*")]:
        sync(path)
    step = saving.name.partition(".")[0]
    final = saving.with_name(step)
    old = saving.with_name(f"{step}{DELETING}")
    discard(old)
    if final.exists():
        final.rename(old)
    saving.rename(final)
    sync(final.parent)
    discard(old)
    return final


def remove(directory: Path, step: int) -> None:
    """Delete a step; from the first moment on it is no checkpoint any more."""
    doomed = directory / f"{step}{DELETING}"
    discard(doomed)
    (directory / str(step)).rename(doomed)
    discard(doomed)


def set_aside(directory: Path, step: int) -> None:
    """Take a damaged step out of the committed ones without deleting it, if it is there."""
    path, aside = directory / str(step), directory / f"{step}{DAMAGED}"
    if path.exists():
        discard(aside)
        path.rename(aside)


def sweep(directory: Path) -> None:
    """Delete what interrupted saves and deletions left behind."""
    for path in folders(directory):
        if path.name.endswith((SAVING, DELETING)):
            discard(path)


def discard(path: Path) -> None:
    """Delete the directory `path` if it is there."""
    if path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until the file or directory `path` is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
