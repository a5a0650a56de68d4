"""The loop: next batch, step, time it, watch it, save it."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.failpoint import reach
from jaxfound.resources.pulse import Phase, Pulse
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.step_timer import StepTime, StepTimer
from jaxfound.resources.stragglers import Straggler
from jaxfound.training.checkpoints import committed as saves_told
from jaxfound.training.evaluate import EvalResult
from jaxfound.training.events import Event, NonFiniteError
from jaxfound.training.state import TrainState
from jaxfound.training.step import StepMetrics, TrainStep

# Returns who asked the loop to finish its step, save and leave; empty when nobody did.
Stop = Callable[[], str]


def never() -> str:
    """Return that nobody asks to stop."""
    return ""


def none_slow(step: int) -> tuple[Straggler, ...]:
    """Return that no process holds up the others."""
    return ()


class Parts(NamedTuple):
    """What the loop drives; each can be a fake.

    Attributes:
        step: consumes a state and a batch on the devices.
        batches: batch of each step from the first one to take, already on the devices.
        evaluate: held-out loss of a state; None when nothing is held out.
        checkpoints: where states are saved.
        host_batch: the batch of a step on the host, for the record of a bad one.
        to_saved: turns a state into what a checkpoint holds.
        stragglers: the processes that hold up the others, asked after each step.
        demote: what to go on with after a step that was not finite, given the state and the
            number of that step; None where nothing is demoted, or where nothing can be.
        demoted: patterns of what has left fp8 so far, the newest first.
    """

    step: TrainStep
    batches: Iterator[Batch]
    evaluate: Callable[[TrainState], EvalResult] | None
    checkpoints: CheckpointManager
    host_batch: Callable[[int], Batch]
    to_saved: Callable[[TrainState], TrainState] = lambda state: state
    stragglers: Callable[[int], tuple[Straggler, ...]] = none_slow
    demote: "Demote | None" = None
    demoted: tuple[str, ...] = ()


# Parts with other formats, or the same ones where the step is finite by now; None for no cause.
type Demote = Callable[[TrainState, int], Parts | None]


@dataclass
class Watch:
    """What the loop remembers between steps."""

    timer: StepTimer
    clock: Callable[[], float]
    pulse: Pulse
    skipped_in_row: int = 0
    pending: list[tuple[int, StepMetrics]] = field(default_factory=list)


def fit(
    cfg: RunConfig,
    state: TrainState,
    parts: Parts,
    *,
    stop: Stop,
    directory: RunDirectory,
    clock: Callable[[], float] = time.monotonic,
    pulse: Pulse | None = None,
) -> Generator[Event, None, TrainState]:
    """Train from `state` to cfg.train.steps, yielding what happens, returning the last state.

    One step runs on the devices while the host reads the one before, so nothing waits for a
    number; step times are from completion to completion. `pulse` is told what goes on.

    Raises:
        NonFiniteError: a step was not finite and train.non_finite or max_skipped ends the run.
        CheckpointError: a save failed; older checkpoints are intact.
    """
    steps, done, asked = cfg.train.steps, int(state.step), ""
    tokens = cfg.train.batch_size * cfg.train.seq_len
    pulse = Pulse() if pulse is None else pulse
    pulse.enter("data", step=done)
    watch = Watch(StepTimer(tokens_per_step=tokens, num_steps=steps), clock, pulse)
    dispatch: Phase = "compile"
    while done < steps and not asked:
        state, metrics = advance(state, parts, pulse=pulse, phase=dispatch)
        done += 1
        pulse.enter("loop", step=done)
        reach("step")
        watch.timer.dispatched(done, now=clock())
        watch.pending.append((done, metrics))
        asked = stop()
        evaluates, saves = due(cfg, done)
        pauses = evaluates or saves or bool(asked)
        bad = yield from drain(cfg, watch, parts, leave=0 if pauses else 1, directory=directory)
        before = parts
        bad, parts = yield from without_cause(
            cfg, state, parts, watch, bad=bad, directory=directory
        )
        dispatch = "dispatch" if parts is before else "compile"
        if evaluates and parts.evaluate is not None and bad is None:
            pulse.enter("eval")
            yield held_out(parts.evaluate(state), step=done)
        if saves or asked or bad is not None:
            pulse.enter("save")
            must = done == steps or bool(asked) or bad is not None
            yield from save(state, parts, step=done, cfg=cfg, must=must)
        if bad is not None:
            parts.checkpoints.wait()
            raise bad
        if pauses:
            watch.timer.restart(now=clock())
    pulse.enter("save")
    yield from ended(cfg, parts, done=done, asked=asked)
    return state


def ended(cfg: RunConfig, parts: Parts, *, done: int, asked: str) -> Iterator[Event]:
    """Wait for what is still being saved, and tell how the run ended."""
    parts.checkpoints.wait()
    if done == cfg.train.steps:
        parts.checkpoints.finish_uploads(limit_s=cfg.checkpoint.upload_wait_s)
    yield from committed(parts)
    if done < cfg.train.steps:
        yield Event("stopped", done, {"signal": asked, "steps": cfg.train.steps})
    else:
        yield Event("finished", done, {})


def advance(
    state: TrainState, parts: Parts, *, pulse: Pulse, phase: Phase
) -> tuple[TrainState, StepMetrics]:
    """Hand the step of the next batch to the devices; return what will be its results."""
    pulse.enter("data")
    reach("data")
    batch = next(parts.batches)
    pulse.enter(phase)
    return parts.step(state, batch)


def due(cfg: RunConfig, done: int) -> tuple[bool, bool]:
    """Return whether step `done` ends with an evaluation, and whether with a checkpoint."""
    last = done == cfg.train.steps
    every_eval, every_save = cfg.train.eval_every, cfg.checkpoint.every
    evaluates = last or bool(every_eval and done % every_eval == 0)
    return evaluates, last or bool(every_save and done % every_save == 0)


def drain(
    cfg: RunConfig, watch: Watch, parts: Parts, *, leave: int, directory: RunDirectory
) -> Generator[Event, None, NonFiniteError | None]:
    """Finish the steps in flight but `leave` of them; return the error that ends the run."""
    bad = None
    while len(watch.pending) > leave:
        bad = (yield from finish(cfg, watch, parts, directory=directory)) or bad
    return bad


def without_cause(
    cfg: RunConfig,
    state: TrainState,
    parts: Parts,
    watch: Watch,
    *,
    bad: NonFiniteError | None,
    directory: RunDirectory,
) -> Generator[Event, None, tuple[NonFiniteError | None, Parts]]:
    """Return the parts that go on after a step that was not finite, or the error that ends the run.

    What is in flight is finished first: it computes in the formats of before.
    """
    if bad is None or parts.demote is None:
        return bad, parts
    again = yield from drain(cfg, watch, parts, leave=0, directory=directory)
    watch.pulse.enter("compile", step=int(state.step))
    changed = parts.demote(state, bad.step)
    watch.timer.restart(now=watch.clock())
    if changed is None or watch.skipped_in_row >= cfg.train.max_skipped:
        return again or bad, parts
    patterns = changed.demoted[: len(changed.demoted) - len(parts.demoted)]
    if patterns:
        reason = f"step {bad.step} is not finite with these in fp8, and is without"
        values = {"patterns": list(patterns), "format": cfg.precision.compute, "reason": reason}
        yield Event("demoted", int(state.step), {**values, "bad_step": bad.step})
    return None, changed


def held_out(result: EvalResult, *, step: int) -> Event:
    """Return an evaluation as an event."""
    return Event("eval", step, {"eval_loss": result.loss, "num_targets": result.num_targets})


def finish(
    cfg: RunConfig, watch: Watch, parts: Parts, *, directory: RunDirectory
) -> Generator[Event, None, NonFiniteError | None]:
    """Wait for the oldest step in flight, yield its numbers, return the error that ends the run."""
    done, metrics = watch.pending.pop(0)
    watch.pulse.enter("wait")
    numbers = jax.device_get(metrics)
    watch.pulse.enter("loop")
    took = watch.timer.completed(done, now=watch.clock())
    watch.pulse.step_took(took.duration_s)
    values = train_values(numbers, took, watch.timer, step=done)
    yield Event("step", done, values)
    if done % cfg.train.log_every == 0 or done == cfg.train.steps:
        yield Event("train", done, values)
    yield from committed(parts)
    for slow in parts.stragglers(done):
        yield Event("straggler", done, slow._asdict())
    if bool(numbers.finite):
        watch.skipped_in_row = 0
        return None
    watch.skipped_in_row += 1
    path = save_batch(parts.host_batch(done - 1), directory=directory, step=done)
    yield Event("non_finite", done, {**values, "batch": str(path)})
    return verdict(cfg, watch.skipped_in_row, step=done, path=path)


def verdict(cfg: RunConfig, skipped_in_row: int, *, step: int, path: Path) -> NonFiniteError | None:
    """Return the error that ends the run after a bad step, or None to go on."""
    limit = cfg.train.max_skipped if cfg.train.non_finite == "skip" else 1
    if skipped_in_row < limit:
        return None
    return NonFiniteError(
        f"step {step}: loss or gradient is not finite ({skipped_in_row} in a row; "
        f"train.non_finite={cfg.train.non_finite}, max_skipped={cfg.train.max_skipped}). Its "
        f"update was not applied, the state is saved, its batch is in {path}. Lower "
        "optimizer.learning_rate, look at the batch, or go on with train.non_finite=skip",
        step=step,
    )


def train_values(
    numbers: StepMetrics, took: StepTime, timer: StepTimer, *, step: int
) -> dict[str, object]:
    """Return a step's numbers as plain values."""
    values: dict[str, object] = {
        name: float(value) for name, value in numbers._asdict().items() if name != "finite"
    }
    values["skipped"] = not bool(numbers.finite)
    values["step_time_s"] = took.duration_s
    values["tokens_per_s"] = took.tokens_per_s
    values["idle_s"] = took.idle_s
    values["eta_s"] = timer.eta_s(step)
    return values


def save(
    state: TrainState, parts: Parts, *, step: int, cfg: RunConfig, must: bool
) -> Iterator[Event]:
    """Snapshot the state as `step`, if it `must` be even when the one before is still written.

    What was committed meanwhile is told.
    """
    metadata = {
        "data_position": step,
        "batch_size": cfg.train.batch_size,
        "seq_len": cfg.train.seq_len,
        "seed": cfg.seed,
        "optimizer": cfg.optimizer.name,
        **({"demoted": list(parts.demoted)} if parts.demoted else {}),
    }
    parts.checkpoints.save(step, parts.to_saved(state)._asdict(), metadata, must=must)
    yield from committed(parts)


def committed(parts: Parts) -> Iterator[Event]:
    """Yield an event for what became of each save since the last call."""
    yield from saves_told(parts.checkpoints)


def save_batch(batch: Batch, *, directory: RunDirectory, step: int) -> Path:
    """Write this process's rows of a bad step, so that they can be looked at and run again."""
    mine = f".process-{jax.process_index()}" if jax.process_count() > 1 else ""
    path = directory.bad_batches / f"step-{step}{mine}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {k: np.asarray(v) for k, v in batch._asdict().items()}
    np.savez(path, **arrays)
    return path
