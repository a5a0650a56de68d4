"""A model's arrays as published weights: the same names, formats and numbers that came in."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from jaxfound.config.model import ModelConfig
from jaxfound.models.build import Arrays, describe
from jaxfound.models.weights.errors import WeightsError, listed
from jaxfound.models.weights.folder import CONFIG
from jaxfound.models.weights.fp8 import SCALE, quantize
from jaxfound.models.weights.layout import FP8
from jaxfound.models.weights.origin import Origin
from jaxfound.models.weights.outgoing import ExportFormat, Outgoing, rounded
from jaxfound.models.weights.rows import Entry, entries, has_no_row
from jaxfound.models.weights.writer import ArrayWriter, NewFolder, write_json

GB = 1_000_000_000
# Elements that are turned round and rounded together: a whole array beside itself is too much.
STRETCH = 1 << 19


@runtime_checkable
class Leaf(Protocol):
    """One array of ours, in host memory or read in parts."""

    def __getitem__(self, index: tuple[int | slice, ...], /) -> np.ndarray:
        """Return the part at `index`."""
        ...


# Returns one array of ours by path.
ReadLeaf = Callable[[str], Leaf]


def export_hub(
    out: Path | str,
    model: ModelConfig,
    source: Arrays | ReadLeaf,
    *,
    dtype: ExportFormat = "stored",
    origin: Origin | None = None,
    max_shard_bytes: int = 5 * GB,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a model as a published folder: config.json and safetensors.

    Args:
        out: a folder that does not exist yet; it appears when it is complete.
        model: what the weights are of.
        source: the arrays, or what gives one by path, called once for each: then no more than one
            of them, and those that share published arrays with it, is held.
        dtype: `stored` keeps the formats of `origin`, float32 for arrays it does not know. The
            router's bias is always float32; `fp8` stores what is no linear layer's in bfloat16.
        origin: what is known of the folder that the weights came from.
        max_shard_bytes: bytes of arrays in one file.
        beside: writes more files into the folder before it appears.
    Raises:
        WeightsError: if no published class computes this model, an array cannot be read here, or
            `out` is there already. Nothing is left behind.
    """
    origin = origin or Origin()
    read = _reader(source) if isinstance(source, Arrays) else source
    table = describe(model)
    wanted = entries(model, table)
    plan = Outgoing(model, wanted, dtype=dtype, origin=origin)
    config = plan.config()
    lost = [spec.path for spec in table if has_no_row(spec, model)]
    with NewFolder(Path(out)) as folder:
        with ArrayWriter(folder, plan.arrays, max_shard_bytes=max_shard_bytes) as writer:
            _refuse_lost(lost, read)
            for entries_of_leaves in together(wanted):
                _write_group(entries_of_leaves, read, writer, plan)
        write_json(folder / CONFIG, config)
        if beside is not None:
            beside(folder)


def together(wanted: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries of arrays of ours that share published arrays, by group of such arrays."""
    wanted = list(wanted)
    group_of: dict[str, int] = {}
    by_hub: dict[str, set[str]] = {}
    for entry in wanted:
        by_hub.setdefault(entry.hub, set()).add(entry.path)
        group_of.setdefault(entry.path, len(group_of))
    for paths in by_hub.values():
        lowest = min(group_of[path] for path in paths)
        merged = {group_of[path] for path in paths}
        if len(merged) > 1:
            group_of = {p: lowest if g in merged else g for p, g in group_of.items()}
    groups: dict[int, list[Entry]] = {}
    for entry in wanted:
        groups.setdefault(group_of[entry.path], []).append(entry)
    yield from groups.values()


def _write_group(group: list[Entry], read: ReadLeaf, writer: ArrayWriter, plan: Outgoing) -> None:
    """Write all published arrays that a group of our arrays fills."""
    leaves = {path: read(path) for path in dict.fromkeys(e.path for e in group)}
    by_hub: dict[str, list[Entry]] = {}
    for entry in group:
        by_hub.setdefault(entry.hub, []).append(entry)
    for name, parts in by_hub.items():
        if plan.formats[name] in FP8:
            # Its blocks may be cut anywhere by ours: a matrix at a time.
            tensor = np.empty(parts[0].shape, np.float32)
            for part in parts:
                part.view(tensor)[...] = leaves[part.path][part.at]
            _write_fp8(name, tensor, writer, plan)
        elif parts[0].has_whole_rows:
            for part in parts:
                _write_rows([part], leaves, writer, plan)
        else:
            _write_rows(parts, leaves, writer, plan)


def _write_rows(
    parts: list[Entry], leaves: dict[str, Leaf], writer: ArrayWriter, plan: Outgoing
) -> None:
    """Write the published rows that `parts` fill together, a stretch at a time."""
    name = parts[0].hub
    dtype = plan.formats[name]
    stretches = (part.stretches(STRETCH) for part in parts)
    for wanted in zip(*stretches, strict=True):
        cut = [part.rows(index) for part, index in zip(parts, wanted, strict=True)]
        _, start, stop, _ = cut[0]
        rows = np.empty((stop - start, *parts[0].shape[1:]), np.float32)
        for part, (of, *_), index in zip(parts, cut, wanted, strict=True):
            of.view(rows)[...] = leaves[part.path][(*part.at, *index)]
        found = rounded(rows, dtype, name=name)
        for one in (name, *plan.copies.get(name, ())):
            writer.write(one, found, start=start)


def _write_fp8(name: str, tensor: np.ndarray, writer: ArrayWriter, plan: Outgoing) -> None:
    """Write one published matrix in fp8 with its scales."""
    scale = plan.origin.scales.get(name + SCALE)
    earlier = None if scale is None else scale.read().astype(np.float32)
    found = quantize(tensor, block=plan.block, earlier=earlier)
    writer.write(name, found.values)
    writer.write(name + SCALE, found.scale)


def _reader(arrays: Arrays) -> ReadLeaf:
    """Return what reads one of the arrays into host memory."""
    merged = {**arrays.params, **arrays.buffers}

    def read(path: str) -> np.ndarray:
        array = merged[path]
        if not array.is_fully_addressable:
            raise WeightsError(
                f"{path} has shards on devices of other processes: export from a checkpoint, in "
                "one process"
            )
        return whole(array)

    return read


def whole(array: jax.Array) -> np.ndarray:
    """Return an array of this process's devices in host memory; JAX itself would keep the copy."""
    if len(array.sharding.device_set) == 1:
        return np.asarray(array)
    out = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = np.asarray(shard.data)
    return out


def _refuse_lost(paths: list[str], read: ReadLeaf) -> None:
    """Refuse numbers that the published class has no place for."""
    lost = [path for path in paths if np.any(read(path)[()])]
    if lost:
        raise WeightsError(
            f"{listed(lost)} is not zero, and a router with softmax scores has no such array"
        )
