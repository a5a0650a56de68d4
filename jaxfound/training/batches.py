"""Batches from the host to where the mesh wants them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models.execution import Documents, Execution, execution_of
from jaxfound.parallelism.context import arranged, context_degree, places_of
from jaxfound.parallelism.layout import PackedRows
from jaxfound.parallelism.plan import ParallelPlan
from pallas_kernels.flash_attention.op import MAX_SEGMENTS, default_max_segments

log = logging.getLogger(__name__)

# Fewer are not measured to be faster.
LEAST_PLACES = 2


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


def batch_like(cfg: RunConfig, sharding: NamedSharding) -> Batch:
    """Return a run's batch as shapes [batch_size T] with their sharding."""
    rows = (cfg.train.batch_size, cfg.train.seq_len)
    numbers = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=sharding)
    mask = jax.ShapeDtypeStruct(rows, jnp.bool_, sharding=sharding)
    return Batch(numbers, numbers, numbers, numbers, loss_mask=mask)


def documents_of(cfg: RunConfig, *, most_pieces: int) -> Documents:
    """Return how attention keeps the documents of a run's rows apart.

    The data room leaves them as runs with padding last, so it vouches for rows that have a place
    for each; where one has more, every call looks. There may be more places than the kernel's
    default: a run's plan counts them.

    Args:
        most_pieces: documents, or pieces of them, in the fullest row.
    """
    if cfg.train.documents == "joined":
        return "joined"
    return "checked" if most_pieces <= MAX_SEGMENTS else "runs"


def most_documents(cfg: RunConfig, *, most_pieces: int) -> int | None:
    """Return for how many documents of a row attention has places, where that is checked.

    It is a power of two, so that other texts share compiled programs; None for the kernel's number.
    """
    if documents_of(cfg, most_pieces=most_pieces) != "checked":
        return None
    return max(LEAST_PLACES, 1 << (most_pieces - 1).bit_length())


def packed_rows(cfg: RunConfig, *, most_pieces: int) -> PackedRows | None:
    """Return what a run's rows ask of attention, for its plan; None where they are one document."""
    documents = documents_of(cfg, most_pieces=most_pieces)
    if documents == "joined":
        return None
    places = most_documents(cfg, most_pieces=most_pieces)
    return PackedRows(places or default_max_segments(cfg.train.seq_len), fit=documents == "checked")


def execution_for(plan: ParallelPlan, cfg: RunConfig, *, most_pieces: int) -> Execution:
    """Return the execution of a run whose fullest row has `most_pieces` documents.

    Rows of more than attention has places for are said once: their steps take a slow path.
    """
    documents = documents_of(cfg, most_pieces=most_pieces)
    if documents == "runs":
        log.warning(
            "attention.too_many_documents",
            extra={
                "in_a_row": most_pieces,
                "places": MAX_SEGMENTS,
                "then": "a GPU computes batches with such rows by XLA, many times slower",
                "instead": "a shorter train.seq_len, longer documents, or train.documents=joined",
            },
        )
    return execution_of(
        plan,
        cfg.precision,
        documents=documents,
        most_documents=most_documents(cfg, most_pieces=most_pieces),
    )


def arranged_for_context(batch: Batch) -> tuple[Batch, Int[Array, " T"] | None]:
    """Return the batch as the context axis wants its rows, and the place of each token in its row.

    Whatever compares a token with its neighbours in the row comes before: targets are made by the
    data room, those of multi-token prediction by `objective.ahead_of`. Without that axis the batch
    stays as it is, and places are None.
    """
    degree = context_degree()
    if degree == 1:
        return batch, None
    places = jnp.asarray(places_of(batch.tokens.shape[1], degree), jnp.int32)
    return Batch(*(arranged(field, degree) for field in batch)), places
