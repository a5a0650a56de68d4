"""Compiles the step of a run for devices that need not be there, and reads what came of it."""

import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfound.communication.program import read_program
from jaxfound.communication.work import Peaks
from jaxfound.config.layer_formats import check_precision
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import ParallelPlan, build_mesh
from jaxfound.parallelism.mesh import OnMesh
from jaxfound.resources.platform import use_virtual_cpus
from jaxfound.resources.topology import Device, Topology
from jaxfound.training.batches import batch_like, documents_of
from jaxfound.training.buffers import DUMP_FOLDER, DUMP_OPTIONS, largest_buffers
from jaxfound.training.compiled_step import CompiledStep, Memory, Took, compared
from jaxfound.training.compiled_traffic import notes_of, sent_in
from jaxfound.training.compiler_flags import SLOP_DEFAULT, SLOP_FLAG, options_for
from jaxfound.training.events import TrainingError
from jaxfound.training.optimizer import make_optimizer, make_schedule
from jaxfound.training.state import TrainState, abstract_train_state
from jaxfound.training.step import batch_sharding, make_train_step
from pallas_kernels import deviceless, hardware

_SLOP = re.compile(rf"--{SLOP_FLAG}=(\d+)")


@dataclass(frozen=True)
class Target:
    """What a step is compiled for.

    Attributes:
        devices: host by host, as the plan's topology has them.
        kind: of the devices; models choose their kernels by it.
        stand_in: why these are not the devices that were asked for; empty where they are.
        is_here: whether they are this job's own, so that their libraries can be asked.
    """

    devices: Sequence[Device]
    kind: str
    stand_in: str = ""
    is_here: bool = False

    @property
    def text(self) -> str:
        """What it is, for a reader."""
        if self.kind == hardware.CPU.kind:
            return f"{len(self.devices)} CPU devices"
        hosts = len({d.process_index for d in self.devices})
        return f"{len(self.devices)} {self.kind} of {hosts} host{'s' if hosts > 1 else ''}"


def target_here() -> Target:
    """Return the devices of this job; starts the backend."""
    devices = jax.devices()
    return Target(devices, devices[0].device_kind, is_here=True)


def target_of(topology: Topology) -> Target:
    """Return what to compile for where the devices of a topology are not here.

    Virtual CPU devices stand in for a GPU where the compiler for GPUs is not installed; where a
    backend runs already with fewer CPU devices than are needed, that is refused.

    Raises:
        TrainingError: if devices of that kind can be neither described nor replaced.
    """
    row = hardware.find(topology.device_kind)
    missing = deviceless.missing()
    if row.platform == "cuda" and missing is None:
        try:
            devices = deviceless.topology(
                row.kind, hosts=topology.hosts, devices_per_host=topology.devices_per_host
            )
        except deviceless.DevicelessError as error:
            raise TrainingError(str(error)) from error
        return Target(devices, row.kind)
    if row.platform not in ("cuda", "cpu"):
        raise TrainingError(
            f"cannot compile for {topology.device_kind} without one: kinds that can be described "
            f"to a compiler are {', '.join(deviceless.kinds())}, and cpu"
        )
    return Target(virtual_cpus(topology.num_devices), hardware.CPU.kind, missing_text(row, missing))


def missing_text(row: hardware.Hardware, missing: str | None) -> str:
    """Return why CPU devices stand in for a kind; empty where they are what was asked for."""
    if row.platform == "cpu":
        return ""
    return (
        f"compiled for virtual CPU devices in place of {row.kind}, because {missing}: collectives "
        "and buffers are another compiler's, nothing runs beside a collective, and kernels of the "
        "GPU are left out"
    )


def virtual_cpus(num_devices: int) -> Sequence[Device]:
    """Return so many CPU devices, the first time any are asked for.

    Raises:
        TrainingError: if a backend runs already and has fewer.
    """
    # Refused where a backend runs already, with the devices that it was given.
    with suppress(RuntimeError):
        use_virtual_cpus(num_devices)
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise TrainingError(
            f"{num_devices} CPU devices are needed, but JAX has started with {len(devices)}. Start "
            f"with JAX_NUM_CPU_DEVICES={num_devices} and NPROC={4 * num_devices} in the environment"
        )
    return devices[:num_devices]


def compile_step(
    cfg: RunConfig, plan: ParallelPlan, *, target: Target | None = None
) -> CompiledStep:
    """Compile the training step of a run in the layout of its plan, and return what came of it.

    It is the step that `train` runs; no parameter is made, no data is read, no device is needed.

    Args:
        cfg: the run.
        plan: of that run on the topology to compile for.
        target: the devices; what `target_of` the plan's topology returns by default.

    Raises:
        TrainingError: if the plan has no topology, or one that cannot be compiled for.
        ConfigError: if a precision rule matches nothing.
    """
    if plan.topology is None:
        raise TrainingError("a plan of degrees alone is for no device: make it for a topology")
    target = target_of(plan.topology) if target is None else target
    mesh = build_mesh(plan, devices=target.devices)
    with tempfile.TemporaryDirectory() as folder:
        text, memory, took = compiled_text(cfg, plan, mesh, target=target, folder=Path(folder))
        program = read_program(text)
        buffers = largest_buffers(Path(folder), program)
    row, capacity_bytes = hardware.find(target.kind), plan.ledger.capacity_bytes
    traced = sent_in(program, plan, host_of=hosts_of(mesh, plan, target), peaks=peaks_of(row))
    chosen = options_for(plan, target.kind).get(SLOP_FLAG)
    slop = int(chosen or slop_percent()) if row.platform == "cuda" else None
    notes = notes_of(traced, memory, capacity_bytes=capacity_bytes, slop_percent=slop)
    return CompiledStep(
        target=target.text,
        stand_in=target.stand_in,
        memory=memory,
        planned=compared(plan.ledger, memory, on_devices=target.is_here),
        capacity_bytes=capacity_bytes,
        margin_bytes=plan.ledger.of("margin"),
        workspace_bytes=0 if target.is_here else plan.ledger.of("workspace"),
        sent=traced.sent,
        buffers=buffers,
        work_s=traced.work_s,
        waited_s=traced.waited_s,
        took=took,
        notes=tuple(notes),
    )


def hosts_of(mesh: Mesh, plan: ParallelPlan, target: Target) -> list[int]:
    """Return the host of each of the program's devices, which it numbers as the mesh has them."""
    each = plan.topology.devices_per_host if plan.topology is not None else len(target.devices)
    place = {device: i for i, device in enumerate(target.devices)}
    return [place[device] // each for device in mesh.devices.flat]


def compiled_text(
    cfg: RunConfig, plan: ParallelPlan, mesh: Mesh, *, target: Target, folder: Path
) -> tuple[str, Memory, Took]:
    """Compile the step and return its program's text, its memory and the seconds it took.

    Args:
        cfg: the run.
        plan: its layout.
        mesh: of the target's devices.
        target: what is compiled for.
        folder: where the compiler writes what it has to say of buffers.

    Raises:
        TrainingError: if the compiler makes no program of it; with its first words.
    """
    step, state, batch = abstract_step(cfg, plan, mesh)
    began_s, cpu_s = time.perf_counter(), _cpu_seconds()
    with hardware.target(target.kind), deviceless.without_cache(), jax.set_mesh(mesh):
        traced = step.trace(state, batch)
        traced_s = time.perf_counter()
        lowered = traced.lower()
        lowered_s = time.perf_counter()
        try:
            compiled = lowered.compile({DUMP_FOLDER: str(folder), **DUMP_OPTIONS})
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            raise TrainingError(f"no program for {target.text}: {said}") from error
    took = Took(
        trace_s=traced_s - began_s,
        lower_s=lowered_s - traced_s,
        compile_s=time.perf_counter() - lowered_s,
        cpu_s=_cpu_seconds() - cpu_s,
    )
    return compiled.as_text() or "", memory_of(compiled), took


def abstract_step(
    cfg: RunConfig, plan: ParallelPlan, mesh: Mesh
) -> tuple[OnMesh[[TrainState, Batch], Any], TrainState, Batch]:
    """Return the jitted step of a run and its arguments as shapes with shardings.

    Of data that is not there yet it expects rows whose documents all have places in attention.
    """
    table = describe(cfg.model)
    check_precision(cfg.precision, table)
    execution = execution_of(plan, cfg.precision, documents=documents_of(cfg, most_pieces=1))
    frame = Frame(cfg.model, execution=execution)
    tx = make_optimizer(cfg.optimizer, table, rules=plan.rules)
    options = options_for(plan, mesh.devices.flat[0].device_kind)
    step = make_train_step(cfg, frame, tx, schedule=make_schedule(cfg), mesh=mesh, options=options)
    batch = batch_like(cfg, batch_sharding(frame, mesh))
    return step, abstract_train_state(frame, tx, mesh=mesh), batch


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """Return the compiler's bytes of one device.

    Raises:
        TrainingError: if it does not tell them.
    """
    found = compiled.memory_analysis()
    if found is None:
        raise TrainingError("the compiler for these devices does not say how much memory it uses")
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        peak=found.peak_memory_in_bytes,
    )


def peaks_of(row: hardware.Hardware) -> Peaks | None:
    """Return what a device does at most; None where no figures are published, as for a CPU."""
    if row.platform == "cpu" or not row.peak_flops:
        return None
    return Peaks(
        flops={str(name): flops for name, flops in row.peak_flops.items()},
        memory_bps=row.memory_bps,
    )


def slop_percent() -> int:
    """Return the share of the memory that XLA's GPU scheduler uses, as XLA_FLAGS has it."""
    found = _SLOP.findall(os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else SLOP_DEFAULT


def _cpu_seconds() -> float:
    """Return the seconds that all cores have spent for this process and those it has waited for."""
    return sum(os.times()[:4])
