"""One optimizer step as one compiled program."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.params import LAYER_DIMS
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models.build import Frame, describe, in_main_stack
from jaxfound.models.layers.router import updated_bias
from jaxfound.models.quantized_once import quantized_once, with_quantized
from jaxfound.parallelism.mesh import OnMesh, jit_on_mesh
from jaxfound.training.objective import (
    Terms,
    TokenCounts,
    load_imbalance,
    noise_of,
    objective_of,
    terms_of,
    token_counts,
)
from jaxfound.training.optimizer import Schedule
from jaxfound.training.pipelined import pipelined_gradients
from jaxfound.training.state import TrainState, state_shardings

# Scope of the operations that add up the gradients of micro-batches, as profiles show it.
ACCUMULATION = "accumulation"
# Arrays whose concatenation XLA's GPU backend puts into a kernel that has no other result.
FEW_LAYERS = 4
type Grads = dict[str, jax.Array]
# Numbers of a micro-batch's rows in the global batch; None where nothing depends on them.
type Rows = Int[Array, " B"] | None


class StepMetrics(NamedTuple):
    """Numbers of one step, scalars on the device.

    Attributes:
        loss: next-token loss, nats a token.
        ahead_loss: mean loss of the further depths, nats a token.
        balance_loss: balance loss, a token mean.
        grad_norm: global norm before clipping.
        learning_rate: of this step.
        num_targets: next-token targets that counted.
        load_imbalance: busiest expert over the mean, the worst layer's.
        finite: False when the update was skipped because something was not a number.
    """

    loss: Float[Array, ""]
    ahead_loss: Float[Array, ""]
    balance_loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    num_targets: Float[Array, ""]
    load_imbalance: Float[Array, ""]
    finite: Bool[Array, ""]


type TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def make_train_step(
    cfg: RunConfig,
    frame: Frame,
    tx: optax.GradientTransformation,
    *,
    schedule: Schedule,
    mesh: Mesh,
    options: Mapping[str, str | int | bool] | None = None,
) -> OnMesh[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the jitted step; it consumes the state it is given (its buffers are donated).

    Args:
        cfg: the run.
        frame: its model without arrays.
        tx: its optimizer.
        schedule: of the learning rate.
        mesh: what it runs on.
        options: of the compiler, by flag (`compiler_flags.options_for`); none by default.
    """
    shardings = state_shardings(frame, tx, mesh=mesh)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=cfg.model.mtp_depth)
            grads, terms = gradients(state, batch, frame=frame, cfg=cfg, counts=counts)
            held, grads = beside_moments(state, stacks_written(grads, frame=frame), frame=frame)
            norm = global_norm(grads, frame=frame)
            rate = schedule(state.step)
            finite = jnp.isfinite(objective_of(terms, counts, cfg=cfg)) & jnp.isfinite(norm)
            new = updated(held, grads, norm=norm, rate=rate, terms=terms, tx=tx, cfg=cfg)
            kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, held)
            metrics = metrics_of(terms, counts, norm=norm, rate=rate, finite=finite)
            # The step always counts: the batch was seen, and the data must move on.
            return kept._replace(step=state.step + 1), metrics

    return jit_on_mesh(
        step,
        mesh,
        compiler_options=options,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def gradients(
    state: TrainState, batch: Batch, *, frame: Frame, cfg: RunConfig, counts: TokenCounts
) -> tuple[Grads, Terms]:
    """Return gradients and sums of the whole batch, summed over its micro-batches.

    The sum over micro-batches lies where `ShardingRules.grad_spec` says: at ZeRO stages 2 and 3 the
    gradients of each are reduced and scattered before they are added, at 0 and 1 added whole.
    """

    noise = noise_of(state.rng, state.step, batch) if cfg.model.dropout else None

    def objective(params: Grads, piece: Batch, rows: Rows) -> tuple[jax.Array, Terms]:
        drawn = None if noise is None else noise._replace(rows=rows)
        model = frame.bind(with_quantized(params, in_8_bit), state.buffers)
        terms = terms_of(model, piece, cfg=cfg, noise=drawn)
        return objective_of(terms, counts, cfg=cfg), terms

    def one(piece: Batch, rows: Rows) -> tuple[Grads, Terms]:
        grads, terms = jax.grad(objective, has_aux=True)(state.params, piece, rows)
        return grads, terms

    pipelining = frame.execution.pipelining
    if pipelining is not None:
        return pipelined_gradients(
            state, batch, noise, frame=frame, cfg=cfg, counts=counts, pipelining=pipelining
        )
    in_8_bit = quantized_once(frame, state.params)
    rows = None if noise is None else noise.rows
    pieces = cfg.parallel.num_microbatches
    if pieces == 1:
        return one(batch, rows)
    # Row i goes to micro-batch i % pieces, so that a device's rows stay on the device.
    cut = jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(-1, pieces, *a.shape[1:]), 1, 0), (batch, rows)
    )
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(one, *jax.tree.map(lambda a: a[0], cut)),
    )

    def add(
        total: tuple[Grads, Terms], piece: tuple[Batch, Rows]
    ) -> tuple[tuple[Grads, Terms], None]:
        grads, terms = one(*piece)
        with jax.named_scope(ACCUMULATION):
            new = jax.tree.map(jnp.add, total, (frame.constrain_grads(grads), terms))
            return (frame.constrain_grads(new[0]), new[1]), None

    (grads, terms), _ = jax.lax.scan(add, zeros, cut)
    # Pinned behind the loop as well: what comes next would else decide where the sum lies in it.
    return frame.constrain_grads(grads), terms


def stacks_written(grads: Grads, *, frame: Frame) -> Grads:
    """Return gradients, those of short stacks as arrays that are written before anything uses them.

    The gradient of layers that no loop goes over is a concatenation. Of up to `FEW_LAYERS` XLA's
    GPU backend makes a kernel with one result: a parameter and its moments would take three that
    read all of it, and copies of what the first overwrites.
    """
    unrolled = frame.execution.layers_per_scan_step or FEW_LAYERS
    if frame.stages is not None or unrolled == 1:
        return grads
    table, most = describe(frame.cfg), min(unrolled, FEW_LAYERS)
    few = {
        path: g
        for path, g in grads.items()
        if table[path].dims[0] in LAYER_DIMS and 1 < g.shape[0] <= most
    }
    return {**grads, **jax.lax.optimization_barrier(few)}


def global_norm(grads: Grads, *, frame: Frame) -> jax.Array:
    """Return the norm of all gradients together, each layer counted once."""
    copies = frame.num_copies
    squares = {path: jnp.square(g).sum() for path, g in grads.items()}
    return jnp.sqrt(sum(s / copies if in_main_stack(p) else s for p, s in squares.items()))


def beside_moments(state: TrainState, grads: Grads, *, frame: Frame) -> tuple[TrainState, Grads]:
    """Return parameters and gradients where the moments lie, so that each device updates its part.

    At ZeRO stages 1 and 2 that cuts the parameters, and the step's outputs gather them again.
    """
    return state._replace(params=frame.constrain_slots(state.params)), frame.constrain_slots(grads)


def updated(
    state: TrainState,
    grads: Grads,
    *,
    norm: jax.Array,
    rate: jax.Array,
    terms: Terms,
    tx: optax.GradientTransformation,
    cfg: RunConfig,
) -> TrainState:
    """Return the state after clipping, the optimizer and the routers' bias update."""
    limit = cfg.optimizer.clip_norm
    if limit:
        shrink = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * shrink, grads)
    moves, optimizer = tx.update(grads, state.optimizer, state.params)
    params = jax.tree.map(lambda p, m: p - rate * m, state.params, moves)
    bias_rate = cfg.model.moe.bias_update_rate
    moved = {
        path: updated_bias(state.buffers[path], counts, rate=bias_rate)
        for path, counts in terms.expert_counts.items()
    }
    return state._replace(params=params, optimizer=optimizer, buffers={**state.buffers, **moved})


def metrics_of(
    terms: Terms, counts: TokenCounts, *, norm: jax.Array, rate: jax.Array, finite: jax.Array
) -> StepMetrics:
    """Return the numbers of the step as token means."""
    depths = max(terms.ahead_nats.shape[0], 1)
    return StepMetrics(
        loss=terms.nats / counts.targets,
        ahead_loss=(terms.ahead_nats / counts.ahead).sum() / depths,
        balance_loss=terms.balance / counts.real,
        grad_norm=norm,
        learning_rate=rate,
        num_targets=counts.targets,
        load_imbalance=load_imbalance(terms.expert_counts),
        finite=finite,
    )


def batch_sharding(frame: Frame, mesh: Mesh) -> NamedSharding:
    """Return where the rows of a batch [B T] lie on the mesh: whole, cut over the batch axes.

    The context axis cuts them inside the step, once what a token needs of its neighbours is found.
    """
    return NamedSharding(mesh, frame.execution.rules.activation_spec(("batch", None)))
