"""One batch's gradients and one update at a ZeRO stage, and the program that computed them."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfound.config.parallel import AXES
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import ParallelPlan, build_mesh, make_plan
from jaxfound.training.objective import token_counts
from jaxfound.training.optimizer import make_optimizer
from jaxfound.training.state import TrainState, state_shardings
from jaxfound.training.step import batch_sharding, beside_moments, gradients, updated
from tests.models.tiny import FAST_TO_COMPILE, model_config, run_config, weights_of
from tests.parallelism import layouts
from tests.parallelism.layouts import LENGTH, documents

STAGES = (0, 1, 2, 3)
# Three devices divide neither the 32 channels nor the 64 ids nor a head, but the layers.
MODELS = {**layouts.MODELS, "three_layers": ("gqa", {"num_layers": 3})}
LAYOUTS = {
    "dense": {"fsdp": 4, "num_microbatches": 2},
    "experts": {"data": 2, "fsdp": 2, "tensor": 2, "num_microbatches": 2},
    "three_layers": {"fsdp": 3, "num_microbatches": 2},
}
ROWS = {"dense": 16, "experts": 16, "three_layers": 12}
RATE = 0.1


@dataclass(frozen=True)
class Result:
    """What one program gave.

    Attributes:
        plan: the layout.
        loss: next-token loss, nats a token.
        norm: global norm of the gradients.
        grads: by dotted path.
        params: after an update from the gradients that were fed, by dotted path.
        moments: after that update, in the order of optax's state.
        bytes: on the first device, by what: parameters, moments, summed gradients.
        text: the compiled program.
    """

    plan: ParallelPlan
    loss: float
    norm: float
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    moments: list[np.ndarray]
    bytes: dict[str, int]
    text: str


def model_of(model: str):
    name, changes = MODELS[model]
    return model_config(name, **changes)


def parallel_of(model: str, stage: int | None) -> dict:
    """The layout of a stage; None is one device that sees the whole batch at once."""
    return {} if stage is None else {**LAYOUTS[model], "zero_stage": stage}


def laid_out(model: str, parallel: dict, *, rows: int = 0, devices=None, **sections):
    """Config, plan, mesh, frame and optimizer of a layout."""
    made, rows = model_of(model), rows or ROWS[model]
    cfg = run_config(made, rows=rows, length=LENGTH, parallel=parallel, **sections)
    table = describe(made)
    num = int(np.prod([parallel.get(axis, 1) for axis in AXES]))
    plan = make_plan(cfg, num, params=table)
    mesh = build_mesh(plan, devices=jax.devices()[:num] if devices is None else devices(num))
    frame = Frame(made, execution=execution_of(plan, cfg.precision))
    return cfg, plan, mesh, frame, make_optimizer(cfg.optimizer, table, rules=plan.rules)


@cache
def fed_gradients(model: str) -> dict[str, np.ndarray]:
    """Gradients that every layout is fed for its update, none of them zero."""
    shapes = Frame(model_of(model)).shapes().params
    rng = np.random.default_rng(5)
    return {path: rng.normal(0, 1, s.shape).astype(np.float32) for path, s in shapes.items()}


@cache
def result_of(model: str, stage: int | None) -> Result:
    cfg, plan, mesh, frame, tx = laid_out(model, parallel_of(model, stage))
    places = state_shardings(frame, tx, mesh=mesh)
    params, buffers = weights_of(frame)
    first = TrainState(np.int32(0), params, buffers, tx.init(params), np.zeros(2, np.uint32))
    state = jax.device_put(first, places)
    rows = jax.tree.map(lambda a: a[: ROWS[model]], documents())
    batch = jax.device_put(rows, batch_sharding(frame, mesh))
    fed = jax.device_put(fed_gradients(model), frame.slot_shardings(mesh))

    def step(state, batch, fed):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=cfg.model.mtp_depth)
            summed, terms = gradients(state, batch, frame=frame, cfg=cfg, counts=counts)
            held, grads = beside_moments(state, summed, frame=frame)
            norm = optax.tree.norm(fed)
            new = updated(held, fed, norm=norm, rate=jnp.float32(RATE), terms=terms, tx=tx, cfg=cfg)
            return new, summed, terms.nats / counts.targets, optax.tree.norm(grads)

    free = (places, None, None, None)
    jitted = jax.jit(step, out_shardings=free, compiler_options=FAST_TO_COMPILE)
    compiled = jitted.lower(state, batch, fed).compile()
    new, summed, loss, norm = compiled(state, batch, fed)
    moments = [m for m in jax.tree.leaves(new.optimizer) if m.ndim]
    held = {"parameters": new.params.values(), "moments": moments, "gradients": summed.values()}
    return Result(
        plan=plan,
        loss=float(loss),
        norm=float(norm),
        grads=jax.tree.map(np.asarray, summed),
        params=jax.tree.map(np.asarray, new.params),
        moments=[np.asarray(m) for m in moments],
        bytes={
            what: sum(a.addressable_shards[0].data.nbytes for a in arrays)
            for what, arrays in held.items()
        },
        text=compiled.as_text(),
    )
