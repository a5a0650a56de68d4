"""One or two number formats of a run's weights on the same text.

Both models read a batch in one program. Their logits meet a chunk of tokens at a time, and a few
numbers a token come back to the host. The same text, weights and device give the same result.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxfound.config.layer_formats import check_precision
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.data.text_rows import TextRows, edges_of, read_texts, rows_of
from jaxfound.data.tokenizer import check_vocabulary, load_tokenizer
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.layers.embedding import logits_of
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.axes import BATCH_AXES
from jaxfound.parallelism.context import context_degree, in_order
from jaxfound.parallelism.legal import resolve_degrees
from jaxfound.parallelism.mesh import jit_on_mesh
from jaxfound.parallelism.stream import from_stream
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.topology import Device
from jaxfound.training.batches import arranged_for_context, local_rows, to_devices
from jaxfound.training.gap import Comparison, Moves, PerToken, Tally, summary
from jaxfound.training.step import batch_sharding

type Judge = Callable[[tuple[Arrays, ...], Batch], PerToken]


def compare(
    cfg: RunConfig,
    there: RunDirectory,
    *,
    precision: PrecisionConfig,
    versus: PrecisionConfig | None = None,
    step: int | None = None,
    min_tokens: int | None = None,
    devices: Sequence[Device] | None = None,
) -> Comparison:
    """Return the loss of a run's weights on `cfg.data.source`, and what another precision changes.

    Args:
        cfg: the run's config; data, train.seq_len and layout need not be what it trained with.
        there: the run's folder.
        precision: a.
        versus: b; None measures a alone.
        step: which checkpoint; the newest intact one by default.
        min_tokens: whole documents are read, from the first on, until they hold this many; None
            reads all.
        devices: every device of the job by default.

    Raises:
        ConfigError, PlanError, DataError: what cannot be done, before any weight is read.
        CheckpointError: if there are no weights, they are damaged, or of another model.
    """
    formats = (precision,) if versus is None else (precision, versus)
    devices = jax.devices() if devices is None else devices
    table = describe(cfg.model)
    for each in formats:
        check_precision(each, table)
    cfg = without_stages(cfg)
    size = num_rows(cfg, len(devices))
    plan = make_plan(with_rows(cfg, size), len(devices), params=table)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    check_vocabulary(tokenizer, vocab_size=cfg.model.vocab_size)
    texts = read_texts(cfg.data, tokenizer, min_tokens=min_tokens)
    mesh = build_mesh(plan, devices=devices)
    frames = tuple(Frame(cfg.model, execution=execution_of(plan, each)) for each in formats)
    arrays, found = load_arrays(there, frames[0], mesh=mesh, step=step)
    edges = edges_of(tokenizer, step=found)
    rows = rows_of(texts, tokenizer, edges=edges, seq_len=cfg.train.seq_len)
    judge = make_judge(frames, chunk=cfg.train.loss_chunk, mesh=mesh)
    sharding = batch_sharding(frames[0], mesh)
    tally = measure(judge, (arrays,) * len(frames), rows, size=size, sharding=sharding)
    return summary(tally, rows, formats, step=found, device=devices[0].device_kind)


def without_stages(cfg: RunConfig) -> RunConfig:
    """Return the config with the ranks of its pipeline as further devices along fsdp.

    Nothing is trained, so that weights can be cut over them and each sees rows of its own.
    """
    ranks, parallel = cfg.parallel.pipeline, cfg.parallel
    if ranks == 1:
        return cfg
    changes = {"pipeline": 1, "fsdp": parallel.fsdp * ranks, "zero_stage": 3}
    return cfg.model_copy(update={"parallel": parallel.model_copy(update=changes)})


def num_rows(cfg: RunConfig, num_devices: int) -> int:
    """Return the rows of a batch: those of a micro-batch, rounded up to what the mesh splits."""
    degrees = resolve_degrees(cfg, num_devices)
    split = math.prod(degrees[axis] for axis in BATCH_AXES)
    return -(-cfg.train.batch_size // (cfg.parallel.num_microbatches * split)) * split


def with_rows(cfg: RunConfig, num: int) -> RunConfig:
    """Return the config with batches of `num` rows, in one piece."""
    train = cfg.train.model_copy(update={"batch_size": num})
    parallel = cfg.parallel.model_copy(update={"num_microbatches": 1})
    return cfg.model_copy(update={"train": train, "parallel": parallel})


def load_arrays(
    there: RunDirectory, frame: Frame, *, mesh: Mesh, step: int | None
) -> tuple[Arrays, int]:
    """Return parameters and buffers of a checkpoint where the mesh keeps them, and its step.

    Raises:
        CheckpointError: if there is none, it is damaged, or it is of another model.
    """
    like = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        frame.shapes()._asdict(),
        frame.shardings(mesh)._asdict(),
    )
    with CheckpointManager(there.checkpoints, keep=0) as checkpoints:
        found = checkpoints.restore_weights(step, like=like)
    return Arrays(**cast(dict, found.state)), found.step


def make_judge(frames: tuple[Frame, ...], *, chunk: int, mesh: Mesh) -> Judge:
    """Return the program that reads a batch with one model or with two.

    Args:
        frames: the models, each with its execution.
        chunk: tokens of a row whose logits exist at one time, of all models; 0 = whole rows.
        mesh: where batch and weights lie.
    """

    def judge(weights: tuple[Arrays, ...], batch: Batch) -> PerToken:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            models = [frame.bind(*own) for frame, own in zip(frames, weights, strict=True)]
            matrices = [model.head.matrix(model.embedding) for model in models]
            cut, places = arranged_for_context(batch)
            row = models[0].row(cut.tokens, cut.positions, cut.segment_ids, places=places)
            finals = [model.hidden(cut.tokens, row).final for model in models]
            whole = [
                from_stream(x, frame.execution.rules)
                for x, frame in zip(finals, frames, strict=True)
            ]
            states = [in_order(x, context_degree()) for x in whole]

            def read(targets: jax.Array, *states: jax.Array) -> PerToken:
                log_p = [
                    jax.nn.log_softmax(logits_of(x, matrix, head=model.head))
                    for x, matrix, model in zip(states, matrices, models, strict=True)
                ]
                nats = tuple(-at(each, targets) for each in log_p)
                return PerToken(nats, moves_of(*log_p) if len(log_p) == 2 else None)

            return in_chunks(read, batch.targets, *states, size=chunk)

    # Whole on every process, as only a few numbers a token are.
    return jit_on_mesh(judge, mesh, out_shardings=NamedSharding(mesh, PartitionSpec()))


def at(values: Float[Array, "B T V"], ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the value at each id: a sum and not a gather, since devices may split V."""
    hot_BTV = jnp.arange(values.shape[-1])[None, None, :] == ids[..., None]
    return jnp.where(hot_BTV, values, 0.0).sum(axis=-1)


def moves_of(a: Float[Array, "B T V"], b: Float[Array, "B T V"]) -> Moves:
    """Return what separates the log-probabilities b from a."""
    first_a, first_b = jnp.argmax(a, axis=-1), jnp.argmax(b, axis=-1)
    is_first = jnp.arange(a.shape[-1])[None, None, :] == first_a[..., None]
    second_BT = jnp.where(is_first, -jnp.inf, a).max(axis=-1)
    # p_a - p_b sums to 0, and with it no term is negative: a small KL is then not what is left
    # of large sums.
    p_a, p_b = jnp.exp(a), jnp.exp(b)
    kl_BT = (p_b * (b - a) + (p_a - p_b)).sum(axis=-1)
    return Moves(first_a == first_b, jnp.maximum(kl_BT, 0.0), a.max(axis=-1) - second_BT)


def in_chunks(read: Callable[..., PerToken], *arrays: jax.Array, size: int) -> PerToken:
    """Return `read` of arrays [B T …], `size` tokens of each row at a time; 0 = whole rows."""
    rows, length = arrays[0].shape[:2]
    if size == 0 or size >= length:
        return read(*arrays)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -length % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, -1, size, *x.shape[2:]), 1, 0)

    def join(pieces: jax.Array) -> jax.Array:
        return jnp.moveaxis(pieces, 0, 1).reshape(rows, -1)[:, :length]

    found = jax.lax.map(lambda chunk: read(*chunk), tuple(cut(x) for x in arrays))
    return jax.tree.map(join, found)


def measure(
    judge: Judge, weights: tuple[Arrays, ...], rows: TextRows, *, size: int, sharding: NamedSharding
) -> Tally:
    """Return the sums over every row, `size` of them at a time, with these weights."""
    tally = Tally(np.zeros((len(weights), len(rows.lengths))))
    own = local_rows(sharding, size, seq_len=rows.seq_len)
    for batch, piece in rows.batches(size):
        mine = Batch(*(values[own] for values in batch))
        tally.add(judge(weights, to_devices(mine, sharding, batch_size=size)), piece)
    return tally
