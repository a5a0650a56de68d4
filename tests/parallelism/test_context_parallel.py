"""Rows cut over devices: the same numbers as whole rows, each device with the same work."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.parallel import AXES
from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.models.layers.context_attention import attend_over_context, pair_of
from jaxfound.parallelism import PlanError, build_mesh, make_plan
from jaxfound.parallelism.context import arranged, chunk_order, in_order, places_of, whole_rows
from pallas_kernels.flash_attention import flash_attention
from tests.models.tiny import jit, model_config, relative_error, run_config
from tests.parallelism.layouts import MODELS, documents, on_layout, result_of

pytestmark = pytest.mark.multidevice

LAYOUTS = {
    "context2_tensor2_fsdp2": {"context": 2, "tensor": 2, "fsdp": 2},
    "context4_data2": {"context": 4, "data": 2},
}
# Each model and each layout once by default.
SLOW = [
    ("dense", "context2_tensor2_fsdp2"),
    ("experts", "context2_tensor2_fsdp2"),
    ("experts", "context4_data2"),
]


def each_of(*models):
    """Run a test with each of these models on each layout."""
    cases = [
        pytest.param(model, layout, marks=[pytest.mark.slow] if (model, layout) in SLOW else [])
        for model in models
        for layout in LAYOUTS
    ]
    return pytest.mark.parametrize(("model", "layout"), cases)


ROUNDING = 1e-5


@cache
def cut(model, layout):
    name, changes = MODELS[model]
    # The loss in chunks: of each device's part of a row at a time.
    train = {"loss_chunk": 8}
    return on_layout(model_config(name, **changes), LAYOUTS[layout], documents(), train=train)


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_arranged_rows_come_back_in_order_and_say_their_places(degree):
    x = jnp.arange(48 * 2).reshape(2, 48)
    there = arranged(x, degree)
    np.testing.assert_array_equal(in_order(there, degree), x)
    np.testing.assert_array_equal(there[0], places_of(48, degree) if degree > 1 else x[0])


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_every_device_goes_through_the_pairs_that_see_each_other_and_no_other(degree):
    num_chunks = 2 * degree
    for index in range(degree):
        own = chunk_order(degree)[2 * index : 2 * index + 2]
        pairs = [
            pair_of(jnp.int32(step), index=jnp.int32(index), num_chunks=num_chunks)
            for step in range(num_chunks + 1)
        ]
        met = [(own[int(p.half)], int(p.chunk)) for p in pairs]
        assert sorted(met) == sorted((o, chunk) for o in own for chunk in range(o + 1))
        assert [bool(p.diagonal) for p in pairs] == [o == chunk for o, chunk in met]


@each_of(*MODELS)
def test_loss_and_every_gradient_are_those_of_one_device(model, layout):
    ours, one = cut(model, layout), result_of(model, "one")
    assert ours.loss == pytest.approx(one.loss, rel=ROUNDING)
    assert ours.norm == pytest.approx(one.norm, rel=ROUNDING)
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in ours.grads.items()}
    assert {path: e for path, e in errors.items() if e > ROUNDING} == {}


@each_of("experts")
def test_every_expert_gets_the_tokens_it_gets_on_one_device(model, layout):
    for path, counts in result_of(model, "one").expert_counts.items():
        np.testing.assert_array_equal(cut(model, layout).expert_counts[path], counts)


@each_of(*MODELS)
def test_keys_are_gathered_over_context_and_their_gradients_scattered(model, layout):
    result = cut(model, layout)
    sizes = dict(zip(AXES, result.plan.degrees, strict=True))
    kinds = {c.kind for c in collectives(result.text) if axes_crossed(c, sizes) == ("context",)}
    assert {"all_gather", "reduce_scatter"} <= kinds


@each_of("experts")
def test_latent_attention_sends_latents_and_no_heads(model, layout):
    """Of a token 16 + 4 numbers cross the axis, whatever the number of heads."""
    result = cut(model, layout)
    sizes = dict(zip(AXES, result.plan.degrees, strict=True))
    gathered = [
        c.shape.partition("[")[2].partition("]")[0].split(",")
        for c in collectives(result.text)
        if c.kind == "all_gather" and axes_crossed(c, sizes) == ("context",)
    ]
    assert gathered
    assert {int(shape[-1]) for shape in gathered if len(shape) > 2} <= {16, 4}


def test_rows_that_do_not_cut_are_refused_with_the_nearest_lengths():
    cfg = run_config(model_config("gqa"), rows=8, length=18, parallel={"context": 4, "data": 2})
    with pytest.raises(PlanError, match=r"8 chunks.*\[16, 24\]"):
        make_plan(cfg, 8, params=describe(cfg.model))


def test_rows_in_order_are_refused_where_devices_share_them():
    model = model_config("gqa")
    frame = Frame(model)
    cfg = run_config(model, parallel={"context": 2})
    mesh = build_mesh(make_plan(cfg, 2, params=describe(model)), devices=jax.devices()[:2])
    shapes = frame.shapes()

    def run(params, buffers, tokens):
        return frame.bind(params, buffers)(tokens)

    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        pytest.raises(ValueError, match="arranged"),
    ):
        jax.eval_shape(run, *shapes, jax.ShapeDtypeStruct((2, 16), jnp.int32))


def both_ways(q, k, v, weight, *, ids, plan, expected):
    """The attention with its gradients over the plan's devices, and as `expected` gives them."""
    degree = plan.degree("context")

    def cut(q, k, v):
        q, k, v, there = (arranged(x, degree) for x in (q, k, v, ids))
        k, v = (whole_rows(x, "kv_heads", None, rules=plan.rules) for x in (k, v))
        out = attend_over_context(q, k, v, segment_ids=there, rules=plan.rules, scale=0.5)
        return in_order(out, degree)

    def with_grads(attention):
        def run(q, k, v):
            out, back = jax.vjp(attention, q, k, v)
            return out, *back(weight)

        return run

    mesh = build_mesh(plan, devices=jax.devices()[: plan.num_devices])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        placed = jax.device_put((q, k, v), NamedSharding(mesh, PartitionSpec()))
        ours = jit(with_grads(cut))(*placed)
    return ours, jit(with_grads(expected))(q, k, v)


def test_what_is_not_finite_stays_in_its_document_forward_and_backward():
    """Two documents in a row that four devices share; one value of the second one is NaN."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((1, 16, 2, 4)), jnp.float32) for _ in "qkvw")
    v = v.at[0, 11, 0, 1].set(jnp.nan)
    ids = jnp.asarray([[1] * 9 + [2] * 5 + [0] * 2], jnp.int32)
    expected = partial(flash_attention, segment_ids=ids, causal=True, scale=0.5)
    cfg = run_config(model_config("gqa"), parallel={"context": 4})
    plan = make_plan(cfg, 4, params=describe(cfg.model))
    ours, right_ones = both_ways(q, k, v, weight, ids=ids, plan=plan, expected=expected)
    for found, right in zip(ours, right_ones, strict=True):
        np.testing.assert_allclose(found[:, :9], right[:, :9], rtol=1e-4, atol=1e-5)
        assert jnp.isfinite(found[:, :9]).all()
        np.testing.assert_array_equal(found[:, 14:], 0)
    assert jnp.isnan(ours[0][0, 11:14, 0]).all()
    assert jnp.isfinite(ours[0][0, 9:11]).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 3), (4, 1)])
def test_query_heads_find_their_key_head_where_tensor_does_not_divide_those(
    num_heads, num_kv_heads
):
    """6 heads on 2 devices of tensor: the second device begins inside a key head's group."""
    rng = np.random.default_rng(1)
    sizes = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((2, 16, n, 4)), jnp.float32) for n in sizes)
    ids = jnp.asarray([[1] * 9 + [2] * 5 + [0] * 2, [1] * 16], jnp.int32)
    expected = partial(flash_attention, segment_ids=ids, causal=True, scale=0.5)
    changes = {"num_heads": num_heads, "gqa": {"num_kv_heads": num_kv_heads, "head_dim": 8}}
    cfg = run_config(model_config("gqa", **changes), parallel={"context": 2, "tensor": 2})
    plan = make_plan(cfg, 4, params=describe(cfg.model))
    ours, right_ones = both_ways(q, k, v, weight, ids=ids, plan=plan, expected=expected)
    for found, right in zip(ours, right_ones, strict=True):
        assert relative_error(found, right) <= 1e-6
