"""Checkpoints of pipelines: layers once and in order, read back by every layout."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.config.run import RunConfig
from jaxfound.models import build, describe, execution_of
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.training.compare import without_stages
from jaxfound.training.lattice import MAIN_LAYERS
from jaxfound.training.saved import SavedForm
from jaxfound.training.trial import Trial

pytestmark = pytest.mark.multidevice
CONFIG = Path(__file__).parents[2] / "configs" / "tiny-dense.yaml"
LAYOUTS = [
    {"pipeline": 2, "fsdp": 2, "schedule": "paired_1f1b"},
    {"pipeline": 2, "fsdp": 2, "tensor": 2, "schedule": "dualpipe"},
    {"pipeline": 4, "data": 2, "schedule": "interleaved"},
]


def trial_of(layers):
    cfg = load(CONFIG, ["parallel.num_microbatches=4"])
    return Trial(cfg, dict.fromkeys(AXES, 2), main_layers=layers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["schedule"])
def test_a_state_is_saved_in_order_and_comes_back_as_it_was(layout):
    trial = trial_of(MAIN_LAYERS)
    placed = trial.place({"zero_stage": 2, "num_microbatches": 4, **layout}, jax.devices())
    mesh = jax.tree.leaves(placed.state.params)[0].sharding.mesh
    moments = jax.tree.map(lambda a: a + 1, placed.state.optimizer)
    state = placed.state._replace(optimizer=moments)
    form = SavedForm(placed.frame, placed.tx, mesh=mesh)
    saved = form.natural(state)
    for group, own in zip((saved.params, saved.buffers), trial.arrays, strict=True):
        for path, array in own.items():
            np.testing.assert_array_equal(group[path], array)
    for leaf, like in zip(jax.tree.leaves(saved), jax.tree.leaves(form.like), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
    back = form.stored(saved)
    # Empty places hold zeros again, whatever their moments were.
    there = np.asarray(placed.frame.stages.places) >= 0
    for found, before in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert found.sharding == before.sharding
        a, b = np.asarray(found), np.asarray(before)
        if a.ndim and len(a) == len(there):
            assert not a[~there].any()
            a, b = a[there], b[there]
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["schedule"])
def test_a_model_that_is_called_has_its_layers_in_order_whatever_the_plan(layout):
    cfg = trial_of(MAIN_LAYERS).cfg
    values = cfg.model_dump(exclude={"parallel"})
    parallel = {"num_microbatches": 4, "zero_stage": 2, **layout}
    cfg = RunConfig.model_validate({**values, "parallel": parallel}, strict=False)
    num_devices = math.prod(layout.get(axis, 1) for axis in AXES)
    plan = make_plan(cfg, num_devices, params=describe(cfg.model))
    mesh = build_mesh(plan, devices=jax.devices()[:num_devices])
    execution = execution_of(plan, cfg.precision)
    model, one = build(cfg.model, execution=execution, mesh=mesh), build(cfg.model)
    tokens = jnp.arange(4 * cfg.train.seq_len).reshape(4, -1) % cfg.model.vocab_size
    with jax.set_mesh(mesh):
        found = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(found, one(tokens), rtol=1e-4, atol=1e-5)


def test_a_run_with_stages_is_judged_with_its_ranks_along_fsdp():
    keys = ["parallel.pipeline=4", "parallel.fsdp=2", "parallel.zero_stage=1"]
    cfg = load(CONFIG, [*keys, "parallel.schedule=dualpipe", "parallel.num_microbatches=8"])
    judged = without_stages(cfg).parallel
    assert (judged.pipeline, judged.fsdp, judged.zero_stage) == (1, 8, 3)
    assert without_stages(load(CONFIG)) == load(CONFIG)


def test_a_pipeline_of_even_stages_is_saved_as_it_is():
    placed = trial_of(4).place(
        {"pipeline": 2, "zero_stage": 2, "num_microbatches": 4}, jax.devices()
    )
    mesh = jax.tree.leaves(placed.state.params)[0].sharding.mesh
    assert SavedForm(placed.frame, placed.tx, mesh=mesh).natural(placed.state) is placed.state
