"""Disks: whether the local one is local, the shared one shared, and what all hosts get of it."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxfound.resources.preflight.check import Check, check, passed
from jaxfound.resources.preflight.host import nearest_existing

# File systems that are served by another machine.
NETWORKED = frozenset(
    (
        *("nfs", "nfs4", "lustre", "ceph", "beegfs", "gpfs", "wekafs", "afs", "cifs", "smb3"),
        *("9p", "virtiofs", "glusterfs", "pvfs2", "panfs"),
    )
)
MARK = ".doctor-mark"
MEASURE_BYTES = 64 * 2**20
# All hosts together should get what one alone gets; below this share of it, they disturb each
# other.
MIN_TOGETHER = 0.5


class Writes(NamedTuple):
    """What one process wrote to the shared folder, bytes/s, flushed to the disk.

    Attributes:
        alone_bps: while nobody else wrote; only process 0 measures it, 0 elsewhere.
        together_bps: while all did.
    """

    alone_bps: float
    together_bps: float


def file_system(directory: Path, *, mounts: str) -> str:
    """Return the type of the file system that holds `directory`.

    Args:
        mounts: what /proc/self/mounts says.
    """
    place = str(nearest_existing(directory).resolve())
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        # The later of two mounts on one point hides the earlier.
        if inside and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def is_networked(kind: str) -> bool:
    """Say whether a type of file system is served by another machine, as far as its name tells."""
    return kind in NETWORKED or kind.startswith("fuse.")


def leave_mark(directory: Path, *, token: str, process: int) -> None:
    """Leave a file that says who was here; other processes look for it.

    Raises:
        OSError: if none can be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{MARK}-{token}-{process}"
    with path.open("wb") as file:
        os.fsync(file.fileno())


def marks(directory: Path, *, token: str) -> tuple[int, ...]:
    """Return the processes whose marks are seen there."""
    # Listing, not looking for a name: a network file system remembers that a name was absent.
    found = directory.glob(f"{MARK}-{token}-*")
    return tuple(sorted(int(path.name.rpartition("-")[2]) for path in found))


def remove_mark(directory: Path, *, token: str, process: int) -> None:
    """Remove this process's own mark, if it is there."""
    (directory / f"{MARK}-{token}-{process}").unlink(missing_ok=True)


def write_speed(directory: Path, *, process: int, num_bytes: int = MEASURE_BYTES) -> float:
    """Return the bytes/s of writing a file and flushing it; the file is removed.

    Raises:
        OSError: if it cannot be written.
    """
    path = directory / f".doctor-write-{process}"
    # Random, so that no file system compresses it away.
    piece = os.urandom(2**20)
    began_s = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(max(1, num_bytes // len(piece))):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return num_bytes / (time.monotonic() - began_s)
    finally:
        path.unlink(missing_ok=True)


def check_local(directory: str, kind: str, *, others_seen: tuple[int, ...]) -> Check:
    """Say whether a folder that must be this host's own is.

    Args:
        kind: its file system's type.
        others_seen: processes of other hosts whose marks are seen in it.
    """
    shared = f", marks of processes {list(others_seen)} are seen" if others_seen else ""
    return check(
        "local disk",
        passed(not others_seen and not is_networked(kind)),
        f"{directory} ({kind or 'unknown'}){shared}",
        threshold="on this host's own disk",
        remedy="name a folder on the host's NVMe: a checkpoint written there by every host at once "
        "would else go over the network",
    )


def check_shared(directory: str, seen: Mapping[int, tuple[int, ...]]) -> Check:
    """Say whether all processes see all others' marks in the shared folder.

    Args:
        seen: by process, whose marks it sees.
    """
    blind = {p: sorted(set(seen) - set(found)) for p, found in seen.items()}
    told = [f"process {p} does not see those of {b}" for p, b in blind.items() if b]
    return check(
        "shared disk",
        passed(not told),
        f"{directory}: {'; '.join(told) or 'every mark is seen everywhere'}",
        threshold="one folder for all hosts",
        remedy="mount the same file system at this path on every host",
    )


def check_writes(writes: Mapping[int, Writes]) -> Check:
    """Say how much the hosts disturb each other when all write to the shared folder at once."""
    alone = max(w.alone_bps for w in writes.values())
    each = [w.together_bps for w in writes.values()]
    share = sum(each) / alone if alone else 0.0
    return check(
        "shared disk, all writing",
        passed(share >= MIN_TOGETHER, "warn"),
        f"{alone / 1e6:,.0f} MB/s for one alone; {sum(each) / 1e6:,.0f} MB/s for {len(each)} at "
        f"once, the slowest {min(each) / 1e6:,.0f} MB/s",
        threshold=f"together at least {MIN_TOGETHER:.0%} of one alone",
        remedy="write checkpoints to local disks first, and let few hosts upload at a time",
    )
