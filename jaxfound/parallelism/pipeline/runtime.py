"""Runs any schedule inside one compiled step: a scan over ticks, a switch over what a tick does.

Call it inside a shard_map that is manual over `pipeline` and over every other axis of which a stage
names collectives. All ranks go through the same ticks. What a rank does in one depends on its row
of the table alone, so that all devices of a rank take the same branch; nothing is sent over
`pipeline` inside of one. A stage's input is kept from its arrival until its backward pass, which
computes the stage again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfound.config.parallel import AxisName
from jaxfound.parallelism.pipeline.chunk import (
    Chunk,
    Layers,
    Passed,
    walk_adding,
    walk_apart,
    walk_forward,
)
from jaxfound.parallelism.pipeline.interleave import interleaved
from jaxfound.parallelism.pipeline.split import SplitBackward, split_backward
from jaxfound.parallelism.pipeline.ticks import TickTable
from jaxfound.parallelism.pipeline.trees import Tree, added, float32_zeros, pick, put, zeros

AXIS: AxisName = "pipeline"


@dataclass(frozen=True)
class Stages:
    """What is computed, by place in the pipeline; all of it on one device's shards.

    What they report and lose is summed over micro-batches; a loss is this device's part of the
    whole objective.

    Attributes:
        prefix: (shared, piece) -> input of the first stage.
        layers: of each chunk.
        suffix: (shared, output, piece) -> (loss, report), after the last stage.
        pin: keeps an activation in its place on the axes that are left to the partitioner.
        pin_chunks: keeps arrays like all chunks' parameters in theirs.
        pin_shared: keeps arrays like the shared parameters in theirs.
    """

    prefix: Callable[[Tree, Tree], jax.Array]
    layers: Layers
    suffix: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]
    pin: Callable[[jax.Array], jax.Array] = lambda x: x
    pin_chunks: Callable[[Tree], Tree] = lambda tree: tree
    pin_shared: Callable[[Tree], Tree] = lambda tree: tree


class Inputs(NamedTuple):
    """What a rank has.

    Attributes:
        chunks: parameters of its chunks, each array [chunks layers ...].
        fixed: what else its chunks need and no gradient goes to, each array [chunks layers ...].
        shared: parameters of the prefix and the suffix.
        pieces: micro-batches, each array [micro-batches ...].
    """

    chunks: Tree
    fixed: Tree
    shared: Tree
    pieces: Tree

    def chunk(self, number: jax.Array) -> Chunk:
        """Return one of the rank's chunks."""
        only = len(jax.tree.leaves(self.fixed)[0]) == 1
        return Chunk(self.chunks, self.fixed, 0 if only else number)


class Sums(NamedTuple):
    """Sums over a rank's micro-batches.

    Attributes:
        chunks: gradients of its chunks, float32 [chunks layers ...].
        shared: gradients of the shared parameters, float32.
        report: what its layers reported [chunks layers ...].
        end: what the suffix reported.
    """

    chunks: Tree
    shared: Tree
    report: Tree
    end: Tree


class Buffers(NamedTuple):
    """What waits between ticks, one more slot than the table counts: nothing is read from it.

    Attributes:
        inputs: inputs of stages.
        grads: gradients of stages' outputs.
        kept: what the gradients of weights still need.
    """

    inputs: jax.Array
    grads: jax.Array
    kept: list[jax.Array]


class Sent(NamedTuple):
    """What a rank sends at the end of a tick: its stage's output, its stage's input's gradient."""

    forward: jax.Array
    backward: jax.Array


def run_schedule(table: TickTable, stages: Stages, inputs: Inputs, *, rows: Tree) -> Sums:
    """Return the sums of a step over this rank's micro-batches.

    Args:
        table: what each rank does in each tick.
        stages: what is computed.
        inputs: what this rank has.
        rows: this rank's columns of the table, from `rank_rows`.
    """
    rank = Rank(table, stages, inputs)

    def tick(carry: tuple[Buffers, Sums], row: Tree) -> tuple[tuple[Buffers, Sums], None]:
        buffers, sums = carry
        branches = [partial(BRANCHES[kind], rank) for kind in table.kinds]
        sent, kept, sums = lax.switch(row["kind"], branches, row, buffers, sums)
        return (rank.exchanged(sent, buffers._replace(kept=kept), row), sums), None

    (_, sums), _ = lax.scan(tick, (rank.empty_buffers(), rank.zero_sums()), rows)
    return sums


def rank_rows(table: TickTable) -> dict[str, jax.Array]:
    """Return the table's columns, each [ticks ranks], to be cut over `pipeline` along ranks."""
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    return columns | {f"send_{i}": jnp.asarray(s.slots) for i, s in enumerate(table.sends)}


class Back(NamedTuple):
    """What a backward pass gives besides the gradients of weights."""

    grad: jax.Array
    shared: Tree
    report: Tree
    end: Tree


class Rank:
    """One device's part of a pipeline while a step is traced."""

    def __init__(self, table: TickTable, stages: Stages, inputs: Inputs) -> None:
        self.table, self.stages, self.inputs = table, stages, inputs
        self.activation = jax.eval_shape(stages.prefix, inputs.shared, pick(inputs.pieces, 0))
        self.cut: SplitBackward | None = None
        if any(kind in ("I", "W", "F+I") for kind in table.kinds):
            # The first stage's chunk stands for all of them: they differ in numbers alone.
            row = {name: jnp.int32(0) for name in table.columns}
            operands = row, self.empty_buffers(cut=False), self.end_sums()
            self.cut = split_backward(self.backward_apart, self.params_of(row), *operands)

    def piece(self, microbatch: jax.Array) -> Tree:
        """Return a micro-batch."""
        return pick(self.inputs.pieces, microbatch)

    def params_of(self, row: Tree) -> Tree:
        """Return the parameters of the chunk whose backward pass a tick runs, [layers ...]."""
        return pick(self.inputs.chunks, self.inputs.chunk(row["b_chunk"]).number)

    def forward(self, row: Tree, buffers: Buffers) -> jax.Array:
        """Return the output of a stage."""
        piece, shared = self.piece(row["f_microbatch"]), self.inputs.shared
        x = entering(self.stages, shared, piece, buffers.inputs, row["f_first"], row["f_slot"])
        chunk = self.inputs.chunk(row["f_chunk"])
        return self.stages.pin(walk_forward(self.stages.layers, chunk, x, piece))

    def backward_adding(
        self, totals: Tree, row: Tree, buffers: Buffers, sums: tuple[Tree, Tree]
    ) -> tuple[Tree, Back]:
        """Compute a stage again and return its gradients added to `totals`, and the rest."""
        stages, chunk = self.stages, self.inputs.chunk(row["b_chunk"])
        run = partial(walk_adding, stages.layers, chunk, sums=totals, pin=stages.pin_chunks)
        return self.backward(run, row, buffers, sums)

    def backward_apart(
        self, params: Tree, row: Tree, buffers: Buffers, sums: tuple[Tree, Tree]
    ) -> tuple[Tree, Back]:
        """Compute a stage again and return the gradients of its parameters, and the rest."""
        fixed = pick(self.inputs.fixed, self.inputs.chunk(row["b_chunk"]).number)
        run = partial(walk_apart, self.stages.layers, params, fixed)
        return self.backward(run, row, buffers, sums)

    def backward(
        self,
        run: Callable[[jax.Array, Tree], Passed],
        row: Tree,
        buffers: Buffers,
        sums: tuple[Tree, Tree],
    ) -> tuple[Tree, Back]:
        """Go back through a stage that `run` computes again, and through what lies beside it."""
        stages, shared = self.stages, self.inputs.shared
        so_far, end_so_far = sums
        piece = self.piece(row["b_microbatch"])
        x = entering(stages, shared, piece, buffers.inputs, row["b_first"], row["b_slot"])
        y, report, pull = run(x, piece)

        def at_last() -> tuple[jax.Array, Tree, Tree]:
            end = jax.grad(stages.suffix, (0, 1), has_aux=True)
            (of_shared, of_y), found = end(shared, y, piece)
            return stages.pin(of_y), self.shared_with(so_far, of_shared), added(end_so_far, found)

        def between() -> tuple[jax.Array, Tree, Tree]:
            return stages.pin(pick(buffers.grads, row["b_grad_slot"])), so_far, end_so_far

        of_y, so_far, end_so_far = lax.cond(row["b_last"] > 0, at_last, between)
        of_params, of_x = pull(of_y)
        of_x = stages.pin(of_x)

        def at_first() -> Tree:
            _, pull_prefix = jax.vjp(lambda shared: stages.prefix(shared, piece), shared)
            return self.shared_with(so_far, pull_prefix(of_x)[0])

        so_far = lax.cond(row["b_first"] > 0, at_first, lambda: so_far)
        return of_params, Back(of_x, so_far, report, end_so_far)

    def shared_with(self, so_far: Tree, part: Tree) -> Tree:
        """Return the sum of the shared parameters' gradients with a part added."""
        return self.stages.pin_shared(added(so_far, part))

    def chunks_with(self, so_far: Tree, part: Tree, chunk: jax.Array) -> Tree:
        """Return the sums of the chunks' gradients with a part added to one chunk's."""
        return self.stages.pin_chunks(add_at(so_far, part, chunk, self))

    def exchanged(self, sent: Sent, buffers: Buffers, row: Tree) -> Buffers:
        """Send what the tick made and return the buffers with what arrived."""
        waiting = {"forward": buffers.inputs, "backward": buffers.grads}
        for i, send in enumerate(self.table.sends):
            value = handed_on(getattr(sent, send.payload), send.hop, self.table.num_ranks)
            waiting[send.payload] = put(waiting[send.payload], value, row[f"send_{i}"])
        return Buffers(waiting["forward"], waiting["backward"], buffers.kept)

    def nothing(self) -> jax.Array:
        """Return what is sent when there is nothing to send."""
        return self.stages.pin(jnp.zeros(self.activation.shape, self.activation.dtype))

    def empty_buffers(self, *, cut: bool = True) -> Buffers:
        """Return the buffers before the first tick."""
        table, x = self.table, self.activation

        def slots(count: int, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((count + 1, *like.shape), like.dtype)

        kept = self.cut.kept if cut and self.cut is not None else ()
        return Buffers(
            inputs=slots(table.num_input_slots, x),
            grads=slots(table.num_grad_slots, x),
            kept=[slots(table.num_kept_slots, one) for one in kept],
        )

    def end_sums(self) -> tuple[Tree, Tree]:
        """Return zeros for the shared parameters' gradients and for what the suffix reports."""
        end = jax.eval_shape(
            self.stages.suffix, self.inputs.shared, self.activation, pick(self.inputs.pieces, 0)
        )[1]
        return self.stages.pin_shared(float32_zeros(self.inputs.shared)), zeros(end)

    def zero_sums(self) -> Sums:
        """Return the sums before the first tick."""
        places = jax.tree.leaves(self.inputs.fixed)[0].shape[:2]
        first = (*Chunk(self.inputs.chunks, self.inputs.fixed, 0).layer(0), self.activation)
        piece = pick(self.inputs.pieces, 0)
        report = jax.eval_shape(self.stages.layers.run, *first, piece)[2]
        several = jax.tree.map(lambda a: jnp.zeros((*places, *a.shape), a.dtype), report)
        chunks = self.stages.pin_chunks(float32_zeros(self.inputs.chunks))
        shared, end = self.end_sums()
        return Sums(chunks, shared, several, end)


type Done = tuple[Sent, list[jax.Array], Sums]


def _idle(rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    del row
    return Sent(rank.nothing(), rank.nothing()), buffers.kept, sums


def _forward(rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    return Sent(rank.forward(row, buffers), rank.nothing()), buffers.kept, sums


def _backward(rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    chunks, back = rank.backward_adding(sums.chunks, row, buffers, (sums.shared, sums.end))
    sums = _with_report(rank, back, row, sums._replace(chunks=chunks))
    return Sent(rank.nothing(), back.grad), buffers.kept, sums


def _input_grad(rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    columns = {name: row[name] for name in rank.table.columns}
    waiting = buffers._replace(kept=[])
    operands = columns, waiting, (sums.shared, sums.end)
    back, kept = _cut_of(rank).input_part(rank.params_of(row), *operands)
    kept = [
        put(slots, one, row["b_kept_slot"]) for slots, one in zip(buffers.kept, kept, strict=True)
    ]
    return Sent(rank.nothing(), back.grad), kept, _with_report(rank, back, row, sums)


def _weight_grad(rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    kept = [pick(slots, row["b_kept_slot"]) for slots in buffers.kept]
    of_params = _cut_of(rank).weight_part(rank.params_of(row), kept)
    sums = sums._replace(chunks=rank.chunks_with(sums.chunks, of_params, row["b_chunk"]))
    return Sent(rank.nothing(), rank.nothing()), buffers.kept, sums


def _pair(back: Callable[..., Done], rank: Rank, row: Tree, buffers: Buffers, sums: Sums) -> Done:
    y, (sent, kept, sums) = interleaved(
        lambda: rank.forward(row, buffers), lambda: back(rank, row, buffers, sums)
    )
    return sent._replace(forward=y), kept, sums


# What a tick of each kind does. A pair's two passes are in one branch and in one order, so that the
# sends of one hide behind the products of the other.
BRANCHES: dict[str, Callable[..., Done]] = {
    "idle": _idle,
    "F": _forward,
    "B": _backward,
    "I": _input_grad,
    "W": _weight_grad,
    "F+B": partial(_pair, _backward),
    "F+I": partial(_pair, _input_grad),
}


def _cut_of(rank: Rank) -> SplitBackward:
    if rank.cut is None:
        raise AssertionError("a schedule without I has no W")
    return rank.cut


def _with_report(rank: Rank, back: Back, row: Tree, sums: Sums) -> Sums:
    report = add_at(sums.report, back.report, row["b_chunk"], rank)
    return sums._replace(shared=back.shared, report=report, end=back.end)


def entering(
    stages: Stages, shared: Tree, piece: Tree, waiting: jax.Array, first: jax.Array, slot: jax.Array
) -> jax.Array:
    """Return the input of a stage: the first one's is made, the others' wait in a slot."""
    return lax.cond(
        first > 0,
        lambda: stages.pin(stages.prefix(shared, piece)),
        lambda: stages.pin(pick(waiting, slot)),
    )


def handed_on(value: jax.Array, hop: int, num_ranks: int) -> jax.Array:
    """Return what the rank `hop` before this one sent; 0 stays."""
    if hop == 0:
        return value
    return lax.ppermute(
        value, AXIS, [(rank, (rank + hop) % num_ranks) for rank in range(num_ranks)]
    )


def add_at(total: Tree, part: Tree, chunk: jax.Array, rank: Rank) -> Tree:
    """Return sums [chunks ...] with a part added to one chunk's."""
    at = rank.inputs.chunk(chunk).number
    return jax.tree.map(lambda a, b: a.at[at].add(b.astype(a.dtype)), total, part)
