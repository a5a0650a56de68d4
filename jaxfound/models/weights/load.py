"""Published weights into a model's arrays, each born where the mesh keeps it.

One published array is in memory at a time, beside what the model itself needs: an array of ours is
assembled shard by shard, and of each published array only the rows of that shard are read.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamTable
from jaxfound.models.build import Arrays, Frame, describe
from jaxfound.models.execution import Execution
from jaxfound.models.weights.audit import Audit, check_tensors
from jaxfound.models.weights.config_in import HubConfig, read_config
from jaxfound.models.weights.errors import WeightsError, listed
from jaxfound.models.weights.folder import HubFolder, open_folder
from jaxfound.models.weights.fp8 import SCALE, read_dequantized
from jaxfound.models.weights.gguf import SUFFIX, gguf_folder, read_gguf
from jaxfound.models.weights.layout import FP8, Stored
from jaxfound.models.weights.rows import Entry, by_path, entries
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules

log = logging.getLogger(__name__)

# Where an address is a multiple of this, a CPU device takes the host's buffer as it is.
ALIGNMENT = 64
# Elements that are looked at together for NaN and infinity.
CHUNK = 1 << 20
Formats = Literal["float32", "bfloat16"]


class Hub(NamedTuple):
    """A published checkpoint that fits its model; no array was read yet.

    Attributes:
        folder: the files.
        config: what config.json says.
        model: the model that is loaded; `config.model`, with the caller's changes.
        table: its arrays.
        entries: its published arrays.
        audit: what becomes of the others.
    """

    folder: HubFolder
    config: HubConfig
    model: ModelConfig
    table: ParamTable
    entries: list[Entry]
    audit: Audit

    def report(self) -> list[str]:
        """Return what a reader should know, a sentence each."""
        told = [f"{name} repeats {of}: shared here" for name, of in self.audit.copies.items()]
        told += [f"{one.name} is not used: {one.why}" for one in self.audit.unused]
        return [*self.config.notes, *told]


def open_hub(
    path: Path | str,
    model: ModelConfig | None = None,
    *,
    mtp: Literal["use", "drop"] = "use",
    allow_unused: bool = False,
) -> Hub:
    """Return a published checkpoint after checking its config and every header.

    Args:
        path: folder with config.json and model.safetensors, or shards and their index; or a
            .gguf file.
        model: what to load it as, e.g. `open_hub(path).model` with another vocab_multiple; what
            config.json describes by default.
        mtp: `drop` leaves multi-token-prediction layers where they are.
        allow_unused: leave arrays that are not known here, instead of refusing them.
    Raises:
        WeightsError: names the key or the arrays that are wrong.
    """
    file = Path(path)
    folder = gguf_folder(read_gguf(file)) if file.suffix == SUFFIX else open_folder(file)
    config = read_config(folder)
    model = model or config.model
    if mtp == "drop":
        model = model.model_copy(update={"mtp_depth": 0})
    table = describe(model)
    wanted = entries(model, table)
    audit = check_tensors(
        folder, model, wanted, fp8_block=config.fp8_block, allow_unused=allow_unused
    )
    return Hub(folder, config, model, table, wanted, audit)


def load_weights(
    source: Hub | Path | str,
    model: ModelConfig | None = None,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = TABLE_RULES,
    dtype: Formats = "float32",
    allow_nan: bool = False,
) -> Arrays:
    """Return the arrays of a published checkpoint, ready for `Frame(model).bind(*arrays)`.

    Args:
        source: from `open_hub`, or its folder.
        model: as in `open_hub`.
        mesh: from `build_mesh`; None loads onto this host's first device.
        rules: the plan's.
        dtype: format of the parameters; buffers (the router's bias) are always float32.
        allow_nan: take arrays with NaN or infinity, logged by name, instead of refusing them.
    Raises:
        WeightsError: as `open_hub`; or arrays hold NaN or infinity, or repeat another one with
            other numbers.
    """
    hub = source if isinstance(source, Hub) else open_hub(source, model)
    frame = Frame(hub.model, execution=Execution(rules=rules))
    places = _everywhere(frame) if mesh is None else frame.shardings(mesh)
    shapes = frame.shapes()
    reader = Reader(hub)
    reader.check_copies()
    params = {
        path: reader.leaf(path, shape.shape, jnp.dtype(dtype), places.params[path])
        for path, shape in shapes.params.items()
    }
    buffers = {
        path: reader.leaf(path, shape.shape, shape.dtype, places.buffers[path])
        for path, shape in shapes.buffers.items()
    }
    reader.check_finite(allow_nan=allow_nan)
    return Arrays(params, buffers)


def _everywhere(frame: Frame) -> Arrays:
    """Return one place for all arrays: this host's first device."""
    first = SingleDeviceSharding(jax.local_devices()[0])
    return Arrays(*(dict.fromkeys(group, first) for group in frame.shapes()))


class Reader:
    """Reads published arrays as ours, and counts what is not a number.

    Args:
        hub: a checkpoint that fits its model.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._entries = by_path(hub.entries)
        self._bad: dict[str, int] = {}

    def leaf(self, path: str, shape: Sequence[int], dtype: np.dtype, place: Sharding) -> jax.Array:
        """Return one array of ours on its devices; pieces that several hold are read once."""
        shape = tuple(shape)
        devices = place.addressable_devices_indices_map(shape)
        keys = {
            device: tuple(s.indices(n) for s, n in zip(index or (), shape, strict=True))
            for device, index in devices.items()
        }
        pieces: list[jax.Array] = []
        for key in dict.fromkeys(keys.values()):
            piece = self.piece(path, tuple(slice(*k) for k in key), dtype)
            pieces += [jax.device_put(piece, device) for device in devices if keys[device] == key]
        return jax.make_array_from_single_device_arrays(shape, place, pieces)

    def stored(self, name: str) -> Stored:
        """Return where a published array is."""
        return self._hub.folder.tensors[name]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a published array, dequantised when it is in fp8."""
        found = self._read(name, start, stop)
        self._count_bad(name, found)
        return found

    def raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a published array as they are stored."""
        found = self.stored(name).read(start, stop)
        self._count_bad(name, found)
        return found

    def piece(self, path: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Return the part of one array of ours that `index` cuts out, in host memory."""
        out = _aligned([s.stop - s.start for s in index], dtype)
        if self._hub.model.padded_vocab_size != self._hub.model.vocab_size or not self._has(path):
            # Rows that pad the vocabulary, and a bias that the architecture has not.
            out[...] = 0
        for entry in self._entries.get(path, ()):
            stacks = len(entry.at)
            where = tuple(i - s.start for i, s in zip(entry.at, index[:stacks], strict=True))
            if all(s.start <= i < s.stop for i, s in zip(entry.at, index[:stacks], strict=True)):
                self._fill(out[where], entry, index[stacks:])
        return out

    def check_finite(self, *, allow_nan: bool) -> None:
        """Refuse, or log, the arrays in which NaN or infinity was read."""
        if not self._bad:
            return
        told = [f"{name}: {count} of its elements" for name, count in self._bad.items()]
        if allow_nan:
            log.warning("weights.not_finite", extra={"arrays": told})
            return
        raise WeightsError(
            f"{self._hub.folder.path}: NaN or infinity in {len(told)} arrays: {listed(told)}. The "
            "checkpoint is damaged, or its training diverged; take it as it is with allow_nan"
        )

    def check_copies(self) -> None:
        """Refuse arrays that must repeat another one and do not."""
        tensors = self._hub.folder.tensors
        for name, of in self._hub.audit.copies.items():
            if not _equal(tensors[name], tensors[of]):
                way_out = (
                    "leave multi-token prediction out with mtp=drop"
                    if name.startswith("model.layers.")
                    else "set tie_word_embeddings to false in config.json if the head is its own"
                )
                raise WeightsError(
                    f"{self._hub.folder.path}: {name} is not equal to {of}, which this model uses "
                    f"in its place: {way_out}"
                )

    def _has(self, path: str) -> bool:
        return path in self._entries

    def _fill(self, out: np.ndarray, entry: Entry, wanted: tuple[slice, ...]) -> None:
        """Write what `wanted` cuts out of one published array into `out`."""
        part, start, stop, inside = entry.rows(wanted)
        view = part.view(self._read(entry.hub, start, stop))[inside]
        target = out[tuple(slice(0, n) for n in view.shape)]
        target[...] = view
        self._count_bad(entry.hub, target)

    def _count_bad(self, name: str, x: np.ndarray) -> None:
        bad = _count_not_finite(x)
        if bad:
            self._bad[name] = self._bad.get(name, 0) + bad

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a published array, dequantised when it is in fp8."""
        stored = self._hub.folder.tensors[name]
        if stored.dtype not in FP8:
            return stored.read(start, stop)
        block = self._hub.config.fp8_block
        assert block is not None, "the audit refuses fp8 without a block"
        scale = self._hub.folder.tensors[name + SCALE].read().astype(np.float32)
        return read_dequantized(stored, scale, block=block, start=start, stop=stop)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an array that a CPU device can take without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    skipped = -raw.ctypes.data % ALIGNMENT
    return raw[skipped : skipped + num_bytes].view(dtype).reshape(shape)


def _count_not_finite(x: np.ndarray) -> int:
    """Return how many elements are NaN or infinite, a few at a time: masks cost memory too."""
    if x.ndim == 0 or x.size <= CHUNK:
        return x.size - int(np.count_nonzero(np.isfinite(x)))
    return sum(_count_not_finite(row) for row in x)


def _equal(a: Stored, b: Stored) -> bool:
    """True when two arrays are the same bytes, compared in pieces."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = max(CHUNK // max(math.prod(a.shape[1:]), 1), 1)
    return all(
        np.array_equal(
            a.read(i, min(i + step, a.shape[0])).view(np.uint8),
            b.read(i, min(i + step, a.shape[0])).view(np.uint8),
        )
        for i in range(0, a.shape[0], step)
    )
