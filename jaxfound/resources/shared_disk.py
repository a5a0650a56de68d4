"""Which processes of a job see the same folder: one path can be one disk, or one disk a host."""

import uuid
from pathlib import Path

from jaxfound.resources.control import ControlPlane


def first_on_disk(plane: ControlPlane, folder: Path) -> int:
    """Return the first process that sees in `folder` what this one writes there.

    All processes call it together; the folder is made. A file system that shows files late makes a
    process the first of its own, which is safe where the result is published whole.

    Raises:
        PeerError: if some process does not come.
    """
    if plane.count == 1:
        return plane.process
    word = plane.broadcast("disk", uuid.uuid4().hex)
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".seen-{word}-{plane.process}"
    mine.touch()
    plane.barrier("disk")
    seen = [int(path.name.rpartition("-")[2]) for path in folder.glob(f".seen-{word}-*")]
    plane.barrier("disk")
    mine.unlink()
    return min(seen)
