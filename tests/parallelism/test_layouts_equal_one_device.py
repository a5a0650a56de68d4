"""A layout changes where numbers are computed, never which numbers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.parallel import AXES
from jaxfound.models import build, describe
from jaxfound.models.build import Frame, arrays_of
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.training.optimizer import make_optimizer
from jaxfound.training.state import state_shardings
from tests.models.tiny import model_config, relative_error, run_config
from tests.parallelism.layouts import LAYOUTS, MODELS, result_of

pytestmark = pytest.mark.multidevice

MANY = [name for name in LAYOUTS if name != "one"]
# Eight devices compile for long; what these two show of experts, layouts of several axes show too.
SLOW = [("experts", "data8"), ("experts", "tensor4")]


def each_of(*layouts, models=tuple(MODELS)):
    """Run a test with each of these models on each of these layouts."""
    cases = [
        pytest.param(model, layout, marks=[pytest.mark.slow] if (model, layout) in SLOW else [])
        for model in models
        for layout in layouts
    ]
    return pytest.mark.parametrize(("model", "layout"), cases)


each_case = each_of(*MANY)
each_model = pytest.mark.parametrize("model", MODELS)
# float32 sums in another order: 2^-24 a rounding, some thousand of them in a row.
ROUNDING = 1e-5


@cache
def crossed(model, layout):
    """Kinds of collectives of the compiled program, each with the axes it crosses."""
    result = result_of(model, layout)
    sizes = dict(zip(AXES, result.plan.degrees, strict=True))
    found = [(c, axes_crossed(c, sizes)) for c in collectives(result.text)]
    return [(c.kind, axes, c) for c, axes in found if not c.is_local]


@each_case
def test_loss_and_gradient_norm_are_those_of_one_device(model, layout):
    ours, one = result_of(model, layout), result_of(model, "one")
    assert ours.loss == pytest.approx(one.loss, rel=ROUNDING)
    assert ours.norm == pytest.approx(one.norm, rel=ROUNDING)


@each_case
def test_every_gradient_is_that_of_one_device(model, layout):
    ours, one = result_of(model, layout).grads, result_of(model, "one").grads
    errors = {path: relative_error(grad, one[path]) for path, grad in ours.items()}
    assert {path: e for path, e in errors.items() if e > ROUNDING} == {}


@each_of(*MANY, models=["experts"])
def test_every_expert_gets_the_tokens_it_gets_on_one_device(model, layout):
    ours = result_of(model, layout).expert_counts
    for path, counts in result_of(model, "one").expert_counts.items():
        np.testing.assert_array_equal(ours[path], counts)


WANTED = {
    "data8": [("all_reduce", ("data",))],
    "fsdp8": [("all_gather", ("fsdp",))],
    "tensor4": [("all_reduce", ("tensor",))],
    # Gradients of data and of fsdp are summed in one go.
    "data2_fsdp2_tensor2": [
        ("all_gather", ("fsdp",)),
        ("all_reduce", ("tensor",)),
        ("all_reduce", ("data", "fsdp")),
    ],
    "data4_microbatches4": [("all_reduce", ("data",))],
}


@each_case
def test_each_axis_shows_its_collective(model, layout):
    found = {(kind, axes) for kind, axes, _ in crossed(model, layout)}
    assert [pair for pair in WANTED[layout] if pair not in found] == [], found


@each_model
def test_one_device_talks_to_nobody(model):
    assert crossed(model, "one") == []


@each_case
def test_no_collective_crosses_an_axis_of_one_device(model, layout):
    split = {a for a in AXES if LAYOUTS[layout].get(a, 1) > 1}
    assert {axes for _, axes, _ in crossed(model, layout) if not set(axes) <= split} == set()


@each_of("data8", "data4_microbatches4", "data2_fsdp2_tensor2")
def test_no_tokens_are_gathered_over_data(model, layout):
    """Data parallelism sums gradients; sorting and routing stay on each device's own tokens."""
    moved = {kind for kind, axes, _ in crossed(model, layout) if "data" in axes}
    assert moved == {"all_reduce"}


@each_model
def test_weights_are_gathered_over_fsdp_and_activations_are_not(model):
    """Every all_gather gives an array as large as one layer's parameter."""
    name, changes = MODELS[model]
    table = describe(model_config(name, **changes))
    shapes = {s.shape[1:] if s.dims[0] == "layers" else s.shape for s in table if s.is_matrix}
    sizes = {int(np.prod(shape)) for shape in shapes}
    gathered = [c for kind, _, c in crossed(model, "fsdp8") if kind == "all_gather"]
    assert gathered
    for collective in gathered:
        numbers = collective.shape.partition("[")[2].partition("]")[0]
        assert int(np.prod([int(n) for n in numbers.split(",")])) in sizes, collective


def test_the_gathered_weights_of_all_layers_are_never_held_at_once():
    """A layer's weights are gathered again for its backward pass; what is kept is a shard."""
    text = result_of("dense", "fsdp8").text
    assert "f32[2,4,48]" in text, "the feed-forward's shards, two layers of them"
    assert "f32[2,32,48]" not in text
    assert "f32[2,48,32]" not in text


@each_case
def test_the_plans_parameter_bytes_are_those_on_a_device(model, layout):
    result = result_of(model, layout)
    assert result.plan.param_bytes == result.param_bytes


# Of one device's parameters, what each device holds at most.
PARAMS_BELOW = {"fsdp8": 0.45, "tensor4": 0.55, "data2_fsdp2_tensor2": 0.6, "data8": 1.0}


@each_of(*PARAMS_BELOW)
def test_each_devices_arguments_shrink(model, layout):
    """fsdp and tensor cut parameters, data cuts rows only; norms and latents stay whole."""
    ours, one = result_of(model, layout), result_of(model, "one")
    assert ours.argument_bytes < one.argument_bytes
    assert ours.param_bytes <= PARAMS_BELOW[layout] * one.param_bytes


def test_weights_are_born_on_their_devices_and_the_same_on_every_mesh():
    parallel = LAYOUTS["data2_fsdp2_tensor2"]
    cfg = run_config(model_config("gqa"), rows=16, parallel=parallel)
    mesh = build_mesh(make_plan(cfg, 8, params=describe(cfg.model)))
    born = arrays_of(build(cfg.model, seed=1, mesh=mesh)).params
    expected = arrays_of(build(cfg.model, seed=1)).params
    shardings = Frame(cfg.model).shardings(mesh).params
    for path, array in born.items():
        assert array.sharding.is_equivalent_to(shardings[path], array.ndim), path
        np.testing.assert_array_equal(array, expected[path], err_msg=path)


@pytest.mark.parametrize(
    "layout", [pytest.param("fsdp8", marks=pytest.mark.slow), "data2_fsdp2_tensor2"]
)
def test_the_optimizer_moves_alike_on_every_layout(layout):
    """Three steps fed identical gradients, since those of two layouts differ by roundings."""
    name, changes = MODELS["experts"]
    cfg = run_config(model_config(name, **changes), rows=16, parallel=LAYOUTS[layout])
    table = describe(cfg.model)
    tx, frame = make_optimizer(cfg.optimizer, table), Frame(cfg.model)
    fed = result_of("experts", "one").grads
    many = build_mesh(make_plan(cfg, 8, params=table))
    alone = make_plan(run_config(cfg.model), 1, params=table)
    single = build_mesh(alone, devices=jax.devices()[:1])

    def moved(mesh):
        places = state_shardings(frame, tx, mesh=mesh)
        grads = jax.device_put(fed, places.params)
        params = jax.device_put(jax.tree.map(np.ones_like, fed), places.params)

        @jax.jit
        def three_steps(params, grads):
            state = tx.init(params)
            for scale in (1.0, -0.5, 2.0):
                scaled = jax.tree.map(partial(jnp.multiply, scale), grads)
                moves, state = tx.update(scaled, state, params)
                params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moves)
            return params

        return three_steps(params, grads)

    ours, expected = moved(many), moved(single)
    errors = {path: relative_error(a, expected[path]) for path, a in ours.items()}
    assert {path: e for path, e in errors.items() if e > 1e-6} == {}
