"""A script's own state is spread over a mesh by its shapes, or by what its variables declare."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxfound.config.parallel import AXES
from jaxfound.parallelism.adopt import shardings_of, spread
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.mesh import build_mesh
from jaxfound.parallelism.plan import ParallelPlan

pytestmark = pytest.mark.multidevice


def mesh_of(**degrees):
    return build_mesh(ParallelPlan(degrees=tuple(degrees.get(a, 1) for a in AXES)))


def declared(shape, dims):
    return nnx.Param(jnp.zeros(shape), out_sharding=dims, eager_sharding=False)


SHAPES = [
    pytest.param((64, 256), P(None, "fsdp"), id="the largest dim is cut"),
    pytest.param((256, 256), P("fsdp", None), id="the first of equals"),
    pytest.param((1023, 64), P(None, "fsdp"), id="a dim that does not divide is passed over"),
    pytest.param((4096,), P("fsdp"), id="a vector"),
    pytest.param((255,), P(), id="small stays whole"),
    pytest.param((), P(), id="a number"),
    pytest.param((1023, 1023), P(), id="nothing divides"),
]


@pytest.mark.parametrize(("shape", "spec"), SHAPES)
def test_an_array_is_cut_by_its_shape(shape, spec):
    found = shardings_of({"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, mesh=mesh_of(fsdp=8))
    assert found["w"].spec == spec


DECLARED = [
    pytest.param(("embed", "ffn"), P("fsdp", "tensor"), id="dims of the vocabulary"),
    pytest.param((None, "tensor"), P(None, "tensor"), id="a mesh axis by name"),
    pytest.param(("mine", "ffn"), P(None, "tensor"), id="an unknown dim stays whole"),
]


@pytest.mark.parametrize(("dims", "spec"), DECLARED)
def test_a_variable_is_split_as_it_declares(dims, spec):
    param = declared((64, 64), dims)
    found = shardings_of(nnx.State({"w": param}), mesh=mesh_of(fsdp=4, tensor=2))
    assert found["w"].get_value().spec == spec


def test_a_declared_dim_that_does_not_divide_is_refused_by_name():
    state = nnx.State({"up": declared((6, 64), ("embed", "ffn"))})
    with pytest.raises(PlanError, match=r"up.*\(6, 64\).*'fsdp': 4.*name the dim None"):
        spread(state, fsdp=4, tensor=2)


def test_degrees_that_do_not_make_up_the_devices_are_refused():
    with pytest.raises(PlanError, match="there are 8"):
        spread({"w": jnp.zeros((64, 64))}, fsdp=3)


def test_values_stay_and_each_device_holds_its_share():
    w = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    found = spread({"w": jnp.asarray(w)}, data=2, fsdp=4).state["w"]
    np.testing.assert_array_equal(found, w)
    assert {s.data.shape for s in found.addressable_shards} == {(64, 64)}


def test_rows_go_to_every_device_of_the_batch_axes():
    rows = spread({"w": jnp.zeros((64, 64))}, data=2, fsdp=2, tensor=2).rows
    batch = jax.device_put(jnp.zeros((8, 3)), rows)
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 3)}


def test_the_moments_of_an_optimizer_lie_beside_their_parameter():
    net = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)
    state = spread(nnx.state((net, optimizer)), fsdp=8).state
    found = {jax.tree_util.keystr(p): a for p, a in jax.tree_util.tree_leaves_with_path(state)}
    cut = [path for path, a in found.items() if a.sharding.spec == P(None, "fsdp")]
    assert sorted(p.rpartition("kernel")[0].count("mu") for p in cut) == [0, 0, 1]
    assert len(cut) == 3


def test_a_state_can_be_born_in_place():
    def make():
        return nnx.state(nnx.Linear(64, 256, rngs=nnx.Rngs(0)))

    there = shardings_of(jax.eval_shape(make), mesh=mesh_of(fsdp=8))
    kernel = jax.jit(make, out_shardings=there)()["kernel"].get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(64, 32)}
    np.testing.assert_array_equal(kernel, make()["kernel"].get_value())
