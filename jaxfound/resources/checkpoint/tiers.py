"""Where checkpoints are kept: a host's own disk, the folder that all hosts share, an object store.

LOCAL/host_id                       identity of this disk
LOCAL/RUN/uploader.lock             held by the one uploader of this host and run
LOCAL/RUN/uploads.jsonl             what the uploader did, a record a line
LOCAL/RUN/SLOT/40/                  part of step 40 by this host's SLOT-th process
SHARED/40/                          committed: all parts, one standard Orbax checkpoint
SHARED/40.ATTEMPT.uploading/        parts that have come so far; part-I.json when I's is all there
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint import steps
from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.manifest import Key, Manifest
from jaxfound.resources.checkpoint.sums import Depth, sum_text

HOST_ID = "host_id"
UPLOADING = ".uploading"
# In the folder of an upload that will never be whole: why. All hosts stop waiting for it.
REFUSED = "refused.txt"
# Boxes that other processes own: in a part on a host's disk, never on the shared tier.
COPIES = "copies"
# The folder of a checkpoint that holds its arrays.
STATE = "state"


@dataclass(frozen=True)
class Tiers:
    """Where a run keeps checkpoints besides its own directory.

    Attributes:
        local: folder on a disk of this host alone, fast; None = save into the run's directory.
        keep_local: newest steps that stay there.
        upload_mbps: most megabytes a second that a host copies to the shared tier; 0 = no limit.
        remote: URL of an object store that committed steps are copied to; empty = none.
        verify: whether files are summed before a restore, or only their sizes are looked at.
    """

    local: Path | None = None
    keep_local: int = 2
    upload_mbps: float | int = 0
    remote: str = ""
    verify: Depth = "full"

    def __post_init__(self) -> None:
        if self.keep_local < 2:
            raise ValueError(
                f"keep_local={self.keep_local}: hosts finish a save at different times, so the "
                "newest step that all have may be the one before. Use 2 or more"
            )


@dataclass(frozen=True)
class LocalTier:
    """This host's disk, for one run.

    Attributes:
        root: the folder of the run on it.
        host: the identity of the disk.
    """

    root: Path
    host: str

    @classmethod
    def open(cls, local: Path, *, shared: Path) -> "LocalTier":
        """Return the folder under `local` for the run that shares `shared`; the disk gets a name.

        Raises:
            CheckpointError: if the disk cannot be written.
        """
        try:
            host = _host_id(local)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.local_dir={local} cannot be used ({error}): name a folder on a disk "
                "of this host that can be written, or leave it empty"
            ) from error
        where = sum_text(str(shared.absolute()))[:8]
        return cls(local / f"{shared.absolute().parent.name}-{where}", host)

    def slot(self, number: int) -> Path:
        """Return the folder of this host's process `number`."""
        return self.root / str(number)

    def parts(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield every readable part that was written to this very disk, with its folder."""
        for slot in steps.folders(self.root):
            for step in steps.committed(slot):
                found = _read(slot, step)
                if found is not None and found.part is not None and found.part.host == self.host:
                    yield slot / str(step), found


@dataclass(frozen=True)
class SharedTier:
    """The folder that all hosts see."""

    root: Path

    def uploading(self, key: Key) -> Path:
        """Return where the parts of a save gather."""
        return self.root / f"{key.step}.{key.attempt}{UPLOADING}"

    def refuse(self, key: Key, reason: str) -> None:
        """Tell all hosts that a save will not become whole."""
        self.uploading(key).mkdir(parents=True, exist_ok=True)
        (self.uploading(key) / REFUSED).write_text(reason)

    def is_refused(self, key: Key) -> bool:
        """Say whether some host has told so."""
        return (self.uploading(key) / REFUSED).exists()

    def committed(self) -> dict[Key, Path]:
        """Return the whole checkpoints with readable manifests."""
        found: dict[Key, Path] = {}
        for step in steps.committed(self.root):
            manifest = _read(self.root, step)
            if manifest is not None:
                found[manifest.key] = self.root / str(step)
        return found

    def begun(self) -> dict[Key, Path]:
        """Return the saves whose parts are gathering."""
        found: dict[Key, Path] = {}
        for path in steps.folders(self.root):
            step, _, rest = path.name.partition(".")
            if path.name.endswith(UPLOADING) and step.isdecimal():
                found[Key(int(step), rest.removesuffix(UPLOADING))] = path
        return found


def part_name(process: int) -> str:
    """Return the name of the manifest that says that a process's part is all there."""
    return f"part-{process}.json"


def new_attempt() -> str:
    """Return a name that no other start of a program has."""
    return uuid.uuid4().hex[:12]


def _read(directory: Path, step: int) -> Manifest | None:
    try:
        return manifests.read_step(directory, step)
    except DamagedCheckpointError:
        return None


def _host_id(local: Path) -> str:
    """Return the identity of the disk, given to it the first time."""
    path = local / HOST_ID
    local.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        half = local / f"{HOST_ID}.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        half.write_text(uuid.uuid4().hex[:12])
        try:
            # Of several processes that come first at one time, one wins.
            os.link(half, path)
        except FileExistsError:
            pass
        finally:
            half.unlink()
    return path.read_text().strip()
