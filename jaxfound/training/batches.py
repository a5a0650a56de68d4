"""Batches from the host to where the mesh wants them."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxfound.data.batch import Batch


def local_rows(sharding: NamedSharding, batch_size: int, *, seq_len: int) -> slice:
    """Return the rows of the global batch that this process's devices hold.

    Raises:
        ValueError: if they are not one run of neighbouring rows; the mesh then has its batch axes
            in an order that no process can load for.
    """
    places = sharding.addressable_devices_indices_map((batch_size, seq_len)).values()
    spans = {(p[0].start or 0, batch_size if p[0].stop is None else p[0].stop) for p in places if p}
    rows = sorted({row for begin, end in spans for row in range(begin, end)})
    if rows != list(range(rows[0], rows[-1] + 1)):
        raise ValueError(
            f"this process holds rows {rows} of the batch, which are not neighbours: give the "
            "mesh its devices in process order"
        )
    return slice(rows[0], rows[-1] + 1)


def to_devices(batch: Batch, sharding: NamedSharding, *, batch_size: int) -> Batch:
    """Return the batch as device arrays [batch_size T], from this process's rows of it."""

    def put(rows: np.ndarray) -> jax.Array:
        whole = (batch_size, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, whole)

    return Batch(*(put(field) for field in batch))
