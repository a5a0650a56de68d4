"""Muon on a mesh: the matrices of one device, moved whole and never gathered, kept as shards."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from jaxfound.communication import collectives
from jaxfound.config.train import OptimizerConfig
from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.training.muon import matrices_of, orthogonalise
from jaxfound.training.optimizer import make_optimizer
from jaxfound.training.state import state_shardings
from tests.models.tiny import (
    FAST_TO_COMPILE,
    model_config,
    relative_error,
    run_config,
    weights_of,
)
from tests.parallelism.layouts import LAYOUTS
from tests.training.tiny import DENSE, of_kind, run, tiny

pytestmark = pytest.mark.multidevice

MANY = ["fsdp8", "tensor4", "data2_fsdp2_tensor2"]
# The same matrices in another batch: sums of float32 in another order, small values tripled.
ROUNDING = 2e-6


def laid_out(layout: str):
    """The model's frame on its mesh, and the table of its parameters."""
    model = model_config("mla_moe_yarn", num_dense_layers=0)
    cfg, table = run_config(model, rows=16, parallel=LAYOUTS[layout]), describe(model)
    num_devices = 1
    for axis, degree in LAYOUTS[layout].items():
        num_devices *= 1 if axis == "num_microbatches" else degree
    plan = make_plan(cfg, num_devices, params=table)
    mesh = build_mesh(plan, devices=jax.devices()[:num_devices])
    return table, Frame(model), mesh


@cache
def moved(layout: str):
    """Ones after three steps fed the same gradients on every layout, and Muon's state."""
    table, frame, mesh = laid_out(layout)
    tx = make_optimizer(OptimizerConfig(name="muon"), table)
    places = state_shardings(frame, tx, mesh=mesh)
    grads = jax.device_put(weights_of(frame).params, places.params)

    def step(params, state, grads, scale):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            scaled = jax.tree.map(partial(jnp.multiply, scale), grads)
            moves, state = tx.update(scaled, state, params)
            return jax.tree.map(lambda p, m: p - 0.1 * m, params, moves), state

    out = (places.params, places.optimizer)
    step = jax.jit(step, out_shardings=out, compiler_options=FAST_TO_COMPILE)
    params, state = jax.device_put((jax.tree.map(jnp.ones_like, grads), tx.init(grads)), out)
    for scale in (1.0, -0.5, 2.0):
        params, state = step(params, state, grads, scale)
    return params, state


# The layout that cuts every way by default; a step of Muon on eight devices compiles for long.
@pytest.mark.parametrize(
    "layout", [MANY[-1], *(pytest.param(layout, marks=pytest.mark.slow) for layout in MANY[:-1])]
)
def test_every_parameter_and_every_momentum_is_that_of_one_device(layout):
    (ours, state), (one, alone) = moved(layout), moved("one")
    errors = {path: relative_error(a, one[path]) for path, a in ours.items()}
    assert {path: e for path, e in errors.items() if e > ROUNDING} == {}
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        assert relative_error(a, b) <= ROUNDING


@pytest.mark.parametrize("layout", MANY)
def test_a_momentum_lies_beside_its_parameter(layout):
    table, frame, mesh = laid_out(layout)
    tx = make_optimizer(OptimizerConfig(name="muon"), table)
    places = state_shardings(frame, tx, mesh=mesh)
    momenta = {
        path[-1].key: sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(places.optimizer)
        if "trace" in jax.tree_util.keystr(path)
    }
    expected = {s.path for s in table if s.kind == "param" and matrices_of(s) is not None}
    assert momenta == {path: places.params[path] for path in expected}
    assert any(sharding.spec != jax.P() for sharding in momenta.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", MANY)
def test_matrices_are_moved_whole_and_never_gathered(layout):
    """The partitioner alone gathers each stack twice an iteration, on every device."""
    table, frame, mesh = laid_out(layout)
    matrices = {
        s.path: found
        for s in table
        if s.path.startswith("layers.") and s.kind == "param" and (found := matrices_of(s))
    }
    tx = orthogonalise(OptimizerConfig(name="muon"), matrices)
    places = {path: frame.shardings(mesh).params[path] for path in matrices}

    def update(momenta):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return tx.update(momenta, tx.init(momenta))[0]

    shapes = {
        path: jax.ShapeDtypeStruct(m.spec.shape, jnp.float32, sharding=places[path])
        for path, m in matrices.items()
    }
    jitted = jax.jit(update, out_shardings=places, compiler_options=FAST_TO_COMPILE)
    text = jitted.lower(shapes).compile().as_text()
    assert text
    assert {c.kind for c in collectives(text) if not c.is_local} == {"all_to_all"}


@pytest.mark.slow
def test_a_run_on_a_mesh_is_the_run_on_one_device(tmp_path):
    """One key/value head, which tensor=2 leaves whole."""
    keys = ("optimizer.name=muon", "train.steps=4", "train.eval_batches=0")
    model = {**DENSE, "vocab_multiple": 2, "num_layers": 1}
    one = run(tiny(tmp_path, "name=one", *keys, model=model))
    mesh = ("parallel.fsdp=2", "parallel.tensor=2")
    split = tiny(tmp_path, "name=split", *mesh, *keys, model=model)
    losses = of_kind(run(split, num_devices=4), "train", "loss")
    assert losses == pytest.approx(of_kind(one, "train", "loss"), rel=1e-4)
