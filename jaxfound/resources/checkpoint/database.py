"""Boxes of arrays in an OCDBT database, the form of a standard Orbax checkpoint, by TensorStore.

Every process writes a database of its own; `merge` joins them by reference, without moving a byte
of an array, into what plain Orbax opens. Only TensorStore's public calls are used, and no process
waits for another.
"""

# TensorStore's types say too little for a strict checker.
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jaxfound.resources.checkpoint.leaves import LeafPath
from jaxfound.resources.checkpoint.manifest import Box
from jaxfound.resources.checkpoint.shards import Piece, boxes

# The databases of processes inside the folder of a state, and what plain Orbax asks for besides.
PROCESS = "ocdbt.process_"
STRUCTURE = "_METADATA"
# A finished file is not copied again when a copy is resumed, so files must not be too large.
FILE_BYTES = 512 * 1024 * 1024
# As plain Orbax writes: what describes an array is in the tree, its numbers are not; one root.
DATABASE_CONFIG: Mapping[str, object] = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
}
# More than any array has: what is held ends with the array's handle.
CACHED_BYTES = 1 << 60
# Leaves that are read side by side.
NUM_READERS = 4


class Source(NamedTuple):
    """A database, and the boxes by leaf that are in it; None when it has all."""

    directory: Path
    boxes: Mapping[LeafPath, tuple[Box, ...]] | None = None

    def has(self, path: LeafPath, box: Box) -> bool:
        """Say whether the box can be read here."""
        return self.boxes is None or box in self.boxes.get(path, ())


def write_boxes(
    directory: Path,
    pieces: Mapping[LeafPath, Iterable[Piece]],
    *,
    shapes: Mapping[LeafPath, tuple[int, ...]],
) -> None:
    """Write `pieces` into the database in `directory`; on disk on return.

    Args:
        directory: made here.
        pieces: boxes of one size for each leaf.
        shapes: the shapes of the whole leaves.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context = tensorstore.Context({})
    # One transaction: one file for many small boxes, and one commit. Nothing is copied for it.
    transaction = tensorstore.Transaction(atomic=False)
    waiting: list[tensorstore.WriteFutures] = []
    for path, found in pieces.items():
        arrays = [(piece.box, np.asarray(piece.data)) for piece in found]
        if not arrays:
            continue
        first = arrays[0][1]
        spec = _array_spec(directory, path)
        spec["metadata"] = _array_metadata(shapes[path], chunk=first.shape, dtype=first.dtype)
        store = tensorstore.open(
            spec, create=True, open=True, context=context, transaction=transaction
        ).result()
        for box, array in arrays:
            target = store[_slices(box)]
            waiting.append(target.write(array, can_reference_source_data_indefinitely=True))
    transaction.commit_sync()
    for write in waiting:
        write.result()


def write_structure(directory: Path, chunks: Mapping[LeafPath, tuple[int, ...]]) -> None:
    """Write the tree of leaves, as plain Orbax reads it, into the state in `directory`.

    Args:
        directory: of the whole state.
        chunks: the shape of the boxes of every leaf.
    """
    # Key type 2 is a key of a dict: the state is a dict of dicts to those who open it.
    tree = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": 2} for key in path],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": chunk,
            },
        }
        for path, chunk in chunks.items()
    }
    body = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    with (directory / STRUCTURE).open("w") as file:
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())


def merge(directory: Path) -> None:
    """Join the databases of all processes in `directory` into one that refers to their files."""
    # References between databases need one context for all.
    context = tensorstore.Context({})
    whole = _open_database(directory, context)
    transaction = tensorstore.Transaction(atomic=True)
    target = whole.with_transaction(transaction)
    for part in sorted(directory.glob(f"{PROCESS}*")):
        _open_database(part, context).experimental_copy_range_to(target).result()
    transaction.commit_sync()


def read_arrays(
    sources: Iterable[Source], like: Mapping[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, jax.Array]:
    """Return the arrays that `like` names, each with its sharding; only boxes held here are read.

    Raises:
        KeyError: if no source has a box.
        ValueError: if a database cannot be read.
    """
    known = tuple(sources)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        arrays = pool.map(_read_array, repeat(known), like, like.values())
        return dict(zip(like, arrays, strict=True))


def _read_array(
    sources: tuple[Source, ...], path: LeafPath, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    sharding = leaf.sharding
    assert sharding is not None, "targets have their shardings"
    if not leaf.size:
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    here = sharding.addressable_devices
    stores: dict[Path, tensorstore.TensorStore] = {}
    shards: list[jax.Array] = []
    for box, devices in boxes(sharding, leaf.shape).items():
        mine = [device for device in devices if device in here]
        if not mine:
            continue
        source = next((s for s in sources if s.has(path, box)), None)
        if source is None:
            raise KeyError(f"box {box} of leaf {'.'.join(path)} is not on this disk")
        store = stores.get(source.directory) or _open_array(source.directory, path)
        stores[source.directory] = store
        numbers = np.asarray(store[_slices(box)].read().result())
        shards += [jax.device_put(numbers, device) for device in mine]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.dtype)


def _open_array(directory: Path, path: LeafPath) -> "tensorstore.TensorStore":
    """Return a leaf to be read; a box on disk is read once however many boxes are cut from it."""
    spec = {
        **_array_spec(directory, path),
        "context": {"cache_pool": {"total_bytes_limit": CACHED_BYTES}},
    }
    return tensorstore.open(spec, read=True).result()


def _array_spec(directory: Path, path: LeafPath) -> dict[str, object]:
    kvstore = {**_database_spec(directory), "path": f"{'.'.join(path)}/"}
    # A box of zeros is written like any other, and one that is not there is an error, not zeros.
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _open_database(directory: Path, context: "tensorstore.Context") -> "tensorstore.KvStore":
    return tensorstore.KvStore.open(_database_spec(directory), context=context).result()


def _database_spec(directory: Path) -> dict[str, object]:
    return {
        "driver": "ocdbt",
        "base": f"file://{directory.absolute()}/",
        "target_data_file_size": FILE_BYTES,
        "config": DATABASE_CONFIG,
    }


def _array_metadata(
    shape: tuple[int, ...], *, chunk: tuple[int, ...], dtype: np.dtype
) -> dict[str, object]:
    """Return a leaf's zarr form: boxes as they are on the devices, uncompressed.

    Trained weights and moments shrink by a few per cent for much time.
    """
    return {
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]
        if dtype.itemsize > 1
        else [{"name": "bytes"}],
    }


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)
