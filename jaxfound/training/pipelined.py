"""Gradients of a step whose layers are cut into pipeline stages.

One shard_map is manual over every axis but `tensor`. Each device runs its rank's part of the
schedule on its own rows and sums its own gradients; afterwards they are summed once over the axes
that see other tokens, and over `pipeline` for what all ranks share. The objective is the sum of
what the devices lose: every loss is divided by counts of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models.build import Frame, in_main_stack
from jaxfound.models.decoder import Decoder
from jaxfound.models.layers.dropout import Noise
from jaxfound.parallelism.axes import only
from jaxfound.parallelism.pipeline.chunk import Layers
from jaxfound.parallelism.pipeline.forward import run_forward
from jaxfound.parallelism.pipeline.pipelining import (
    Pipelining,
    forward_table_of,
    schedule_of,
    table_of,
)
from jaxfound.parallelism.pipeline.runtime import (
    AXIS,
    Inputs,
    Stages,
    Sums,
    rank_rows,
    run_schedule,
)
from jaxfound.parallelism.pipeline.stages import NO_LAYER
from jaxfound.parallelism.stream import in_stream
from jaxfound.training.loss import cross_entropy
from jaxfound.training.objective import (
    MAIN_ROUTERS,
    Piece,
    Terms,
    TokenCounts,
    end_terms,
    objective_of,
    piece_of,
    row_of,
    token_counts,
)
from jaxfound.training.state import TrainState

type Arrays = Mapping[str, jax.Array]
# The axes along which devices see other tokens.
TOKEN_AXES: tuple[AxisName, ...] = ("data", "fsdp", "expert", "context")


class Parts(NamedTuple):
    """Arrays by path, what a pipeline cuts apart from what its ranks share."""

    chunks: dict[str, Any]
    shared: dict[str, Any]


def parts_of(arrays: Mapping[str, Any]) -> Parts:
    """Return arrays, or what stands for them, as those of the main stack and the others."""
    return Parts(
        {path: a for path, a in arrays.items() if in_main_stack(path)},
        {path: a for path, a in arrays.items() if not in_main_stack(path)},
    )


def pipelined_gradients(
    state: TrainState,
    batch: Batch,
    noise: Noise | None,
    *,
    frame: Frame,
    cfg: RunConfig,
    counts: TokenCounts,
    pipelining: Pipelining,
) -> tuple[dict[str, jax.Array], Terms]:
    """Return gradients and sums of the whole batch, summed over the schedule's micro-batches.

    From ZeRO stage 1 on the gradients are reduced and scattered to where their moments lie, once.

    Args:
        noise: what dropout draws the masks of the whole batch from; None drops nothing.
    """
    step, table = PipelinedStep(frame, cfg, pipelining), table_of(pipelining)

    def on_device(stages: Stages, inputs: Inputs, rows: Arrays) -> tuple[dict, Terms]:
        sums = run_schedule(table, stages, inputs, rows=rows)
        return step.gradients(sums), step.terms(sums)

    pieces = microbatches(
        batch, pipelining.num_microbatches, num_depths=cfg.model.mtp_depth, noise=noise
    )
    gives = (step.grad_specs(), step.term_specs(pieces))
    run = step.on_devices(on_device, pieces, columns=rank_rows(table), gives=gives)
    return run(state.params, state.buffers, counts)


def pipelined_nats(
    params: Arrays,
    buffers: Arrays,
    batch: Batch,
    *,
    frame: Frame,
    cfg: RunConfig,
    pipelining: Pipelining,
) -> jax.Array:
    """Return the next-token loss of a batch, nats summed over counted targets, forward only."""
    step, table = PipelinedStep(frame, cfg, pipelining), forward_table_of(pipelining)

    def on_device(stages: Stages, inputs: Inputs, rows: Arrays) -> jax.Array:
        return lax.psum(run_forward(table, stages, inputs, rows=rows), step.manual)

    pieces = microbatches(batch, pipelining.num_microbatches, num_depths=0)
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    run = step.on_devices(on_device, pieces, columns=columns, gives=PartitionSpec(), nats_only=True)
    return run(params, buffers, token_counts(batch, num_depths=0))


def microbatches(batch: Batch, count: int, *, num_depths: int, noise: Noise | None = None) -> Piece:
    """Return the micro-batches of a batch, each array [count rows T], places [T].

    Row i goes to micro-batch i % count, so that a device's rows stay on the device. Of `noise` each
    has the key and the numbers of its rows.
    """
    piece = piece_of(batch, num_depths=num_depths)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(-1, count, *a.shape[1:]), 1, 0)

    rows, aheads = jax.tree.map(cut, (piece.batch, piece.aheads))
    if noise is not None:
        noise = Noise(jnp.tile(noise.key[None], (count, 1)), cut(noise.rows))
    return Piece(rows, piece.places, aheads, noise)


class PipelinedStep:
    """How a model is run by stages, and where its arrays lie meanwhile."""

    def __init__(self, frame: Frame, cfg: RunConfig, pipelining: Pipelining) -> None:
        self.frame, self.cfg, self.pipelining = frame, cfg, pipelining
        self.rules = frame.execution.rules
        self.schedule = schedule_of(pipelining)
        self.manual = tuple(a for a in AXES if a != "tensor" and self.rules.degree(a) > 1)
        self.has_experts = cfg.model.ffn == "moe"
        if frame.stages is None:
            raise ValueError(
                "the frame was made for no pipeline; build it from the plan's execution"
            )
        self.stages = frame.stages

    def on_devices(
        self,
        run: Callable[[Stages, Inputs, Arrays], Any],
        pieces: Piece,
        *,
        columns: Arrays,
        gives: Any,
        nats_only: bool = False,
    ) -> Callable[[Arrays, Arrays, TokenCounts], Any]:
        """Return what runs a pipeline on every device: of parameters, buffers and token counts.

        Args:
            run: what a device does, given its stages, its inputs and its rank's columns.
            pieces: the micro-batches.
            columns: a table of ticks, each array [ticks ranks].
            gives: how the results lie.
            nats_only: whether the suffix reports the next-token loss alone.
        """
        ranks, whole = PartitionSpec(None, AXIS), PartitionSpec()
        specs = self.specs(self.rules.param_spec, self.frame.dims())
        takes = (*specs, self.piece_specs(pieces), whole, jax.tree.map(lambda _: ranks, columns))

        def on_device(
            params: Arrays,
            buffers: Arrays,
            pieces: Piece,
            counts: TokenCounts,
            columns: Arrays,
            places: jax.Array,
        ) -> Any:
            held, fixed = parts_of(params), parts_of(buffers)
            inputs = Inputs(
                chunks=self.in_chunks(held.chunks),
                fixed=self.in_chunks({"buffers": fixed.chunks, "places": places}),
                shared=held.shared,
                pieces=(pieces.batch, pieces.aheads, pieces.noise),
            )
            stages = self.model(
                held.shared, held.chunks, fixed, counts, pieces.places, nats_only=nats_only
            )
            return run(stages, inputs, jax.tree.map(lambda column: column[:, 0], columns))

        mapped = jax.shard_map(
            on_device,
            in_specs=(*takes, PartitionSpec(AXIS)),
            out_specs=gives,
            axis_names=set(self.manual),
            check_vma=False,
        )
        places = jnp.asarray(self.stages.places, jnp.int32)
        return lambda params, buffers, counts: mapped(
            params, buffers, pieces, counts, columns, places
        )

    def in_chunks(self, tree: Any) -> Any:
        """Return arrays [places of this rank ...] as [chunks places ...]."""
        num_chunks = self.schedule.num_chunks
        return jax.tree.map(lambda a: a.reshape(num_chunks, -1, *a.shape[1:]), tree)

    def model(
        self,
        shared: Arrays,
        stack: Arrays,
        fixed: Parts,
        counts: TokenCounts,
        places: jax.Array | None,
        *,
        nats_only: bool,
    ) -> Stages:
        """Return the model as prefix, stages and suffix."""
        masked, first = self.stages.num_masked > 0, self.cfg.model.num_leading_layers + 1

        def bind(shared: Arrays, chunk: Arrays, biases: Arrays) -> Decoder:
            return self.frame.bind(shared, chunk, biases, fixed.shared)

        def whole(piece: tuple) -> Piece:
            batch, aheads, noise = piece
            return Piece(batch, places, aheads, noise)

        def prefix(shared: Arrays, piece: tuple) -> jax.Array:
            model, read = bind(shared, stack, fixed.chunks), whole(piece)
            return model.entering(read.batch.tokens, row_of(model, read))

        def layer(params: Arrays, fixed: Any, x: jax.Array, piece: tuple) -> tuple:
            model = bind(shared, params, fixed["buffers"])
            row = row_of(model, whole(piece)).of_layer(first + fixed["places"])
            y, load = model.layers(x, row)
            if masked:
                # A place without a layer: x passes it unchanged and it has no load.
                there = fixed["places"] != NO_LAYER
                kept = lambda a: jnp.where(there, a, jnp.zeros((), a.dtype))
                y, load = jnp.where(there, y, x), jax.tree.map(kept, load)
            loss = jnp.zeros(()) if load is None else load.balance_loss / counts.real
            return y, loss, load

        def suffix(shared: Arrays, y: jax.Array, piece: tuple) -> tuple[jax.Array, Terms]:
            model, read = bind(shared, stack, fixed.chunks), whole(piece)
            terms = end_terms(model, model.final_norm(y), read, loads={}, cfg=self.cfg)
            return objective_of(terms, counts, cfg=self.cfg), terms

        def nats(shared: Arrays, y: jax.Array, piece: tuple) -> tuple[jax.Array, jax.Array]:
            model, batch = bind(shared, stack, fixed.chunks), piece[0]
            found = cross_entropy(
                model.final_norm(y),
                model.head.matrix(model.embedding),
                targets=batch.targets,
                counted=batch.loss_mask,
                head=model.head,
                chunk=self.cfg.train.loss_chunk,
            )
            return found.nats, found.nats

        end, execution = nats if nats_only else suffix, self.frame.execution
        layers = Layers(layer, execution.remat, execution.layers_per_scan_step)
        return Stages(prefix, layers, end, self.pin, self.pin_chunks, self.pin_shared)

    def pin(self, x: jax.Array) -> jax.Array:
        """Keep an activation where the residual stream lies over tensor."""
        return in_stream(x, self.rules)

    def pin_chunks(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Keep arrays [chunks places ...] where their parameters lie over tensor."""
        dims, pin = self.frame.dims().params, self.rules.constrain_used
        return {path: pin(a, None, *dims[path]) for path, a in arrays.items()}

    def pin_shared(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Keep arrays like the shared parameters where those lie over tensor."""
        dims, pin = self.frame.dims().params, self.rules.constrain_used
        return {path: pin(a, *dims[path]) for path, a in arrays.items()}

    def gradients(self, sums: Sums) -> dict[str, jax.Array]:
        """Return this device's shards of the gradients, summed over all devices that have parts.

        Over tensor each device sums its own part: the partitioner would gather the parts first.
        """
        dims, shapes = self.frame.dims().params, self.frame.shapes().params
        grads, lies = {**sums.chunks, **sums.shared}, self.rules.gathered_spec

        def summed(*parts: jax.Array) -> tuple[jax.Array, ...]:
            found = []
            for path, part in zip(grads, parts, strict=True):
                if path in sums.chunks:
                    both = self.with_other_copy(part)
                    part = both.reshape(-1, *both.shape[2:])
                found.append(self.summed(part, dims[path], shapes[path].shape))
            return tuple(found)

        chunked = [(None, *dims[path]) if path in sums.chunks else dims[path] for path in grads]
        run = self.rules.on_each_device(
            summed,
            takes=[lies(d) for d in chunked],
            gives=tuple(lies(dims[path]) for path in grads),
        )
        return dict(zip(grads, run(*grads.values()), strict=True))

    def with_other_copy(self, grad: jax.Array) -> jax.Array:
        """Return gradients [chunks ...] with those of the other copy of each chunk added.

        The copies are mirrored: chunk c of rank r is chunk 1 - c of rank P - 1 - r. Two numbers
        are added, so that both copies get the same bits and stay equal.
        """
        if self.schedule.num_copies == 1:
            return grad
        last = self.schedule.num_ranks - 1
        mirrored = lax.ppermute(grad[::-1], AXIS, [(rank, last - rank) for rank in range(last + 1)])
        return grad + mirrored

    def summed(
        self, grad: jax.Array, dims: Sequence[str | None], shape: Sequence[int]
    ) -> jax.Array:
        """Return a gradient summed over the axes along which devices have parts of it."""
        rules = self.rules
        holds = {axis for axes in rules.used_axes(dims) for axis in axes}
        over = [a for a in self.manual if a not in holds and a in (*TOKEN_AXES, AXIS)]
        dim = rules.fsdp_dim(dims, shape, layers=True) if rules.zero_stage else None
        if dim is not None and "fsdp" in over:
            over.remove("fsdp")
            grad = lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)
        return lax.psum(grad, tuple(over)) if over else grad

    def terms(self, sums: Sums) -> Terms:
        """Return the sums of the whole batch; experts' counts of this rank's places."""
        everywhere, tokens = self.manual, [a for a in self.manual if a in TOKEN_AXES]
        end: Terms = jax.tree.map(lambda a: lax.psum(a, everywhere), sums.end)
        if not self.has_experts:
            return end
        balance = lax.psum(sums.report.balance_loss.sum(), everywhere)
        per_place = self.with_other_copy(sums.report.expert_counts)
        per_place = per_place.reshape(-1, per_place.shape[-1])
        counted = lax.psum(per_place, tuple(tokens)) if tokens else per_place
        return end._replace(
            balance=end.balance + balance,
            expert_counts={**end.expert_counts, MAIN_ROUTERS: counted},
        )

    def specs(self, place: Any, dims: Any) -> tuple[dict, ...]:
        """Return how parameters and buffers are handed to the devices."""
        shapes = self.frame.shapes()
        return tuple(
            {p: only(place(d, shape[p].shape), set(self.manual)) for p, d in group.items()}
            for group, shape in zip(dims, shapes, strict=True)
        )

    def grad_specs(self) -> dict[str, PartitionSpec]:
        """Return how gradients leave: where the moments lie."""
        return self.specs(self.rules.slot_spec, self.frame.dims())[0]

    def piece_specs(self, pieces: Piece) -> Any:
        """Return how micro-batches are handed to the devices, a spec for each array."""

        def spec(*dims: str | None) -> Any:
            return only(self.rules.activation_spec(dims), set(self.manual))

        rows, numbers = spec(None, "batch", "seq"), Noise(spec(), spec(None, "batch"))
        return Piece(
            batch=jax.tree.map(lambda _: rows, pieces.batch),
            places=None if pieces.places is None else spec("seq"),
            aheads=jax.tree.map(lambda _: rows, pieces.aheads),
            noise=None if pieces.noise is None else numbers,
        )

    def term_specs(self, pieces: Piece) -> Any:
        """Return how the terms leave: whole, but for the counts of each rank's places."""
        whole = PartitionSpec()
        counts = {
            f"mtp.{i}.block.ffn.router.bias": whole
            for i in range(len(pieces.aheads))
            if self.has_experts
        }
        if self.has_experts:
            counts[MAIN_ROUTERS] = PartitionSpec(AXIS)
        return Terms(*cast(Any, (whole, whole, whole, whole, counts)))
