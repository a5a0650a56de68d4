"""Orbax, behind three calls: write arrays, read them back onto any mesh, read one in parts.

The only file that imports orbax, and imported itself when a manager is made: Orbax sets up the
root logger on import, where a program's own logging should have come first.
"""

# Orbax ships no types.
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

import logging
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jaxfound.resources.checkpoint.leaves import LeafPath

# More than any array has: what is held ends with the `StoredArray`.
CACHED_BYTES = 1 << 60
# A nested dict of leaves, by the parts of their paths: the form of a standard Orbax checkpoint.
Nested = dict[str, object]


class OrbaxStorage:
    """Arrays as a standard Orbax checkpoint (OCDBT, zarr3), which plain Orbax opens as well.

    Uncompressed: trained weights and moments shrink by a few per cent for much time. Orbax refuses
    arrays without elements; they are made anew on reading.
    """

    def write(self, directory: Path, arrays: Mapping[LeafPath, jax.Array]) -> None:
        """Write `arrays` into `directory`; errors are those of the file system and of Orbax."""
        tree = nest({path: array for path, array in arrays.items() if array.size})
        with said_once(), _checkpointer() as checkpointer:
            checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree))

    def read(
        self, directory: Path, like: Mapping[LeafPath, jax.ShapeDtypeStruct]
    ) -> dict[LeafPath, jax.Array]:
        """Return the arrays that `like` names; only the pieces that this process holds are read."""
        stored = {path: leaf for path, leaf in like.items() if leaf.size}
        tree = _restore_or_say(directory.absolute(), nest(stored)) if stored else {}
        return {
            path: pick(tree, path)
            if path in stored
            else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for path, leaf in like.items()
        }

    def open(self, directory: Path, path: LeafPath) -> "StoredArray":
        """Return one array, to be read in parts; nothing is read yet."""
        store = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{directory.absolute()}/",
                "path": ".".join(path) + "/",
            },
            "context": {"cache_pool": {"total_bytes_limit": CACHED_BYTES}},
        }
        return StoredArray(tensorstore.open(store, read=True).result())


class StoredArray:
    """An array of a checkpoint, read in parts.

    A trainer's shard is one piece on disk and is read whole. It stays in memory, once, until this
    object is gone: other parts of it cost no second reading, and the array is never there twice.
    """

    def __init__(self, store: "tensorstore.TensorStore") -> None:
        self._store = store

    def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
        """Return the part at `index`."""
        return np.asarray(self._store[index or ...].read().result())


def save_by_defaults(directory: Path, tree: object) -> None:
    """Write a pytree as a program does that calls Orbax alone: its defaults, on disk on return.

    This package saves otherwise; it is what its own saves are measured beside.
    """
    with said_once(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree))


@contextmanager
def said_once() -> Generator[None]:
    """Keep Orbax's threads from logging an error, twice and at length, that it raises as well."""
    logger = logging.getLogger("absl")

    def is_other(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def nest(leaves: Mapping[LeafPath, jax.Array] | Mapping[LeafPath, jax.ShapeDtypeStruct]) -> Nested:
    """Return `leaves` as dicts within dicts."""
    tree: Nested = {}
    for path, leaf in leaves.items():
        node = tree
        for part in path[:-1]:
            node = cast(Nested, node.setdefault(part, Nested()))
        node[path[-1]] = leaf
    return tree


def pick(tree: Nested, path: LeafPath) -> jax.Array:
    """Return the leaf of `tree` at `path`."""
    for part in path[:-1]:
        tree = cast(Nested, tree[part])
    return cast(jax.Array, tree[path[-1]])


def _restore_or_say(directory: Path, like: Nested) -> Nested:
    """Return what `_restore` does.

    Raises:
        ValueError: where Orbax raises a bare Exception: a box cannot be read.
    """
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_restore, directory, like)
        error = reading.exception()
    if type(error) is Exception:
        raise ValueError(str(error.__cause__ or error)) from error
    return reading.result()


def _restore(directory: Path, like: Nested) -> Nested:
    """Return the part of the checkpoint in `directory` that `like` names."""
    # The explicit shardings keep Orbax from the ones in the file, whose devices may not be here.
    to_args = cast(Callable[[Nested], Nested], ocp.checkpoint_utils.construct_restore_args)
    args = ocp.args.PyTreeRestore(like, restore_args=to_args(like), partial_restore=True)
    with _checkpointer() as checkpointer:
        return cast(Nested, checkpointer.restore(directory, args=args))


def _checkpointer() -> ocp.Checkpointer:
    """Return a blocking writer and reader of pytrees."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    return ocp.Checkpointer(handler)
