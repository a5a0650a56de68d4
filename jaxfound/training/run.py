"""A training run from its config: plan, mesh, data, model, state, loop."""

import json
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import jax
import optax
from jax.sharding import Mesh

from jaxfound.config.layer_formats import check_precision
from jaxfound.config.load import save as save_config
from jaxfound.config.params import ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.data import BinLoader, Prepared, load_tokenizer
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.parallelism import ParallelPlan, build_mesh, make_plan
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.control import ControlPlane
from jaxfound.resources.launch.place import Place
from jaxfound.resources.metrics import RESUME, MetricsWriter
from jaxfound.resources.preflight import check_host
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.topology import Device, Topology
from jaxfound.training.batches import (
    batch_like,
    execution_for,
    local_rows,
    packed_rows,
    to_devices,
)
from jaxfound.training.checkpoints import open_checkpoints
from jaxfound.training.compiler_flags import options_for
from jaxfound.training.continues import check_continues
from jaxfound.training.demote import make_demote, with_demoted
from jaxfound.training.evaluate import EvalResult, make_evaluate
from jaxfound.training.events import UNRECORDED, Event, TrainingError
from jaxfound.training.forecast import make_check, with_check
from jaxfound.training.job import Job, Paces, meet, open_job, prepare_once
from jaxfound.training.loop import Parts, Stop, fit
from jaxfound.training.optimizer import make_optimizer, make_schedule, optimizer_slots
from jaxfound.training.saved import SavedForm
from jaxfound.training.starts import check_rows, is_done, record_start
from jaxfound.training.state import TrainState, create_train_state
from jaxfound.training.step import TrainStep, batch_sharding, make_train_step
from jaxfound.training.time_ledger import TimeLedger, TimeLedgerFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is ready to start: everything decided, no parameter made yet."""

    cfg: RunConfig
    directory: RunDirectory
    table: ParamTable
    plan: ParallelPlan
    mesh: Mesh
    frame: Frame
    tx: optax.GradientTransformation
    prepared: Prepared

    @cached_property
    def saved(self) -> SavedForm:
        """How the state is kept in checkpoints."""
        return SavedForm(self.frame, self.tx, mesh=self.mesh)

    def demoted(self, patterns: Sequence[str]) -> "Run":
        """Return the run with these operations in the compute format; nothing stored changes."""
        if not patterns:
            return self
        precision = with_demoted(self.cfg.precision, patterns)
        cfg = self.cfg.model_copy(update={"precision": precision})
        execution = replace(self.frame.execution, precision=precision)
        return replace(self, cfg=cfg, frame=Frame(cfg.model, execution=execution))

    def explain(self) -> str:
        """Return what the run will do, a line each."""
        cfg, data = self.cfg, self.prepared.manifest
        tokens = cfg.train.batch_size * cfg.train.seq_len
        return "\n".join(
            [
                f"run {self.directory.path}: {cfg.train.steps} steps of {cfg.train.batch_size} "
                f"rows x {cfg.train.seq_len} tokens = {cfg.train.steps * tokens:,} tokens",
                f"model: {self.table.size:,} parameters, {cfg.model.mixer} + {cfg.model.ffn}",
                f"data: {cfg.data.source}, {data.train.tokens:,} tokens to train on",
                f"compute in {cfg.precision.compute}",
                self.plan.explain(),
            ]
        )


def run_directory(cfg: RunConfig) -> RunDirectory:
    """Return the folder of this run."""
    return RunDirectory(Path(cfg.runs_dir) / cfg.name)


def start(
    cfg: RunConfig, *, devices: Sequence[Device] | None = None, plane: ControlPlane | None = None
) -> Run:
    """Check everything that can be known before the first compile.

    Args:
        cfg: the run.
        devices: to train on; every device of the job by default.
        plane: the processes that start together; those of the job by default.

    Raises:
        ConfigError, PlanError, DataError, TrainingError: what cannot work, in that order.
    """
    plane = ControlPlane.of_job() if plane is None else plane
    directory = run_directory(cfg)
    table = describe(cfg.model)
    devices = jax.devices() if devices is None else devices
    check_virtual(cfg, platform=devices[0].platform)
    check_precision(cfg.precision, table)
    slots = optimizer_slots(cfg.optimizer, table)
    planned = partial(make_plan, cfg, Topology.of(devices), params=table, optimizer_slots=slots)
    # A layout that cannot work is refused before any text is read.
    planned()
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer={cfg.data.tokenizer} has {tokenizer.vocab_size} ids, but "
            f"model.vocab_size={cfg.model.vocab_size}. Set model.vocab_size={tokenizer.vocab_size}"
        )
    # Parameters and two moments in float32, once more than is kept while one is being written.
    needed_bytes = 3 * 4 * table.size * (cfg.checkpoint.keep + 1)
    for check in check_host(directory.path, needed_bytes=needed_bytes):
        if not check.ok:
            raise TrainingError(check.text())
    prepared = prepare_once(plane, cfg, tokenizer)
    held_out = () if prepared.eval is None else (prepared.eval,)
    fullest = max(split.most_pieces for split in (prepared.train, *held_out))
    # Again, now that the rows are known.
    plan = planned(packed=packed_rows(cfg, most_pieces=fullest))
    execution = execution_for(plan, cfg, most_pieces=fullest)
    return Run(
        cfg=cfg,
        directory=directory,
        table=table,
        plan=plan,
        mesh=build_mesh(plan, devices=devices),
        frame=Frame(cfg.model, execution=execution),
        tx=make_optimizer(cfg.optimizer, table, rules=plan.rules),
        prepared=prepared,
    )


def check_virtual(cfg: RunConfig, *, platform: str) -> None:
    """Refuse what virtual CPU devices cannot run for long.

    With jaxlib 0.11.2 a step whose stages split both experts and tensor broke the heap or hung
    within some ten steps on CPU; with one core, or with any two of the three axes, it did not.

    Raises:
        TrainingError: names the three axes.
    """
    asked = cfg.parallel
    if platform == "cpu" and min(asked.pipeline, asked.expert, asked.tensor) > 1:
        raise TrainingError(
            f"pipeline={asked.pipeline} x expert={asked.expert} x tensor={asked.tensor} on CPU "
            "devices: jaxlib mixes up messages of this combination after some steps. "
            "`jaxfound verify` can check it, a step at a time; to train on CPU, set "
            "parallel.tensor=1 or parallel.expert=1"
        )


def train(
    cfg: RunConfig,
    *,
    stop: Stop | None = None,
    devices: Sequence[Device] | None = None,
    place: Place | None = None,
) -> Iterator[Event]:
    """Train as `cfg` says, from the newest checkpoint of its run if there is one.

    Every process of a job calls it and is given the same events; process 0 keeps them.

    Args:
        cfg: the run.
        devices: to train on; every device of the job by default.
        stop: who may end it early; the signals SIGINT and SIGTERM at any process by default.
        place: where an agent put this process, which is then told how far it is.

    Raises:
        ConfigError, PlanError, DataError, TrainingError, CheckpointError: see their messages.
        PeerError: another process of the job is lost.
    """
    with open_job(cfg, run_directory(cfg), place=place, stop=stop) as job:
        for event in trained(cfg, job, devices=devices):
            if event.kind in ("checkpoint", "resume"):
                job.pulse.committed = max(job.pulse.committed, event.step)
            yield event


def trained(
    cfg: RunConfig, job: Job, *, devices: Sequence[Device] | None
) -> Generator[Event, None, None]:
    """Yield the events of a run in `job`; process 0 records them."""
    ledger = TimeLedger()
    job.pulse.hears = ledger.hear
    if job.plane.is_first:
        check_continues(cfg, run_directory(cfg).config)
    meet(job.plane)
    run = start(cfg, devices=devices, plane=job.plane)
    yield Event("plan", 0, {"text": run.explain()})
    with ExitStack() as opened:
        checkpoints = opened.enter_context(
            open_checkpoints(
                cfg.checkpoint,
                run.directory.checkpoints,
                mesh=run.mesh,
                plane=job.plane,
            )
        )
        if is_done(cfg, checkpoints):
            yield Event("finished", cfg.train.steps, {"again": True})
            return
        check_rows(run.directory, run.prepared.manifest, saved=checkpoints.latest())
        job.pulse.enter("restore")
        state = restore(run, checkpoints)
        left_fp8 = () if state is None else demoted_before(cfg, checkpoints, step=int(state.step))
        run = run.demoted(left_fp8)
        events = told(run, state, checkpoints, opened=opened, job=job, left_fp8=left_fp8)
        if not job.plane.is_first:
            yield from events
            return
        first_step = 0 if state is None else int(state.step)
        spent = opened.enter_context(
            TimeLedgerFile(run.directory.goodput, ledger, first_step=first_step)
        )
        metrics = opened.enter_context(MetricsWriter(run.directory.metrics))
        if state is None and run.directory.metrics.stat().st_size:
            # An earlier attempt ended before it had saved: its steps are taken again.
            metrics.write(RESUME, step=0, steps=cfg.train.steps)
        # Saved before the first step, so that a stopped run can always be read back.
        save_config(run.cfg, run.directory.config)
        record_start(run.directory, run.prepared.manifest, run.mesh, first_step=first_step)
        for event in events:
            if event.kind == "planned":
                run.directory.planned.write_text(json.dumps(event.values, indent=1) + "\n", "utf-8")
            if event.kind == "demoted":
                run = run.demoted(cast(list[str], event.values["patterns"]))
                save_config(run.cfg, run.directory.config)
            if event.kind not in UNRECORDED:
                metrics.write(event.kind, step=event.step, **event.values)
                spent.write()
            yield event


def told(
    run: Run,
    state: TrainState | None,
    checkpoints: CheckpointManager,
    *,
    opened: ExitStack,
    job: Job,
    left_fp8: tuple[str, ...] = (),
) -> Iterator[Event]:
    """Yield the events of the run from `state`, or from fresh weights when it is None.

    Args:
        left_fp8: patterns of what has left fp8 before; the run has them in its rules already.
    """
    cfg = run.cfg
    job.pulse.enter("compile", step=0 if state is None else int(state.step))
    if state is None:
        state = first_state(run)
    else:
        yield Event("resume", int(state.step), {"steps": cfg.train.steps})
    checkpoints.warm(run.saved.natural(state)._asdict())
    step = train_step_of(run)
    parts = make_parts(run, checkpoints, step=step, first_step=int(state.step), opened=opened)
    paces = Paces(job, every=cfg.watch.straggler_every)
    parts = demoting(run, parts._replace(stragglers=paces, demoted=left_fp8))
    batch = batch_like(cfg, batch_sharding(run.frame, run.mesh))
    check = make_check(run.plan, step, state, batch)
    events = fit(cfg, state, parts, stop=job.stop, directory=run.directory, pulse=job.pulse)
    yield from with_check(events, check=check, last_step=cfg.train.steps)


def first_state(run: Run) -> TrainState:
    """Return the state of step 0: fresh, or with the weights of the run in train.init_from.

    Raises:
        CheckpointError: if that run has no intact checkpoint, or holds another model.
    """
    # Read before anything is compiled: what cannot be read is refused at once.
    weights = starting_weights(run) if run.cfg.train.init_from else {}
    state = create_train_state(run.frame, run.tx, seed=run.cfg.seed, mesh=run.mesh)
    return state._replace(**weights)


def starting_weights(run: Run) -> dict:
    """Return `params` and `buffers` of the run in train.init_from, on this run's mesh."""
    source = RunDirectory(Path(run.cfg.train.init_from)).checkpoints
    with CheckpointManager(source, keep=0) as checkpoints:
        found = checkpoints.restore_weights(None, like=run.saved.weights_like)
    return run.saved.stored_weights(Arrays(**cast(dict, found.state)))._asdict()


def make_parts(
    run: Run,
    checkpoints: CheckpointManager,
    *,
    step: TrainStep,
    first_step: int,
    opened: ExitStack,
) -> Parts:
    """Return what the loop drives; the batch stream is closed when `opened` is."""
    cfg = run.cfg
    placed = batch_sharding(run.frame, run.mesh)
    rows = own_rows(run)
    loader = BinLoader(
        run.prepared.train, batch_size=cfg.train.batch_size, seed=cfg.seed, order=cfg.data.order
    )
    stream = opened.enter_context(
        loader.batches(
            first_step, num_prefetch=cfg.data.num_prefetch, rows=rows, engine=cfg.data.loader
        )
    )
    put = partial(to_devices, sharding=placed, batch_size=cfg.train.batch_size)
    return Parts(
        step=step,
        batches=(put(batch) for batch in stream),
        evaluate=make_held_out(run, rows=rows),
        checkpoints=checkpoints,
        to_saved=run.saved.natural,
        host_batch=lambda step: loader.batch(step, rows=rows),
    )


def demoting(run: Run, parts: Parts) -> Parts:
    """Return the parts with the way in which layers leave fp8, where the config asks for one."""

    def rebuilt(patterns: Sequence[str]) -> Parts:
        new, held_out = run.demoted(patterns), parts.evaluate
        if held_out is not None:
            held_out = make_held_out(new, rows=own_rows(new))
        left = (*patterns, *parts.demoted)
        return demoting(
            new, parts._replace(step=train_step_of(new), evaluate=held_out, demoted=left)
        )

    demote = make_demote(run.frame, parts, cfg=run.cfg, mesh=run.mesh, rebuilt=rebuilt)
    return parts._replace(demote=demote)


def own_rows(run: Run) -> slice:
    """Return which rows of a batch this process reads."""
    placed, train = batch_sharding(run.frame, run.mesh), run.cfg.train
    return local_rows(placed, train.batch_size, seq_len=train.seq_len)


def demoted_before(cfg: RunConfig, checkpoints: CheckpointManager, *, step: int) -> tuple[str, ...]:
    """Return patterns of what had left fp8 at a saved step, where train.non_finite asks for it."""
    if cfg.train.non_finite != "demote":
        return ()
    return tuple(cast(list[str], checkpoints.metadata(step).get("demoted", [])))


def train_step_of(run: Run) -> TrainStep:
    """Return the compiled step of a run."""
    schedule = make_schedule(run.cfg)
    options = options_for(run.plan, run.mesh.devices.flat[0].device_kind)
    return make_train_step(
        run.cfg, run.frame, run.tx, schedule=schedule, mesh=run.mesh, options=options
    )


def make_held_out(run: Run, *, rows: slice) -> Callable[[TrainState], EvalResult] | None:
    """Return the evaluation of a state on the run's held-out bins, None without any."""
    bins, num = run.prepared.eval, run.cfg.train.eval_batches
    if bins is None or num == 0:
        return None
    loader = BinLoader(bins, batch_size=run.cfg.train.batch_size)
    evaluate = make_evaluate(run.cfg, run.frame, mesh=run.mesh)
    return lambda state: evaluate(state, loader.eval_batches(num, rows=rows))


def restore(run: Run, checkpoints: CheckpointManager) -> TrainState | None:
    """Return the newest intact state of the run on its mesh, None when nothing was saved."""
    found = checkpoints.restore_latest(like=run.saved.like._asdict())
    if found is None:
        return None
    log.info("run.resumed", extra={"step": found.step, "devices": jax.device_count()})
    return run.saved.stored(TrainState(**cast(dict, found.state)))
