"""A folder appears whole or not at all, also when several processes make it at one time."""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Folders that a killed process left behind are removed after this long.
STALE_S = 7 * 24 * 3600.0
PREFIX = ".making-"


@contextmanager
def workspace(final: Path) -> Iterator[Path]:
    """Give a fresh folder beside `final` and remove it at the end, unless it was published."""
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent, now_s=time.time())
    work = parent / f"{PREFIX}{final.name}-{uuid.uuid4().hex[:12]}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, final: Path, *, is_whole: Callable[[Path], bool]) -> None:
    """Make `work` durable and give it the name `final`.

    A whole folder of that name, made by another process meanwhile, is kept and `work` is not
    used; a damaged one is replaced.

    Args:
        work: the finished folder, on the same file system.
        final: its name from now on.
        is_whole: whether a folder that is already there is good.
    """
    for folder, _, names in os.walk(work):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))
    while not _renamed(work, final):
        if is_whole(final):
            return
        damaged = final.with_name(f"{PREFIX}damaged-{uuid.uuid4().hex[:12]}")
        if _renamed(final, damaged):
            shutil.rmtree(damaged, ignore_errors=True)
    _sync(final.parent)


def _renamed(old: Path, new: Path) -> bool:
    """Rename a folder; False if `new` is there already, or `old` has gone."""
    try:
        os.rename(old, new)
    except OSError as err:
        if err.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        if err.errno == errno.ENOENT and not old.exists():
            return False
        raise
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(parent: Path, *, now_s: float) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        try:
            age_s = now_s - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age_s > STALE_S:
            shutil.rmtree(path, ignore_errors=True)
