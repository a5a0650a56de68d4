"""How fast a run trains, and how much of it is spent outside the compiled step."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxfound.communication.program import read_program
from jaxfound.config.run import RunConfig
from jaxfound.data import Batch, BinLoader
from jaxfound.parallelism.mesh import OnMesh
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.metrics import MetricsWriter
from jaxfound.resources.platform import package_versions, source_commit
from jaxfound.resources.pulse import Phase, Pulse
from jaxfound.resources.topology import Device
from jaxfound.training.aot import memory_of
from jaxfound.training.batches import batch_like, local_rows, to_devices
from jaxfound.training.ceiling import bare_product
from jaxfound.training.compile_time import Compiles, compiled_twice, kept_programs
from jaxfound.training.events import UNRECORDED
from jaxfound.training.forecast import Checked, allocator_peak, forecast_of
from jaxfound.training.loop import fit, never
from jaxfound.training.optimizer import optimizer_slots
from jaxfound.training.product_formats import products_in
from jaxfound.training.run import Run, make_parts, start, train_step_of
from jaxfound.training.state import TrainState, abstract_train_state, create_train_state
from jaxfound.training.step import StepMetrics, TrainStep, batch_sharding
from jaxfound.training.step_profile import Breakdown, Costly, profiled
from jaxfound.training.step_verdict import Subject, facts_of, verdicts
from jaxfound.training.time_ledger import TimeLedger

# Batches that the bare step goes through in turn. A model that learns one by heart multiplies ever
# smaller numbers, which takes less power and lets the clock run faster; so does a rate that trains.
NUM_BATCHES = 8
RATE = 1e-6
# Options of the compiler for a step that is profiled: kernels of a CUDA graph do not say which
# operation they are.
PROFILED: Mapping[str, dict[str, str]] = {"gpu": {"xla_gpu_enable_command_buffer": ""}}


class Asked(NamedTuple):
    """How a run is measured.

    Attributes:
        steps: of each kind in one round.
        rounds: of the bare step.
        loop_rounds: in how many of them the loop is timed too; each ends with a save.
        profiled: steps to take apart; 0 = none.
        ceiling: whether a bare matrix product is timed before.
    """

    steps: int
    rounds: int
    loop_rounds: int
    profiled: int = 0
    ceiling: bool = False


class Looped(NamedTuple):
    """A round of the loop.

    Attributes:
        step_s: median from completion to completion of a step, plus its share of what a save holds
            it up.
        data_share: of the time until the last step, in which the loop waited for a batch.
    """

    step_s: float
    data_share: float


@dataclass(frozen=True)
class Measured:
    """One measurement of training, by one process.

    Attributes:
        device: what it ran on.
        num_devices: how many of them.
        versions: of Python and the packages that decide speed.
        commit: of the source tree; empty when it was not run from a checkout.
        config: the run's name.
        tokens_per_step: tokens of one step.
        steps_per_round: steps of each of the two, alone and in the loop, in one round.
        step_alone_s: the compiled step back to back on resident batches; one mean a round.
        loop: rounds of the loop: input, logging and checkpoints included.
        compiles: how long it takes until the step can run.
        checked: what the plan said beside the bare step: its memory, its seconds.
        ceiling_flops: FLOP/s of a bare product; one figure a round, none when not asked for.
        loss: of the last bare step, nats a token.
        breakdown: where the time of a bare step goes, on the first device; None = not asked for.
        verdicts: what takes the time and should not, a sentence each.
    """

    device: str
    num_devices: int
    versions: Mapping[str, str]
    commit: str
    config: str
    tokens_per_step: int
    steps_per_round: int
    step_alone_s: tuple[float, ...]
    loop: tuple[Looped, ...]
    compiles: Compiles
    checked: Checked
    ceiling_flops: tuple[float, ...]
    loss: float
    breakdown: Breakdown | None = None
    verdicts: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Median over the rounds of the bare step."""
        return statistics.median(self.step_alone_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the bare step."""
        return self.tokens_per_step / self.step_s

    @property
    def outside_shares(self) -> tuple[float, ...]:
        """1 - alone / in the loop, for each round that timed both; below zero is noise."""
        pairs = zip(self.step_alone_s, self.loop, strict=False)
        return tuple(1 - alone_s / loop.step_s for alone_s, loop in pairs)

    @property
    def outside_share(self) -> float | None:
        """Median share of a step of the loop outside the compiled step; None without a loop."""
        return statistics.median(self.outside_shares) if self.loop else None

    def as_data(self) -> dict[str, Any]:
        """Return the measurement as JSON data; `from_data` reads it back."""
        return {
            **asdict(self),
            "loop": [one._asdict() for one in self.loop],
            "checked": self.checked.as_data(),
            "compiles": self.compiles._asdict(),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measured":
        """Return what `as_data` gave."""
        parts = data["breakdown"]
        found = parts and Breakdown(
            parts["step_s"],
            parts["parts"],
            parts["kinds"],
            tuple(Costly(**row) for row in parts["operations"]),
        )
        return cls(
            **{
                **data,
                "step_alone_s": tuple(data["step_alone_s"]),
                "ceiling_flops": tuple(data["ceiling_flops"]),
                "loop": tuple(Looped(**one) for one in data["loop"]),
                "compiles": Compiles(**data["compiles"]),
                "checked": Checked.from_data(data["checked"]),
                "breakdown": found,
                "verdicts": tuple(data["verdicts"]),
            }
        )


def measured_config(cfg: RunConfig, asked: Asked, *, folder: Path) -> RunConfig:
    """Return the run that is timed in place of `cfg`: in a folder, at a rate that changes nothing.

    Evaluation is left out: it is work that was asked for, not overhead of the loop. No more
    checkpoints are kept than the rounds need room for.
    """
    num_steps = 2 * asked.steps * (asked.rounds + asked.loop_rounds) + asked.profiled + 10
    train = {"steps": num_steps, "eval_every": 0, "eval_batches": 0, "init_from": ""}
    kept = {"keep": min(max(asked.loop_rounds - 1, 0), 1)}
    rate = {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "decay_steps": 0}
    return cfg.model_copy(
        update={
            "runs_dir": str(folder),
            "name": "measure",
            "train": cfg.train.model_copy(update=train),
            "checkpoint": cfg.checkpoint.model_copy(update=kept),
            "optimizer": cfg.optimizer.model_copy(update=rate),
        }
    )


def measure_training(
    cfg: RunConfig, asked: Asked, *, devices: Sequence[Device] | None = None
) -> Measured:
    """Train in a temporary folder, timing the bare step and the loop in turn.

    The two are timed in short turns, because a shared machine drifts by more than what is measured.

    Args:
        cfg: the run.
        asked: how it is measured.
        devices: to train on; every device of the job by default.
    """
    devices = jax.devices() if devices is None else devices
    with tempfile.TemporaryDirectory() as folder, kept_programs(Path(folder) / "programs"):
        ceiling_flops = bare_product() if asked.ceiling else ()
        run = start(measured_config(cfg, asked, folder=Path(folder)), devices=devices)
        state = create_train_state(run.frame, run.tx, seed=cfg.seed, mesh=run.mesh)
        rows = fresh_batches(run)
        step = train_step_of(run)
        compiles = compiled_twice(step, train_step_of(run), state, rows[0])
        memory = memory_of(cast(OnMesh, step).lower(state, rows[0]).compile())
        batches = itertools.cycle(rows)
        _, state, metrics = time_step(step, state, batches, steps=3)
        alone_s, loop, peak_bytes = [], [], 0
        for number in range(asked.rounds):
            step_s, state, metrics = time_step(step, state, batches, steps=asked.steps)
            alone_s.append(step_s)
            # Of the bare step: what a save or the loop's own batches take comes later.
            peak_bytes = peak_bytes or allocator_peak()
            if number < asked.loop_rounds:
                looped, state = time_loop(run, step, state, steps=asked.steps)
                loop.append(looped)
        loss = float(metrics.loss)
        parts = None
        if asked.profiled:
            parts = break_down(step, state, batches, steps=asked.profiled)
    return Measured(
        device=devices[0].device_kind,
        num_devices=len(devices),
        versions=package_versions(),
        commit=source_commit(),
        config=cfg.name,
        tokens_per_step=cfg.train.batch_size * cfg.train.seq_len,
        steps_per_round=asked.steps,
        step_alone_s=tuple(alone_s),
        loop=tuple(loop),
        compiles=compiles,
        checked=Checked(
            forecast=forecast_of(run.plan),
            steps=asked.rounds * asked.steps,
            step_s=statistics.median(alone_s),
            memory=memory,
            peak_bytes=peak_bytes,
            measured_s={} if parts is None else parts.by_plan,
        ),
        ceiling_flops=ceiling_flops,
        loss=loss,
        breakdown=parts,
        verdicts=judged(run, step, alone_s, loop, parts),
    )


def judged(
    run: Run,
    step: TrainStep,
    alone_s: Sequence[float],
    loop: Sequence[Looped],
    breakdown: Breakdown | None,
) -> tuple[str, ...]:
    """Return what takes the time of a run and should not, a sentence each."""
    outside = [1 - alone / looped.step_s for alone, looped in zip(alone_s, loop, strict=False)]
    state = abstract_train_state(run.frame, run.tx, mesh=run.mesh)
    batch = batch_like(run.cfg, batch_sharding(run.frame, run.mesh))
    traced = cast(OnMesh, step).trace(state, batch)
    slots = optimizer_slots(run.cfg.optimizer, run.table)
    facts = facts_of(
        Subject(run.cfg, run.plan, run.table, slots),
        products=products_in(traced.jaxpr.jaxpr),
        breakdown=breakdown,
        outside_share=statistics.median(outside or [0.0]),
        data_share=statistics.median([one.data_share for one in loop] or [0.0]),
    )
    return tuple(one.text() for one in verdicts(facts))


def break_down(
    step: TrainStep, state: TrainState, batches: Iterator[Batch], *, steps: int
) -> Breakdown:
    """Return where the time of a step goes, on batches that are there."""
    options = PROFILED.get(jax.default_backend())
    compiled = cast(OnMesh, step).lower(state, next(batches)).compile(options)
    held = [state]

    def take() -> TrainState:
        held[0], _ = cast(TrainStep, compiled)(held[0], next(batches))
        return held[0]

    return profiled(take, read_program(compiled.as_text() or ""), steps=steps)


def time_loop(
    run: Run,
    step: TrainStep,
    state: TrainState,
    *,
    steps: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Looped, TrainState]:
    """Return a round of the loop with its share of a save, and the state after."""
    last = int(state.step) + steps
    cfg = run.cfg.model_copy(update={"train": run.cfg.train.model_copy(update={"steps": last})})
    pulse, ledger = Pulse(), TimeLedger(clock=clock)
    saves_began_s: list[float] = []

    def hear(phase: Phase, step: int) -> None:
        ledger.hear(phase, step)
        if phase == "save":
            saves_began_s.append(clock())

    pulse.hears = hear
    with ExitStack() as opened:
        checkpoints = opened.enter_context(CheckpointManager(run.directory.checkpoints, keep=1))
        metrics = opened.enter_context(MetricsWriter(run.directory.metrics))
        done = int(state.step)
        parts = make_parts(run, checkpoints, step=step, first_step=done, opened=opened)
        events = fit(
            cfg, state, parts, stop=never, directory=run.directory, pulse=pulse, clock=clock
        )
        times, began_s = [], clock()
        last_step_s = began_s
        while True:
            try:
                event = next(events)
            except StopIteration as finished:
                # Last of all the loop waits for the disk, which a save with steps behind it does
                # not.
                *_, save_began_s, disk_began_s = saves_began_s
                save_s = disk_began_s - save_began_s
                save_s /= cfg.checkpoint.every or cfg.train.steps
                waited_s = ledger.take().get("data_wait", 0.0)
                share = waited_s / (last_step_s - began_s)
                looped = Looped(statistics.median(times) + save_s, share)
                return looped, finished.value
            if event.kind == "step":
                times.append(cast(float, event.values["step_time_s"]))
                last_step_s = clock()
            if event.kind not in UNRECORDED:
                metrics.write(event.kind, step=event.step, **event.values)


def fresh_batches(run: Run, *, num: int = NUM_BATCHES) -> list[Batch]:
    """Return batches that stay on the devices: the run's own rows with random ids in them.

    Documents lie as in the data, so that attention has the same to do.
    """
    cfg, placed = run.cfg, batch_sharding(run.frame, run.mesh)
    rows = local_rows(placed, cfg.train.batch_size, seq_len=cfg.train.seq_len)
    loader = BinLoader(run.prepared.train, batch_size=cfg.train.batch_size)
    rng = np.random.default_rng((cfg.seed, rows.start))
    found = []
    for number in range(num):
        batch = loader.batch(number, rows=rows)
        ids = rng.integers(0, cfg.model.vocab_size, batch.tokens.shape, np.int32)
        drawn = batch._replace(tokens=ids, targets=np.roll(ids, -1, axis=1))
        found.append(to_devices(drawn, placed, batch_size=cfg.train.batch_size))
    return found


def time_step(
    step: TrainStep, state: TrainState, batches: Iterator[Batch], *, steps: int
) -> tuple[float, TrainState, StepMetrics]:
    """Return seconds a compiled step takes, run back to back, the state after, and its numbers."""
    jax.block_until_ready(state)
    metrics, began_s = None, time.monotonic()
    for _ in range(steps):
        state, metrics = step(state, next(batches))
    jax.block_until_ready(state)
    return (time.monotonic() - began_s) / steps, state, cast(StepMetrics, metrics)
