"""An object store as the farthest tier: committed checkpoints go there and come back.

Objects have no rename. `URL/STEP/COMMIT` is written last and deleted first; without it there is no
checkpoint there. It holds the attempt that saved the step.
"""

# fsspec ships no types.
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import fsspec

from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint import steps
from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.manifest import MANIFEST, Key, Manifest
from jaxfound.resources.checkpoint.sums import CHUNK_BYTES, SUMS, FileSum, find_damage

log = logging.getLogger(__name__)

COMMIT = "COMMIT"
PULLING = ".pulling"


def committed(url: str) -> dict[Key, str]:
    """Return the whole checkpoints under `url` and where each is; none for an empty URL."""
    if not url:
        return {}
    store, root = _open(url)
    found: dict[Key, str] = {}
    if not store.exists(root):
        return found
    for path in cast(list[str], store.ls(root, detail=False)):
        name = path.rstrip("/").rpartition("/")[2]
        commit = f"{path.rstrip('/')}/{COMMIT}"
        if name.isdecimal() and store.exists(commit):
            attempt = cast(bytes, store.cat_file(commit)).decode().strip()
            found[Key(int(name), attempt)] = path
    return found


def push(source: Path, url: str) -> int:
    """Copy the committed checkpoint in `source` to `url`, its COMMIT last; return the bytes.

    Raises:
        DamagedCheckpointError: if a file is not as it was written; nothing is committed then.
    """
    manifest = manifests.read(source)
    faults = find_damage(source, manifest.files)
    if faults:
        raise DamagedCheckpointError("; ".join(faults))
    store, root = _open(url)
    target = f"{root}/{source.name}"
    if store.exists(target):
        withdraw(url, manifest.step)
    for name in [*manifest.files, MANIFEST]:
        place = f"{target}/{name}"
        store.makedirs(place.rpartition("/")[0], exist_ok=True)
        store.put_file(str(source / name), place)
    store.pipe_file(f"{target}/{COMMIT}", manifest.attempt.encode() or b"-")
    log.info("checkpoint.pushed", extra={"step": manifest.step, "url": url})
    return manifest.num_bytes


def pull(url: str, step: int, *, into: Path) -> Path:
    """Fetch `step` from `url` into the folder `into`, verified and committed; return its path.

    Raises:
        CheckpointError: if `url` has no such committed step.
        DamagedCheckpointError: if what came is not what was written; `into` is as it was.
    """
    store, root = _open(url)
    source = f"{root}/{step}"
    if not store.exists(f"{source}/{COMMIT}"):
        raise CheckpointError(
            f"{url} holds no committed step {step}; it has {sorted(k.step for k in committed(url))}"
        )
    pulling = into / f"{step}{PULLING}"
    steps.discard(pulling)
    pulling.mkdir(parents=True)
    store.get_file(f"{source}/{MANIFEST}", str(pulling / MANIFEST))
    manifest = manifests.read(pulling)
    for name in manifest.files:
        (pulling / name).parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{source}/{name}", str(pulling / name))
    return _commit_intact(pulling, manifest, where=url)


def copy(source: Path, *, into: Path) -> Path:
    """Copy the committed step in the folder `source` into `into`; return its path.

    Raises:
        DamagedCheckpointError: if it is not as it was written; `into` is as it was.
    """
    manifest = manifests.read_step(source.parent, int(source.name))
    pulling = into / f"{source.name}{PULLING}"
    steps.discard(pulling)
    into.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, pulling)
    return _commit_intact(pulling, manifest, where=str(source.parent))


def damage(url: str, step: int) -> list[str]:
    """Return one sentence for every object of `step` under `url` that is not as it was written.

    Every object is read; nothing is kept.
    """
    store, root = _open(url)
    with tempfile.TemporaryDirectory() as folder:
        store.get_file(f"{root}/{step}/{MANIFEST}", f"{folder}/{MANIFEST}")
        files = manifests.read(Path(folder)).files
    return [
        fault
        for name, expected in files.items()
        if (fault := _fault(store, f"{root}/{step}/{name}", expected))
    ]


def _fault(store: fsspec.AbstractFileSystem, place: str, expected: FileSum) -> str:
    total, num_bytes = SUMS[expected.algorithm](), 0
    try:
        with store.open(place, "rb") as file:
            while chunk := cast(bytes, file.read(CHUNK_BYTES)):
                total.update(chunk)
                num_bytes += len(chunk)
    except OSError as error:
        return f"{place} cannot be read ({error})"
    if (num_bytes, total.hexdigest()) == (expected.num_bytes, expected.digest):
        return ""
    return f"{place} has checksum {total.hexdigest()}, {expected.digest} was written"


def _commit_intact(pulling: Path, manifest: Manifest, *, where: str) -> Path:
    """Commit what was copied, or discard it when it is not what was written."""
    faults = find_damage(pulling, manifest.files)
    if faults:
        steps.discard(pulling)
        raise DamagedCheckpointError(f"step {manifest.step} from {where}: {'; '.join(faults)}")
    return steps.commit(pulling)


def withdraw(url: str, step: int) -> None:
    """Delete `step` under `url`; from the first moment on it is no checkpoint any more."""
    store, root = _open(url)
    target = f"{root}/{step}"
    if store.exists(f"{target}/{COMMIT}"):
        store.rm_file(f"{target}/{COMMIT}")
    store.rm(target, recursive=True)


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the store of `url` and the path in it; what was listed before is not believed.

    Raises:
        CheckpointError: if the package that knows such URLs is not installed.
    """
    to_store = cast(Callable[[str], tuple[fsspec.AbstractFileSystem, str]], fsspec.core.url_to_fs)
    try:
        store, root = to_store(url)
    except ImportError as error:
        raise CheckpointError(
            f"{url} needs a package that is not installed: {error}. For s3:// install s3fs"
        ) from error
    store.invalidate_cache()
    return store, root.rstrip("/")
