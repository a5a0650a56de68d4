"""Gradients of one batch on a layout of virtual devices, and the program that computed them."""

import math
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from jaxfound.config.parallel import AXES
from jaxfound.data.batch import Batch
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Arrays, Frame
from jaxfound.parallelism import ParallelPlan, build_mesh, make_plan
from jaxfound.training.objective import token_counts
from jaxfound.training.state import TrainState
from jaxfound.training.step import batch_sharding, gradients
from tests.models.tiny import (
    FAST_TO_COMPILE,
    model_config,
    packed_batch,
    run_config,
    weights_of,
)

ROWS, LENGTH = 16, 16
# Documents of many lengths: no two rows count alike, one row is padding alone.
DOCUMENTS = [[1 + i, LENGTH - 1 - i] if i % 2 else [2 + i // 2] for i in range(15)] + [[]]

MODELS = {
    "dense": ("gqa", {}),
    # Modules that look ahead are on every pair of axes in test_every_pair_of_axes.py.
    "experts": ("mla_moe_mtp", {"mtp_depth": 0, "num_dense_layers": 0}),
}
LAYOUTS = {
    "one": {},
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor4": {"tensor": 4},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data4_microbatches4": {"data": 4, "num_microbatches": 4},
}


@dataclass(frozen=True)
class Result:
    """One device's view of a batch's gradients.

    Attributes:
        plan: the layout.
        loss: next-token loss, nats a token.
        norm: global norm of the gradients.
        grads: by dotted path.
        expert_counts: by the router's dotted path.
        text: the compiled program.
        argument_bytes: arguments of the program on one device.
        param_bytes: parameters as they lie on the first device.
    """

    plan: ParallelPlan
    loss: float
    norm: float
    grads: dict[str, np.ndarray]
    expert_counts: dict[str, np.ndarray]
    text: str
    argument_bytes: int
    param_bytes: int


@cache
def result_of(model: str, layout: str) -> Result:
    name, changes = MODELS[model]
    return on_layout(model_config(name, **changes), LAYOUTS[layout], documents())


def documents() -> Batch:
    return packed_batch(DOCUMENTS, length=LENGTH)


def on_layout(
    model, parallel: dict, batch: Batch, *, arrays: Arrays | None = None, train: dict | None = None
) -> Result:
    """The gradients of `batch` as the training step computes them on this layout."""
    rows, length = batch.tokens.shape
    cfg = run_config(model, rows=rows, length=length, parallel=parallel, train=train or {})
    num_devices = math.prod(n for axis, n in parallel.items() if axis in AXES)
    plan = make_plan(cfg, num_devices, params=describe(model))
    mesh = build_mesh(plan, devices=jax.devices()[:num_devices])
    frame = Frame(model, execution=execution_of(plan, cfg.precision))
    params, buffers = jax.device_put(arrays or weights_of(frame), frame.shardings(mesh))
    state = TrainState(np.int32(0), params, buffers, (), np.zeros(2, np.uint32))
    placed = jax.device_put(batch, batch_sharding(frame, mesh))

    def step(state: TrainState, batch: Batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=model.mtp_depth)
            grads, terms = gradients(state, batch, frame=frame, cfg=cfg, counts=counts)
            shards = frame.shardings(mesh).params
            grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, shards)
            return terms.nats / counts.targets, grads, terms.expert_counts

    compiled = jax.jit(step).lower(state, placed).compile(FAST_TO_COMPILE)
    # Numpy from here on: each small operation on arrays of a mesh would be a program to compile.
    loss, grads, expert_counts = jax.tree.map(np.asarray, compiled(state, placed))
    return Result(
        plan=plan,
        loss=float(loss),
        norm=math.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values())),
        grads=grads,
        expert_counts=expert_counts,
        text=compiled.as_text(),
        argument_bytes=compiled.memory_analysis().argument_size_in_bytes,
        param_bytes=sum(a.addressable_shards[0].data.nbytes for a in params.values()),
    )
