"""A step of a run once more, an operation at a time: where its numbers begin to go wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.run import RunConfig
from jaxfound.data import BinLoader
from jaxfound.data.batch import Batch
from jaxfound.models.execution import DTYPES
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.training.events import TrainingError
from jaxfound.training.objective import Terms, objective_of, token_counts
from jaxfound.training.op_by_op import Trace, Versus, run_twice
from jaxfound.training.run import Run, first_state, start, train_step_of
from jaxfound.training.state import TrainState
from jaxfound.training.step import gradients

# A sum of many roundings differs by some units in the last place; a wrong one by more than these.
BOUND_ULPS = 32
# One device, every layer and every operation on its own.
ONE_BY_ONE = {
    **dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1),
    **{"zero_stage": 0, "num_microbatches": 1, "layers_per_scan_step": "all", "remat": "none"},
}


@dataclass(frozen=True)
class Replay:
    """What a step came to, as it was and otherwise.

    Attributes:
        step: number of the step, from 1.
        from_step: step of the state it was started from: a checkpoint's, or 0 for fresh weights.
        batch: where its batch is from.
        bad_inputs: parameters and other state that were not finite before the step.
        trace: operations of the forward and backward pass.
        loss: of the step, nats a token.
        other_loss: of the second run.
        bad_results: gradients (and sums of the loss) that are not finite, as it was.
        other_bad_results: the same of the second run.
    """

    step: int
    from_step: int
    batch: str
    bad_inputs: tuple[str, ...]
    trace: Trace
    loss: float
    other_loss: float
    bad_results: tuple[str, ...]
    other_bad_results: tuple[str, ...]


def replay(
    cfg: RunConfig,
    there: RunDirectory,
    *,
    step: int,
    versus: Versus,
    bound: float | int | None = None,
    max_steps: int = 1000,
) -> Replay:
    """Run a step of a run again on one device, as it was and as `versus` says.

    The state is that of the newest checkpoint before the step, or fresh weights; steps in between
    are run again. A step that was not finite left the state as it was, so that the checkpoint
    saved after it serves as well.

    Args:
        cfg: the run's config; its layout is not used.
        there: the run's folder.
        step: from 1, as records count.
        bound: relative difference of an operation that is told; BOUND_ULPS of the run's format by
            default.
        max_steps: that may be run again to come to the step.

    Raises:
        TrainingError: if there is no such step, or too many before it are to be run again.
        CheckpointError: if the state cannot be read.
    """
    if not 1 <= step <= cfg.train.steps:
        raise TrainingError(f"step {step} is not one of the run's, 1 to {cfg.train.steps}")
    parallel = cfg.parallel.model_copy(update=ONE_BY_ONE)
    cfg = cfg.model_copy(update={"parallel": parallel})
    run = start(cfg, devices=jax.local_devices()[:1])
    loader = BinLoader(
        run.prepared.train, batch_size=cfg.train.batch_size, seed=cfg.seed, order=cfg.data.order
    )
    saved = saved_batch(there, step=step)
    rows = loader.batch(step - 1) if saved is None else saved
    batch = Batch(*(jnp.asarray(field) for field in rows))
    skipped = saved is not None
    state, from_step = state_before(
        run, there, loader, step=step, was_skipped=skipped, max_steps=max_steps
    )
    if bound is None:
        bound = BOUND_ULPS * float(jnp.finfo(DTYPES[cfg.precision.compute]).eps)
    named = {
        **{f"parameter {path}": x for path, x in state.params.items()},
        **{f"buffer {path}": x for path, x in state.buffers.items()},
    }
    own, other, trace = both(run, state, batch, versus=versus, bound=bound)
    return Replay(
        step=step,
        from_step=from_step,
        batch="the data" if saved is None else f"bad_batches, step {step}",
        bad_inputs=bad_of(named),
        trace=trace,
        loss=loss_of(own, batch, cfg=cfg),
        other_loss=loss_of(other, batch, cfg=cfg),
        bad_results=bad_of(results(own)),
        other_bad_results=bad_of(results(other)),
    )


type Gradients = tuple[dict[str, jax.Array], Terms]


def both(
    run: Run, state: TrainState, batch: Batch, *, versus: Versus, bound: float | int
) -> tuple[Gradients, Gradients, Trace]:
    """Return gradients and loss sums of both runs, and what differs between their operations."""
    cfg = run.cfg

    def passes(params: dict, buffers: dict, batch: Batch) -> Gradients:
        with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=cfg.model.mtp_depth)
            now = state._replace(params=params, buffers=buffers)
            return gradients(now, batch, frame=run.frame, cfg=cfg, counts=counts)

    given = (state.params, state.buffers, batch)
    program, shapes = jax.make_jaxpr(passes, return_shape=True)(*given)
    own, other, trace = run_twice(program, jax.tree.leaves(given), versus=versus, bound=bound)
    tree = jax.tree.structure(shapes)
    return tree.unflatten(own), tree.unflatten(other), trace


def loss_of(found: Gradients, batch: Batch, *, cfg: RunConfig) -> float:
    """Return what a step minimised, from its sums."""
    counts = token_counts(batch, num_depths=cfg.model.mtp_depth)
    terms = jax.device_put(found[1], batch.tokens.device)
    return float(objective_of(terms, counts, cfg=cfg))


def results(found: Gradients) -> dict[str, jax.Array]:
    """Return gradients and loss sums by name."""
    grads, terms = found
    sums = {"nats": terms.nats, "balance": terms.balance, "nats ahead": terms.ahead_nats}
    return {**sums, **{f"gradient of {path}": x for path, x in grads.items()}}


def bad_of(named: Mapping[str, jax.Array]) -> tuple[str, ...]:
    """Return the names of arrays that hold something that is not finite."""
    return tuple(name for name, x in named.items() if not np.isfinite(np.asarray(x)).all())


def saved_batch(there: RunDirectory, *, step: int) -> Batch | None:
    """Return the batch that was saved when a step was not finite, None if it was not.

    Processes that saved their own rows hold them in the order of their numbers.
    """
    whole = there.bad_batches / f"step-{step}.npz"
    parts = there.bad_batches.glob(f"step-{step}.process-*.npz")
    number = lambda path: int(path.name.split("-")[-1].removesuffix(".npz"))
    paths = [whole] if whole.exists() else sorted(parts, key=number)
    if not paths:
        return None
    rows = [_fields(path) for path in paths]
    return Batch(*(np.concatenate([r[name] for r in rows]) for name in Batch._fields))


def _fields(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in Batch._fields}


def state_before(
    run: Run,
    there: RunDirectory,
    loader: BinLoader,
    *,
    step: int,
    was_skipped: bool,
    max_steps: int,
) -> tuple[TrainState, int]:
    """Return the state that a step was given, and the step of what it was made from.

    Raises:
        TrainingError: if more than `max_steps` would have to be run again.
    """
    with CheckpointManager(there.checkpoints, keep=0) as checkpoints:
        usable = [s for s in checkpoints.steps() if s < step or (s == step and was_skipped)]
        if not usable:
            state, from_step = first_state(run), 0
        else:
            from_step = max(usable)
            found = checkpoints.restore(from_step, like=run.saved.like._asdict())
            state = run.saved.stored(TrainState(**cast(dict, found.state)))
    missing = step - 1 - from_step
    if missing > max_steps:
        raise TrainingError(
            f"the newest checkpoint before step {step} is {from_step or 'none'}: {missing} steps "
            f"would be run again on one device, and {max_steps} are allowed. Raise --max-steps, or "
            "keep more checkpoints (checkpoint.every, checkpoint.keep)"
        )
    again = train_step_of(run)
    for done in range(from_step, step - 1):
        state, _ = again(state, loader.batch(done))
    return state, from_step
