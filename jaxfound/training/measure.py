"""How fast a run trains, and how much of it is spent outside the compiled step."""

import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import cast

import jax

from jaxfound.config.run import RunConfig
from jaxfound.data import Batch, BinLoader
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.metrics import MetricsWriter
from jaxfound.resources.platform import source_commit
from jaxfound.training.batches import local_rows, to_devices
from jaxfound.training.events import UNRECORDED
from jaxfound.training.loop import fit, never
from jaxfound.training.run import Run, make_parts, start, train_step_of
from jaxfound.training.state import TrainState, create_train_state
from jaxfound.training.step import TrainStep, batch_sharding

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Measured:
    """One measurement of training.

    Attributes:
        device: what it ran on.
        num_devices: how many of them.
        versions: of Python and the packages that decide speed.
        commit: of the source tree; empty when it was not run from a checkout.
        config: the run's name.
        tokens_per_step: tokens of one step.
        steps_per_round: steps of each of the two, alone and in the loop, in one round.
        step_alone_s: the compiled step back to back on a resident batch; one mean a round.
        step_in_loop_s: a step of the loop: the median from completion to completion, input and
            logging included, plus a save that is waited for in full over checkpoint.every steps.
        tokens_per_s: tokens_per_step over the median of step_in_loop_s.
        outside_shares: 1 − alone / in the loop, for each round.
        outside_share: their median; below zero means less than the noise.
    """

    device: str
    num_devices: int
    versions: dict[str, str]
    commit: str
    config: str
    tokens_per_step: int
    steps_per_round: int
    step_alone_s: tuple[float, ...]
    step_in_loop_s: tuple[float, ...]
    tokens_per_s: float
    outside_shares: tuple[float, ...]
    outside_share: float

    def as_dict(self) -> dict[str, object]:
        """Return the record as JSON data."""
        return asdict(self)


def measure_training(cfg: RunConfig, *, steps: int, rounds: int) -> Measured:
    """Train `rounds` × `steps` steps in a temporary folder, timing loop and step in turn.

    Evaluation is left out: it is work that was asked for, not overhead of the loop. The two are
    timed in short turns, because a shared machine drifts by more than what is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = cfg.train.model_copy(
            update={"steps": 2 * steps * rounds + 10, "eval_every": 0, "eval_batches": 0}
        )
        run = start(cfg.model_copy(update={"runs_dir": folder, "name": "measure", "train": quiet}))
        state = create_train_state(run.frame, run.tx, seed=cfg.seed, mesh=run.mesh)
        # One jitted step for both: its compilation falls into the first round.
        step, batch = train_step_of(run), first_batch(run)
        alone_s, in_loop_s = [], []
        for number in range(rounds + 1):
            took_s, state = time_loop(run, step, state, steps=steps if number else 3)
            step_s, state = time_step(step, state, batch, steps=steps if number else 3)
            # The first round compiles and is not counted.
            if number:
                in_loop_s.append(took_s)
                alone_s.append(step_s)
    tokens = cfg.train.batch_size * cfg.train.seq_len
    shares = tuple(1 - a / b for a, b in zip(alone_s, in_loop_s, strict=True))
    return Measured(
        device=jax.devices()[0].device_kind,
        num_devices=jax.device_count(),
        versions={"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        commit=source_commit(),
        config=cfg.name,
        tokens_per_step=tokens,
        steps_per_round=steps,
        step_alone_s=tuple(alone_s),
        step_in_loop_s=tuple(in_loop_s),
        tokens_per_s=tokens / statistics.median(in_loop_s),
        outside_shares=shares,
        outside_share=statistics.median(shares),
    )


def time_loop(
    run: Run, step: TrainStep, state: TrainState, *, steps: int
) -> tuple[float, TrainState]:
    """Return seconds a step of the loop with its share of a save, and the state after."""
    last = int(state.step) + steps
    cfg = run.cfg.model_copy(update={"train": run.cfg.train.model_copy(update={"steps": last})})
    with ExitStack() as opened:
        checkpoints = opened.enter_context(CheckpointManager(run.directory.checkpoints, keep=1))
        metrics = opened.enter_context(MetricsWriter(run.directory.metrics))
        done = int(state.step)
        parts = make_parts(run, checkpoints, step=step, first_step=done, opened=opened)
        events = fit(cfg, state, parts, stop=never, directory=run.directory)
        step_times_s, last_step_s = [], time.monotonic()
        while True:
            try:
                event = next(events)
            except StopIteration as finished:
                save_s = time.monotonic() - last_step_s
                every = cfg.checkpoint.every or cfg.train.steps
                return statistics.median(step_times_s) + save_s / every, finished.value
            if event.kind == "step":
                step_times_s.append(cast(float, event.values["step_time_s"]))
                last_step_s = time.monotonic()
            if event.kind not in UNRECORDED:
                metrics.write(event.kind, step=event.step, **event.values)


def first_batch(run: Run) -> Batch:
    """Return one batch that stays on the devices."""
    cfg, placed = run.cfg, batch_sharding(run.frame, run.mesh)
    rows = local_rows(placed, cfg.train.batch_size, seq_len=cfg.train.seq_len)
    batch = BinLoader(run.prepared.train, batch_size=cfg.train.batch_size).batch(0, rows=rows)
    return to_devices(batch, placed, batch_size=cfg.train.batch_size)


def time_step(
    step: TrainStep, state: TrainState, batch: Batch, *, steps: int
) -> tuple[float, TrainState]:
    """Return seconds a compiled step takes, run back to back, and the state after."""
    jax.block_until_ready(state)
    started_s = time.monotonic()
    for _ in range(steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    return (time.monotonic() - started_s) / steps, state
