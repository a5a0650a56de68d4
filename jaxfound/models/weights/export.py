"""A model's arrays as published weights: the same names, formats and numbers that came in."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxfound.config.model import ModelConfig
from jaxfound.models.build import Arrays, describe
from jaxfound.models.weights.config_in import FORMATS
from jaxfound.models.weights.config_out import write_config
from jaxfound.models.weights.errors import WeightsError, listed
from jaxfound.models.weights.folder import CONFIG
from jaxfound.models.weights.fp8 import SCALE, quantize, scale_shape
from jaxfound.models.weights.layout import DTYPES, FP8
from jaxfound.models.weights.origin import Origin
from jaxfound.models.weights.rows import Entry, copies, entries, has_no_row
from jaxfound.models.weights.writer import ArrayWriter, NewFolder, Planned, write_json

log = logging.getLogger(__name__)

GB = 1_000_000_000
BLOCK = (128, 128)
# Small enough to matter nothing, and rounding it moves tokens to other experts.
ROUTER_BIAS = "e_score_correction_bias"
ExportFormat = Literal["stored", "float32", "bfloat16", "float16", "fp8"]
# Returns one array of ours by path, whole and in host memory.
ReadLeaf = Callable[[str], np.ndarray]


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
        source: the arrays, or what reads one by path, called once for each: then no more than one
            of them, and those that share published arrays with it, is in memory.
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
    plan = _Plan(wanted, copies(model), dtype=dtype, origin=origin)
    config = write_config(
        model,
        dtype=plan.torch_dtype,
        fp8_block=plan.block if plan.has_fp8 else None,
        kept=origin.config,
    )
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


class _Plan:
    """Which arrays are written, in which format."""

    def __init__(
        self,
        wanted: list[Entry],
        repeated: dict[str, str],
        *,
        dtype: ExportFormat,
        origin: Origin,
    ) -> None:
        self.origin = origin
        self.copies: dict[str, list[str]] = {}
        for name, of in repeated.items():
            self.copies.setdefault(of, []).append(name)
        config = origin.config.get("quantization_config")
        block = config.get("weight_block_size") if isinstance(config, dict) else None
        self.block: tuple[int, int] = tuple(block) if isinstance(block, list) else BLOCK
        self._dtype = dtype
        self.arrays: list[Planned] = []
        for entry in {e.hub: e for e in wanted}.values():
            self._add(entry)
        self.formats = {p.name: p.dtype for p in self.arrays}
        self.has_fp8 = any(p.dtype in FP8 for p in self.arrays)

    @property
    def torch_dtype(self) -> str:
        """The format that config.json names: that of most elements, bfloat16 beside fp8."""
        if self.has_fp8:
            return "bfloat16"
        sizes: dict[str, int] = {}
        for planned in self.arrays:
            sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.num_bytes
        most = max(sizes, key=lambda name: sizes[name])
        return next((torch for torch, name in FORMATS.items() if name == most), "float32")

    def _add(self, entry: Entry) -> None:
        dtype = self._format(entry)
        self.arrays.append(Planned(entry.hub, dtype, entry.shape))
        if dtype in FP8:
            shape = scale_shape(entry.shape, self.block)
            self.arrays.append(Planned(entry.hub + SCALE, "F32", shape))
        # Beside the array that they repeat: in its format, and only where the model has them.
        self.arrays += [Planned(n, dtype, entry.shape) for n in self.copies.get(entry.hub, ())]

    def _format(self, entry: Entry) -> str:
        if self._dtype == "stored":
            return self.origin.formats.get(entry.hub, "F32")
        if entry.hub.endswith(ROUTER_BIAS):
            return "F32"
        if self._dtype == "fp8":
            return "F8_E4M3" if entry.row.is_quantized else "BF16"
        return FORMATS[self._dtype]


def _write_group(group: list[Entry], read: ReadLeaf, writer: ArrayWriter, plan: _Plan) -> None:
    """Write all published arrays that a group of our arrays fills."""
    leaves = {path: read(path) for path in dict.fromkeys(e.path for e in group)}
    by_hub: dict[str, list[Entry]] = {}
    for entry in group:
        by_hub.setdefault(entry.hub, []).append(entry)
    for name, parts in by_hub.items():
        tensor = np.empty(parts[0].shape, leaves[parts[0].path].dtype)
        for part in parts:
            view = part.view(tensor)
            leaf = leaves[part.path][part.at]
            view[...] = leaf[tuple(slice(0, n) for n in view.shape)]
        _write(name, tensor, writer, plan)


def _write(name: str, tensor: np.ndarray, writer: ArrayWriter, plan: _Plan) -> None:
    """Write one published array in its format, with its scale and its copies."""
    dtype = plan.formats[name]
    if dtype in FP8:
        scale = plan.origin.scales.get(name + SCALE)
        earlier = None if scale is None else scale.read().astype(np.float32)
        found = quantize(tensor.astype(np.float32), block=plan.block, earlier=earlier)
        writer.write(name, found.values)
        writer.write(name + SCALE, found.scale)
        return
    cast = tensor.astype(DTYPES[dtype])
    for one in (name, *plan.copies.get(name, ())):
        writer.write(one, cast)


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
        return np.asarray(array)

    return read


def _refuse_lost(paths: list[str], read: ReadLeaf) -> None:
    """Refuse numbers that the published class has no place for."""
    lost = [path for path in paths if np.any(read(path))]
    if lost:
        raise WeightsError(
            f"{listed(lost)} is not zero, and a router with softmax scores has no such array"
        )
