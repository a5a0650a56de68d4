"""A published folder in another number format, some rows at a time: no model is in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxfound.models.weights.export import GB, STRETCH
from jaxfound.models.weights.folder import CONFIG
from jaxfound.models.weights.fp8 import SCALE, quantize
from jaxfound.models.weights.layout import FP8, Stored
from jaxfound.models.weights.load import Hub, Reader
from jaxfound.models.weights.origin import origin_of
from jaxfound.models.weights.outgoing import ExportFormat, Outgoing, rounded
from jaxfound.models.weights.writer import ArrayWriter, NewFolder, write_json


def reformat_hub(
    hub: Hub,
    out: Path | str,
    *,
    dtype: ExportFormat = "stored",
    max_shard_bytes: int = 5 * GB,
    allow_nan: bool = False,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the arrays of a checkpoint that its model has as a new published folder.

    Args:
        hub: from `open_hub`.
        out: a folder that does not exist yet; it appears when it is complete.
        dtype: as in `export_hub`; an array whose format stays is copied byte by byte.
        max_shard_bytes: bytes of arrays in one file.
        allow_nan: take arrays with NaN or infinity, logged by name, instead of refusing them.
        beside: writes more files into the folder before it appears.
    Raises:
        WeightsError: as `load_weights`; or `out` is there already. Nothing is left behind.
    """
    plan = Outgoing(hub.model, hub.entries, dtype=dtype, origin=origin_of(hub.folder))
    config = plan.config()
    reader = Reader(hub)
    reader.check_copies()
    with NewFolder(Path(out)) as folder:
        with ArrayWriter(folder, plan.arrays, max_shard_bytes=max_shard_bytes) as writer:
            for name in dict.fromkeys(entry.hub for entry in hub.entries):
                _copy(name, reader, writer, plan)
        reader.check_finite(allow_nan=allow_nan)
        write_json(folder / CONFIG, config)
        if beside is not None:
            beside(folder)


def _copy(name: str, reader: Reader, writer: ArrayWriter, plan: Outgoing) -> None:
    """Write one array, and those that repeat it, in its new format."""
    stored, dtype = reader.stored(name), plan.formats[name]
    repeated = (name, *plan.copies.get(name, ()))
    if stored.dtype == dtype:
        for start, rows in _stretches(stored, 1, reader.raw_rows, name):
            for one in repeated:
                writer.write(one, rows, start=start)
        if dtype in FP8:
            scale = reader.stored(name + SCALE)
            writer.write(
                name + SCALE, reader.raw_rows(name + SCALE, 0, scale.shape[0]).astype(np.float32)
            )
        return
    if dtype not in FP8:
        for start, rows in _stretches(stored, 1, reader.rows, name):
            found = rounded(rows, dtype, name=name)
            for one in repeated:
                writer.write(one, found, start=start)
        return
    height = plan.block[0]
    for start, rows in _stretches(stored, height, reader.rows, name):
        found = quantize(rows.astype(np.float32), block=plan.block)
        writer.write(name, found.values, start=start)
        writer.write(name + SCALE, found.scale, start=start // height)


def _stretches(
    stored: Stored, multiple: int, read: Callable[[str, int, int], np.ndarray], name: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield stretches of rows and their first row, a multiple of `multiple`."""
    num_rows = stored.shape[0]
    one = stored.num_elements // max(num_rows, 1)
    step = max(STRETCH // max(one, 1) // multiple, 1) * multiple
    for start in range(0, num_rows, step):
        yield start, read(name, start, min(start + step, num_rows))
