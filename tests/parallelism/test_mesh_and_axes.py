"""The mesh has six named axes, and dims find theirs in one table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.config.parallel import AXES
from jaxfound.parallelism import ParallelPlan, PlanError, ShardingRules, build_mesh
from jaxfound.parallelism.axes import sum_over

RULES = ShardingRules()


def mesh_of(**degrees):
    plan = ParallelPlan(degrees=tuple(degrees.get(a, 1) for a in AXES))
    return build_mesh(plan, devices=jax.devices()[: plan.num_devices])


@pytest.mark.multidevice
def test_a_mesh_has_the_plans_axes_and_its_last_axis_runs_over_neighbours():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {
        "pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2,
    }  # fmt: skip
    numbers = np.vectorize(lambda d: d.id)(mesh.devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(numbers, np.arange(8).reshape(2, 2, 2))


@pytest.mark.multidevice
def test_a_mesh_keeps_the_order_of_the_devices_it_is_given():
    plan = ParallelPlan(degrees=(1, 2, 1, 1, 1, 2))
    mesh = build_mesh(plan, devices=jax.devices()[3::-1])
    assert [d.id for d in mesh.devices.ravel()] == [3, 2, 1, 0]


def test_too_few_devices_are_refused_with_both_numbers():
    plan = ParallelPlan(degrees=(1, 4, 1, 1, 1, 2))
    with pytest.raises(PlanError, match=r"8 devices \(data=4 x tensor=2\), but there are 1\."):
        build_mesh(plan, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("dims", "stored", "in_use"),
    [
        (("vocab", "embed"), P("tensor", "fsdp"), P("tensor", None)),
        (
            ("layers", "embed", "ffn"),
            P("pipeline", "fsdp", "tensor"),
            P("pipeline", None, "tensor"),
        ),
        (("experts", "ffn", "embed"), P("expert", "tensor", "fsdp"), P("expert", "tensor", None)),
        (("embed", "kv_heads", "head_dim"), P("fsdp", "tensor", None), P(None, "tensor", None)),
        (("latent", None), P("fsdp", None), P(None, None)),
    ],
)
def test_parameters_are_split_by_the_table_and_whole_over_fsdp_in_use(dims, stored, in_use):
    assert RULES.param_spec(dims) == stored
    assert RULES.gathered_spec(dims) == in_use


@pytest.mark.parametrize(
    ("dims", "spec"),
    [
        (("batch", "seq", "embed"), P(("data", "fsdp", "expert"), "context", None)),
        (("batch", "seq", "heads", None), P(("data", "fsdp", "expert"), "context", "tensor", None)),
        (("batch", "seq", "vocab"), P(("data", "fsdp", "expert"), "context", "tensor")),
    ],
)
def test_activations_split_rows_over_three_axes_and_channels_over_tensor(dims, spec):
    assert RULES.activation_spec(dims) == spec


def test_the_residual_stream_is_cut_along_the_sequence_where_that_is_asked_for():
    stream, rows = ("batch", "stream_seq", "embed"), ("data", "fsdp", "expert")
    assert RULES.activation_spec(stream) == P(rows, "context", None)
    cut = ShardingRules(activations="sequence", degrees=(1, 1, 1, 1, 1, 2))
    assert cut.activation_spec(stream) == P(rows, ("context", "tensor"), None)
    assert cut.activation_spec(("batch", "seq", "embed")) == P(rows, "context", None)
    assert cut.cuts_stream
    assert not ShardingRules(activations="sequence").cuts_stream


def test_a_dim_that_stays_whole_is_whole_everywhere():
    rules = ShardingRules(unsplit=("kv_heads",))
    assert rules.param_spec(("embed", "kv_heads")) == P("fsdp", None)
    assert rules.gathered_spec(("embed", "kv_heads")) == P(None, None)
    assert rules.activation_spec(("kv_heads", "heads")) == P(None, "tensor")
    assert rules.param_axes(("kv_heads",)) == ((),)
    assert RULES.param_axes(("kv_heads",)) == (("tensor",),)


def test_an_axis_cuts_a_parameter_once_along_the_first_dim_that_asks():
    assert RULES.param_axes(("embed", "latent")) == (("fsdp",), ())
    assert RULES.param_axes(("latent", "heads", "head_dim")) == (("fsdp",), ("tensor",), ())


def test_without_a_mesh_nothing_is_pinned():
    x = jnp.ones((2, 4))
    assert RULES.constrain(x, "batch", "embed") is x
    assert RULES.gather(x, "vocab", "embed") is x
    assert sum_over(x, "tensor") is x


def test_without_a_mesh_a_function_of_shards_is_the_function():
    def fn(x):
        return x

    assert RULES.on_each_device(fn, takes=(P("data"),), gives=P("data")) is fn


def under(mesh, fn, *args):
    """The result of `fn` traced and run under a mesh, its arguments whole on every device."""

    def traced(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args)

    return jax.jit(traced)(*jax.device_put(args, NamedSharding(mesh, P())))


@pytest.mark.multidevice
def test_under_a_mesh_activations_and_weights_lie_where_the_table_says():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    placed = under(mesh, lambda x: RULES.constrain(x, "batch", "seq", "ffn"), jnp.ones((4, 3, 8)))
    assert placed.sharding.shard_shape(placed.shape) == (1, 3, 4)
    whole = under(mesh, lambda w: RULES.gather(w, "embed", "ffn"), jnp.ones((8, 8)))
    assert whole.sharding.shard_shape(whole.shape) == (8, 4)


@pytest.mark.multidevice
def test_each_device_sees_its_own_shards_and_sums_over_one_axis():
    mesh = mesh_of(data=2, tensor=2)
    seen = []

    def shards(x, w):
        seen.append((x.shape, w.shape))
        return sum_over(x @ w, "tensor")

    def product(x, w):
        run = RULES.on_each_device(
            shards, takes=(P("data", "tensor"), P("tensor", None)), gives=P("data", None)
        )
        return run(x, w)

    x, w = np.arange(24.0, dtype=np.float32).reshape(4, 6), np.ones((6, 5), np.float32)
    np.testing.assert_allclose(under(mesh, product, x, w), x @ w)
    assert seen == [((2, 3), (3, 5))]
