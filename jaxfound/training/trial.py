"""A small model in one layout: its gradients, its update and the program that made them."""

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfound.communication import Collective, axes_crossed, collectives
from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.parallelism import ParallelPlan, build_mesh, make_plan
from jaxfound.parallelism.mesh import jit_on_mesh
from jaxfound.resources.topology import Device
from jaxfound.training.batches import execution_for
from jaxfound.training.objective import Terms, token_counts
from jaxfound.training.optimizer import make_optimizer, optimizer_slots
from jaxfound.training.shrink import Degrees, as_it_is, shrunk
from jaxfound.training.state import TrainState, state_shardings
from jaxfound.training.step import (
    batch_sharding,
    beside_moments,
    global_norm,
    gradients,
    updated,
)

# XLA says so on stderr when it found no way from one placement to another but through one device.
REMATERIALIZED = "Involuntary full rematerialization"
# Half the compile time on a CPU; which collectives there are stays.
FAST_TO_COMPILE = {"cpu": {"xla_backend_optimization_level": 0}}

# Keys of a config's `parallel` section: degrees of axes, and the other choices there.
type Parallel = Mapping[str, int | str]


def degree_of(parallel: Parallel, axis: AxisName) -> int:
    """Return the devices along an axis; 1 where it is not named."""
    return int(parallel.get(axis, 1))


@dataclass(frozen=True)
class Outcome:
    """What one layout computed, on the host, and its program.

    Attributes:
        loss: next-token loss, nats a token.
        norm: global norm of the gradients.
        grads: by the parameter's path.
        expert_counts: tokens each expert got, by the router's path.
        found: collectives of the program that cross a wire, with the axes each crosses.
        state_bytes: parameters and optimizer state on the first device.
        warnings: what the compiler said of placements it could not reach.
    """

    plan: ParallelPlan
    loss: float
    norm: float
    grads: dict[str, np.ndarray]
    expert_counts: dict[str, np.ndarray]
    found: tuple[tuple[Collective, tuple[AxisName, ...]], ...]
    state_bytes: int
    warnings: tuple[str, ...]


class Trial:
    """A model with weights and a batch, ready to run in any layout of its run."""

    def __init__(
        self,
        cfg: RunConfig,
        degrees: Degrees,
        *,
        main_layers: int | None = None,
        whole: bool = False,
    ) -> None:
        """Make a run's model small, or take it as it is.

        Args:
            cfg: the run.
            degrees: of the axes whose sizes are to divide as the model's do.
            main_layers: layers of the main stack, in place of as few as those degrees allow.
            whole: leave sizes and formats as they are, with weights as training begins.
        """
        self.cfg = as_it_is(cfg, degrees) if whole else shrunk(cfg, degrees)
        if main_layers is not None:
            num_layers = main_layers + self.cfg.model.num_leading_layers
            changed = self.cfg.model.model_copy(update={"num_layers": num_layers})
            self.cfg = self.cfg.model_copy(update={"model": changed})
        self.table = describe(self.cfg.model)
        self.batch = documents(self.cfg)
        frame = Frame(self.cfg.model)
        self.arrays = fresh_weights(frame) if whole else weights_of(frame)

    def place(self, parallel: Parallel, devices: Sequence[Device]) -> "Placed":
        """Return the model and its state in a layout.

        Args:
            parallel: degrees of the axes, 1 where none is named; other keys of the config's section
                (`zero_stage`, `num_microbatches`) in place of its own.
            devices: as many as the degrees multiply to, or more.
        """
        values = self.cfg.model_dump()
        values["parallel"] |= {**dict.fromkeys(AXES, 1), **parallel}
        cfg = RunConfig.model_validate(values, strict=False)
        num_devices = math.prod(degree_of(parallel, axis) for axis in AXES)
        slots = optimizer_slots(cfg.optimizer, self.table)
        plan = make_plan(cfg, num_devices, params=self.table, optimizer_slots=slots)
        mesh = build_mesh(plan, devices=devices[:num_devices])
        fullest = int(np.max(self.batch.segment_ids))
        execution = execution_for(plan, cfg, most_pieces=fullest)
        frame = Frame(cfg.model, execution=execution)
        tx = make_optimizer(cfg.optimizer, self.table, rules=frame.execution.rules)
        places = state_shardings(frame, tx, mesh=mesh)
        arrays = Arrays(*(jax.tree.map(np.asarray, frame.stored(g)) for g in self.arrays))
        state = TrainState(np.int32(0), *arrays, tx.init(arrays.params), np.zeros(2, np.uint32))
        batch = jax.device_put(self.batch, batch_sharding(frame, mesh))
        return Placed(cfg, plan, frame, tx, jax.device_put(state, places), batch)

    def run(self, parallel: Parallel, devices: Sequence[Device]) -> Outcome:
        """Return loss and gradients of the batch in a layout, and what its program does."""
        placed = self.place(parallel, devices)

        def step(state: TrainState, batch: Batch) -> tuple[jax.Array, dict, dict]:
            with jax.sharding.use_abstract_mesh(placed.mesh.abstract_mesh):
                counts = token_counts(batch, num_depths=placed.cfg.model.mtp_depth)
                grads, terms = gradients(
                    state, batch, frame=placed.frame, cfg=placed.cfg, counts=counts
                )
                _, grads = beside_moments(state, grads, frame=placed.frame)
                natural = placed.frame.natural
                return terms.nats / counts.targets, natural(grads), natural(terms.expert_counts)

        with stderr_of_compiler() as said:
            lowered = jit_on_mesh(step, placed.mesh).lower(placed.state, placed.batch)
            compiled = lowered.compile(FAST_TO_COMPILE.get(placed.platform))
        found = compiled(placed.state, placed.batch)
        loss, grads, expert_counts = jax.tree.map(np.asarray, found)
        sizes: dict[str, int] = dict(zip(AXES, placed.plan.degrees, strict=True))
        crossing = (
            (c, cast(tuple[AxisName, ...], axes_crossed(c, sizes)))
            for c in collectives(compiled.as_text() or "")
            if not c.is_local
        )
        return Outcome(
            plan=placed.plan,
            loss=float(loss),
            norm=math.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values())),
            grads=grads,
            expert_counts=expert_counts,
            found=tuple(crossing),
            state_bytes=placed.state_bytes,
            warnings=tuple(line for line in said if REMATERIALIZED in line),
        )

    def move(
        self,
        parallel: Parallel,
        devices: Sequence[Device],
        *,
        grads: dict[str, np.ndarray],
        natural: bool = True,
    ) -> dict[str, np.ndarray]:
        """Return the parameters after one update with these gradients in a layout.

        Args:
            parallel: degrees of the axes and other keys of the section.
            devices: as many as the degrees multiply to, or more.
            grads: by path, layers in order.
            natural: return layers in order; otherwise as a pipeline stores them.
        """
        placed = self.place(parallel, devices)
        rate = jnp.float32(placed.cfg.optimizer.learning_rate)

        def step(state: TrainState, grads: dict) -> dict:
            with jax.sharding.use_abstract_mesh(placed.mesh.abstract_mesh):
                held, grads = beside_moments(state, placed.frame.stored(grads), frame=placed.frame)
                norm = global_norm(grads, frame=placed.frame)
                zero = jnp.zeros(())
                terms = Terms(zero, zero, jnp.zeros((0,)), zero, {})
                new = updated(
                    held, grads, norm=norm, rate=rate, terms=terms, tx=placed.tx, cfg=placed.cfg
                )
                return placed.frame.natural(new.params) if natural else new.params

        lowered = jit_on_mesh(step, placed.mesh).lower(placed.state, grads)
        compiled = lowered.compile(FAST_TO_COMPILE.get(placed.platform))
        return jax.tree.map(np.asarray, compiled(placed.state, grads))


class Placed(NamedTuple):
    """A model, its state and a batch where a layout keeps them."""

    cfg: RunConfig
    plan: ParallelPlan
    frame: Frame
    tx: optax.GradientTransformation
    state: TrainState
    batch: Batch

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that the state lies on."""
        return jax.tree.leaves(self.state.params)[0].sharding.mesh

    @property
    def platform(self) -> str:
        """What the devices of the mesh are."""
        return self.mesh.devices.flat[0].platform

    @property
    def state_bytes(self) -> int:
        """Parameters and optimizer state on the first device."""
        arrays = jax.tree.leaves((self.state.params, self.state.optimizer))
        return sum(a.addressable_shards[0].data.nbytes for a in arrays)


def documents(cfg: RunConfig) -> Batch:
    """Return rows of documents of many lengths, one of them padding alone; no two count alike."""
    rows, length = cfg.train.batch_size, cfg.train.seq_len
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.model.vocab_size, (rows, length + 1), dtype=np.int32)
    positions = np.zeros((rows, length), np.int32)
    segments, counted = np.zeros_like(positions), np.zeros(positions.shape, bool)
    for row in range(rows - 1 if rows > 1 else rows):
        first = 1 + int(rng.integers(0, length))
        last = length - int(rng.integers(0, length - first + 1))
        for number, (start, end) in enumerate(((0, first), (first, last)), 1):
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = number
            counted[row, start : max(end - 1, start)] = True
    there = segments > 0
    return Batch(
        tokens=np.where(there, tokens[:, :-1], 0),
        targets=np.where(there, tokens[:, 1:], 0),
        positions=positions,
        segment_ids=segments,
        loss_mask=counted,
    )


def weights_of(frame: Frame) -> Arrays:
    """Return weights none of which is trivial: norms away from 1, routers' biases away from 0."""
    rng = np.random.default_rng(3)

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        middle = 1.0 if path.endswith("scale") else 0.0
        return rng.normal(middle, 0.2, shape.shape).astype(shape.dtype)

    return Arrays(*({path: draw(path, s) for path, s in g.items()} for g in frame.shapes()))


def fresh_weights(frame: Frame) -> Arrays:
    """Return weights as training begins, on the host."""
    return jax.tree.map(np.asarray, jax.jit(frame.fresh, static_argnums=0)(0))


@contextmanager
def stderr_of_compiler() -> Iterator[list[str]]:
    """Yield a list that holds, afterwards, the lines written to stderr inside, also by C++.

    What is none of the compiler's remarks on placements is written on.
    """
    lines: list[str] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()
    others = [line for line in lines if REMATERIALIZED not in line]
    sys.stderr.write("".join(f"{line}\n" for line in others))
