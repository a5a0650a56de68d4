"""Partitioning rules of opaque calls: what stays local, what is summed, what is never cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import sharded
from pallas_kernels.sharded import ShardRule, batched, partitioned

pytestmark = pytest.mark.multidevice

RULE = ShardRule(
    operands=("mk", "nk", "mK", "NK"),
    results=("mn",),
    blocks={"K": ("k", 128), "N": ("n", 128)},
    contracted="k",
)
M, N, K = 64, 1024, 1024
# Placement of (a, b, a_scales, b_scales) → shape of a and b on one device.
PLACEMENTS = {
    "rows and columns": ((P("data"), P("tensor"), P("data"), P("tensor")), (32, K), (256, K)),
    "inner dim": (
        (P("data", "tensor"), P(None, "tensor"), P("data", "tensor"), P(None, "tensor")),
        (32, 256),
        (N, 256),
    ),
    "inner dim, scales whole": ((P("data"), P(None, "tensor"), P(), P()), (32, 256), (N, 256)),
    "replicated": ((P(), P(), P(), P()), (M, K), (N, K)),
}


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def make_operands():
    rng = np.random.default_rng(0)
    shapes = ((M, K), (N, K), (M, K // 128), (N // 128, K // 128))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def recorded_call(seen):
    def call(a, b, a_scales, b_scales, dtype=jnp.float32):
        seen.append((a.shape, b.shape))
        full_b = b * jnp.repeat(jnp.repeat(b_scales, 128, 0), 128, 1)
        product = jnp.dot(
            a * jnp.repeat(a_scales, 128, 1), full_b.T, precision=jax.lax.Precision.HIGHEST
        )
        return product.astype(dtype)

    return call


@pytest.mark.parametrize("name", PLACEMENTS)
def test_shards_stay_where_they_are_and_the_result_is_that_of_one_device(name):
    specs, a_shape, b_shape = PLACEMENTS[name]
    mesh, seen = make_mesh(), []
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    places = [NamedSharding(mesh, spec) for spec in specs]
    operands = make_operands()
    on_mesh = [jax.device_put(x, place) for x, place in zip(operands, places, strict=True)]
    compiled = jax.jit(call).lower(*on_mesh).compile()
    assert seen[-1] == (a_shape, b_shape)
    if name != "inner dim, scales whole":
        assert "all-gather" not in compiled.as_text()
    assert ("all-reduce" in compiled.as_text()) == ("inner" in name)
    expected = recorded_call([])(*map(jnp.asarray, operands))
    np.testing.assert_allclose(compiled(*on_mesh), expected, rtol=1e-4, atol=1e-3)


def test_an_inner_dim_that_is_not_whole_blocks_on_each_device_is_not_cut():
    mesh, seen = make_mesh(), []
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    a, b, a_scales, b_scales = make_operands()
    place = NamedSharding(mesh, P(None, "tensor"))
    operands = (
        jax.device_put(a[:, :768], place),
        jax.device_put(b[:, :768], place),
        a_scales[:, :6],
        b_scales[:, :6],
    )
    jax.jit(call).lower(*operands).compile()
    assert seen[-1] == ((M, 768), (N, 768))


def test_rows_that_a_reshape_leaves_on_a_part_of_an_axis_are_gathered_and_right():
    mesh, seen = make_mesh(), []

    def product(a, b):
        seen.append(a.shape)
        return jnp.einsum("smk,nk->smn", a, b, precision=jax.lax.Precision.HIGHEST)

    call = partitioned(product, ShardRule(operands=("smk", "nk"), results=("smn",)))
    a, b = make_operands()[:2]
    on_mesh = jax.device_put(a, NamedSharding(mesh, P("tensor")))
    # Four devices cut the rows; two pairs of them cut what is now the first dim.
    found = jax.jit(lambda a, b: call(a.reshape(2, -1, K), b))(on_mesh, b)
    np.testing.assert_allclose(found.reshape(M, N), a @ b.T, rtol=1e-4, atol=1e-3)
    assert seen[-1] == (2, M // 2, K)


def test_a_fully_manual_mesh_calls_the_kernel_on_its_shards():
    mesh, seen = make_mesh(), []

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data"), P()), out_specs=P("data")
    )
    def run(*operands):
        assert sharded.refuses_mesh() is None
        return partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)(*operands)

    operands = make_operands()
    expected = recorded_call([])(*map(jnp.asarray, operands))
    np.testing.assert_allclose(jax.jit(run)(*operands), expected, rtol=1e-4, atol=1e-3)
    assert seen == [((32, K), (N, K))]


def test_mapping_over_the_stacked_operands_is_one_call_and_over_others_one_each():
    seen = []

    def call(x, y):
        seen.append((x.shape, y.shape))
        return x * y.sum()

    run = batched(call, stacked=(0,))
    x, y = jnp.ones((3, 2)), jnp.ones((3, 5))
    assert jax.vmap(run, in_axes=(0, None))(x, y[0]).shape == (3, 2)
    assert seen[-1] == ((3, 2), (5,))
    assert jnp.array_equal(jax.vmap(run)(x, y), 5 * x)
    assert ((2,), (5,)) in seen


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0)])
def test_mapping_over_a_call_with_several_results_maps_each(in_axes):
    run = batched(lambda x, y: (x * y.sum(), {"scale": x + y.sum()}), stacked=(0,))
    x, y = jnp.ones((3, 2)), jnp.ones((3, 5))
    y = y if in_axes[1] == 0 else y[0]
    product, rest = jax.vmap(run, in_axes=in_axes)(x, y)
    assert jnp.array_equal(product, 5 * x)
    assert jnp.array_equal(rest["scale"], x + 5)
