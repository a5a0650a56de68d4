"""How fast pipeline schedules train here, beside one stage's layers without a pipeline."""

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from jaxfound.config.load import parse
from jaxfound.config.parallel import AXES
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import ParallelPlan, build_mesh, make_plan
from jaxfound.parallelism.legal import STAGED_ZERO, PlanError
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.parallelism.pipeline.facts import RECOMPUTED
from jaxfound.parallelism.pipeline.schedule import ScheduleError
from jaxfound.parallelism.pipeline.ticks import lockstep
from jaxfound.resources.topology import Device, Topology
from jaxfound.training.aot import abstract_step, memory_of
from jaxfound.training.batches import documents_of
from jaxfound.training.compiled_step import compared
from jaxfound.training.events import TrainingError
from jaxfound.training.optimizer import make_optimizer, optimizer_slots
from jaxfound.training.pipeline_record import DROPPED, Candidate, Row, Timed, expected
from jaxfound.training.state import create_train_state
from jaxfound.training.step import TrainStep, batch_sharding
from pallas_kernels import deviceless

# Steps whose loss and norm are written down.
NUM_LOSSES = 3
# Above what the order of sums does to a loss in bfloat16, and below what a missing part does.
FIRST_LOSS_LIMIT = 1e-3


def measure_pipeline(
    cfg: RunConfig,
    *,
    schedules: Sequence[str] = (),
    rounds: int,
    devices: Sequence[Device] | None = None,
) -> Iterator[Row]:
    """Yield the figures of a stage alone, of every schedule and of fsdp, each when it is known.

    What a plan refuses, or what the devices have no memory for, is a row with a note. Nothing of a
    candidate is on the devices when its row is yielded.

    Args:
        cfg: a run with stages; its data is not read.
        schedules: names, all by default.
        rounds: timed steps of each.
        devices: as many as the degrees multiply to, or more; all there are by default.

    Raises:
        TrainingError: if there is no pipeline to time, too few devices, or two layouts of the
            same model start with different losses.
        PlanError: if the stage alone is not legal.
    """
    devices = jax.devices() if devices is None else devices
    found, alone_ms = candidates(cfg, schedules, num_devices=len(devices)), None
    first: Row | None = None
    for candidate in found:
        row = measured(
            candidate, devices[: candidate.num_devices], rounds=rounds, alone_ms=alone_ms
        )
        # What was traced holds itself in circles, and with it what it closed over.
        gc.collect()
        yield row
        if row.timed is None:
            continue
        if candidate.kind == "alone":
            alone_ms = row.timed.median_ms
            continue
        first = first or row
        check_first_losses(first, row)


def candidates(cfg: RunConfig, schedules: Sequence[str], *, num_devices: int) -> list[Candidate]:
    """Return what is timed, in order: the stage alone, schedules, fsdp in place of stages.

    Raises:
        TrainingError: if there is no pipeline, a schedule of no such name, layers that the ranks
            do not divide, or too few devices.
        ConfigError: if the keys of one do not go together.
    """
    asked, model = cfg.parallel, cfg.model
    ranks, pieces = asked.pipeline, asked.num_microbatches
    others = math.prod(getattr(asked, axis) for axis in AXES if axis != "data")
    data = max(num_devices // others, 1) if asked.data == "auto" else asked.data
    reason = why_not(cfg, schedules, needed=data * others, num_devices=num_devices)
    if reason is not None:
        raise TrainingError(reason)
    same = {"parallel.data": data, "optimizer.warmup_steps": 0}
    main = model.num_layers - model.num_leading_layers
    alone = {
        "parallel.pipeline": 1,
        "parallel.zero_stage": min(asked.zero_stage, STAGED_ZERO),
        "model.num_layers": model.num_leading_layers + main // ranks,
    }
    fsdp = {
        "parallel.pipeline": 1,
        "parallel.fsdp": asked.fsdp * ranks,
        "parallel.zero_stage": 3,
        # Micro-batches of as many rows on each device.
        "parallel.num_microbatches": pieces if pieces % ranks else pieces // ranks,
    }
    found = [Candidate("alone", "alone", changed(cfg, same | alone), data * others // ranks)]
    for name in schedules or SCHEDULES:
        run = changed(cfg, same | {"parallel.schedule": name})
        found.append(Candidate(name, "schedule", run, data * others))
    run = changed(cfg, same | fsdp)
    return [*found, Candidate(f"fsdp={run.parallel.fsdp}", "fsdp", run, data * others)]


def why_not(
    cfg: RunConfig, schedules: Sequence[str], *, needed: int, num_devices: int
) -> str | None:
    """Return why there is nothing to time, with the way out; None if there is."""
    ranks = cfg.parallel.pipeline
    main = cfg.model.num_layers - cfg.model.num_leading_layers
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        return f"no schedule is called {unknown[0]!r}; use some of {', '.join(SCHEDULES)}"
    if ranks < 2:
        return f"parallel.pipeline={ranks} has no stages to time; set it to 2 or more"
    if main % ranks:
        return (
            f"{main} layers of the main stack are no multiple of parallel.pipeline={ranks}: none "
            f"can be timed alone with a stage's share. Use model.num_layers="
            f"{cfg.model.num_layers + ranks - main % ranks}"
        )
    if needed > num_devices:
        return (
            f"the degrees multiply to {needed}, but there are {num_devices} devices. Use smaller "
            "degrees, or more devices"
        )
    return None


def changed(cfg: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Return a run with some keys' values in place of its own.

    Raises:
        ConfigError: if they do not go together.
    """
    # What nobody has set stays unset: a plan chooses some of it.
    there = cfg.model_dump(mode="json", exclude_unset=True)
    return parse(there, [f"{key}={value}" for key, value in values.items()])


def measured(
    candidate: Candidate, devices: Sequence[Device], *, rounds: int, alone_ms: float | None
) -> Row:
    """Return the row of a candidate; only the stage alone must be legal.

    Raises:
        PlanError: if it is not.
    """
    table = describe(candidate.cfg.model)
    slots = optimizer_slots(candidate.cfg.optimizer, table)
    try:
        plan = make_plan(candidate.cfg, Topology.of(devices), params=table, optimizer_slots=slots)
    except (PlanError, ScheduleError) as error:
        if candidate.kind == "alone":
            raise
        return Row(candidate, None, f"refused: {error}")
    try:
        timed = timed_steps(candidate.cfg, plan, devices, rounds=rounds)
    except jax.errors.JaxRuntimeError as error:
        # Its traceback holds the arrays: only its words are kept.
        return Row(candidate, None, f"failed: {str(error).partition('\n')[0]}")
    of_schedule = plan.pipeline if candidate.kind == "schedule" else None
    return Row(
        candidate,
        timed,
        efficiency=None if alone_ms is None else alone_ms / timed.median_ms,
        bound=None
        if of_schedule is None
        else lockstep(of_schedule.schedule, RECOMPUTED).efficiency,
        expected=None if of_schedule is None else expected(of_schedule, remat=plan.remat),
    )


def timed_steps(
    cfg: RunConfig, plan: ParallelPlan, devices: Sequence[Device], *, rounds: int
) -> Timed:
    """Compile the step of a run, take `DROPPED` steps and then the timed ones on one batch."""
    mesh, table = build_mesh(plan, devices=devices), describe(cfg.model)
    began_s = time.perf_counter()
    # Without a state on the devices the compiler has room for what it tries there.
    with deviceless.without_cache():
        step, state_like, batch_like = abstract_step(cfg, plan, mesh)
        compiled = step.lower(state_like, batch_like).compile()
    compile_s = time.perf_counter() - began_s
    execution = execution_of(plan, cfg.precision, documents=documents_of(cfg, most_pieces=1))
    frame = Frame(cfg.model, execution=execution)
    tx = make_optimizer(cfg.optimizer, table, rules=plan.rules)
    state = create_train_state(frame, tx, seed=cfg.seed, mesh=mesh)
    batch = jax.device_put(random_tokens(cfg), batch_sharding(frame, mesh))
    jax.block_until_ready((state, batch))
    seconds, found = [], []
    for _ in range(DROPPED + rounds):
        began_s = time.perf_counter()
        state, metrics = jax.block_until_ready(cast(TrainStep, compiled)(state, batch))
        seconds.append(time.perf_counter() - began_s)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    losses, grad_norms = zip(*found[:NUM_LOSSES], strict=True)
    memory = memory_of(compiled)
    return Timed(
        compile_s=compile_s,
        rounds_ms=tuple(1e3 * took for took in seconds[DROPPED:]),
        losses=losses,
        grad_norms=grad_norms,
        memory=memory,
        planned=compared(plan.ledger, memory, on_devices=True),
        ledger={entry.kind: entry.num_bytes for entry in plan.ledger.entries},
        remat=plan.remat,
    )


def random_tokens(cfg: RunConfig) -> Batch:
    """Return rows [B T] of random tokens, each row one document."""
    rows, length = cfg.train.batch_size, cfg.train.seq_len
    rng = np.random.default_rng(cfg.seed)
    tokens = rng.integers(0, cfg.model.vocab_size, (rows, length + 1), dtype=np.int32)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        segment_ids=np.ones((rows, length), np.int32),
        loss_mask=np.ones((rows, length), np.bool_),
    )


def check_first_losses(first: Row, row: Row) -> None:
    """Refuse two layouts of one model that differ in what they compute before any update.

    Raises:
        TrainingError: if their first losses differ by more than `FIRST_LOSS_LIMIT`, or are no
            numbers.
    """
    if first.timed is None or row.timed is None:
        return
    a, b = first.timed.losses[0], row.timed.losses[0]
    if abs(a - b) <= FIRST_LOSS_LIMIT * abs(a):
        return
    raise TrainingError(
        f"the first loss is {b:.6f} with {row.candidate.name} and {a:.6f} with "
        f"{first.candidate.name}: they compute different things, so that their times say nothing. "
        "Run `jaxfound verify` with these degrees and schedules"
    )


def devices_text() -> str:
    """Return how many devices of which kind there are."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
