"""Opaque calls in a shard_map that leaves axes automatic, and on explicit axes: the same cuts."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import placements, sharded
from pallas_kernels.sharded import ShardRule, on_automatic_axes, partitioned
from tests.pallas_kernels.test_sharded import RULE, K, M, N, make_operands, recorded_call

pytestmark = pytest.mark.multidevice

STAGES = 2
# Where a, b and their scales lie on data x tensor → shapes of a and b on one device.
PLACEMENTS = {
    "rows and columns": ((P("data"), P("tensor"), P("data"), P("tensor")), (32, K), (512, K)),
    "columns of both axes": ((P(), P(("tensor", "data")), P(), P()), (M, K), (256, K)),
    "inner dim": (
        (P("data", "tensor"), P(None, "tensor"), P("data", "tensor"), P(None, "tensor")),
        (32, 512),
        (N, 512),
    ),
    "inner dim, both axes": (
        (P(None, ("data", "tensor")), P(None, ("data", "tensor")), P(), P()),
        (M, 256),
        (N, 256),
    ),
    # XLA counts a group's devices by the cuts of the result: here not in the order of the mesh.
    "columns and inner dim": (
        (P(None, "data"), P("tensor", "data"), P(None, "data"), P("tensor", "data")),
        (M, 512),
        (512, 512),
    ),
    "rows and columns swapped": (
        (P("tensor"), P("data"), P("tensor"), P("data")),
        (32, K),
        (512, K),
    ),
    "replicated": ((P(), P(), P(), P()), (M, K), (N, K)),
}
ORDERS = (("stage", "data", "tensor"), ("data", "stage", "tensor"), ("data", "tensor", "stage"))


def make_mesh(names=ORDERS[0], kind=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), names, axis_types=(kind,) * 3)


def staged_operands():
    """A stage's activations and weights each, and the products."""
    first, second = make_operands(), [2 * x[::-1] for x in make_operands()]
    expected = [recorded_call([])(*map(jnp.asarray, operands)) for operands in (first, second)]
    return [np.stack(pair) for pair in zip(first, second, strict=True)], np.stack(expected)


def in_a_stage(call, mesh, *, check_vma=True):
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P("stage"),
        out_specs=P("stage"),
        axis_names={"stage"},
        check_vma=check_vma,
    )
    def run(*operands):
        assert sharded.refuses_mesh() is None
        return call(*(x[0] for x in operands))[None]

    return run


def placed(mesh, operands, specs, first="stage"):
    return [
        jax.device_put(x, NamedSharding(mesh, P(first, *spec)))
        for x, spec in zip(operands, specs, strict=True)
    ]


def check(run, operands, expected, *, gathers=False, sums=False):
    compiled = jax.jit(run).lower(*operands).compile()
    text = compiled.as_text()
    assert ("all-gather" in text) == gathers
    assert ("all-reduce" in text) == sums
    # A sum is rounded by the size of its terms, not by its own: where they cancel little is left.
    np.testing.assert_allclose(
        compiled(*operands), expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max()
    )


@pytest.mark.parametrize("names", ORDERS, ids="-".join)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_shard_map_over_one_axis_leaves_the_shards_of_the_others_where_they_are(placement, names):
    specs, a_shape, b_shape = PLACEMENTS[placement]
    mesh, seen = make_mesh(names), []
    run = in_a_stage(partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32), mesh)
    operands, expected = staged_operands()
    check(run, placed(mesh, operands, specs), expected, sums="inner" in placement)
    assert seen[-1] == (a_shape, b_shape)


def test_a_shard_map_that_does_not_check_its_types_is_served_too():
    specs, a_shape, b_shape = PLACEMENTS["columns and inner dim"]
    mesh, seen = make_mesh(), []
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    operands, expected = staged_operands()
    run = in_a_stage(call, mesh, check_vma=False)
    check(run, placed(mesh, operands, specs), expected, sums=True)
    assert seen[-1] == (a_shape, b_shape)


def test_steps_in_a_loop_in_a_shard_map_keep_their_shards():
    specs, a_shape, b_shape = PLACEMENTS["inner dim"]
    mesh, seen = make_mesh(), []
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)

    def twice(*operands):
        total = jnp.zeros_like(operands[0], shape=(M, N))
        return jax.lax.fori_loop(0, 2, lambda _, total: total + call(*operands), total)

    operands, expected = staged_operands()
    check(in_a_stage(twice, mesh), placed(mesh, operands, specs), 2 * expected, sums=True)
    assert seen[-1] == (a_shape, b_shape)


def test_an_order_of_devices_that_cannot_be_read_gathers_and_says_so(monkeypatch, caplog):
    specs, _, _ = PLACEMENTS["columns and inner dim"]
    mesh, seen = make_mesh(), []
    monkeypatch.setattr(placements, "read_group", lambda *_: None)
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    operands, expected = staged_operands()
    check(in_a_stage(call, mesh), placed(mesh, operands, specs), expected, gathers=True)
    assert seen[-1] == ((M, K), (N, K))
    assert "kernel.gathered" in caplog.messages


def test_the_order_of_a_group_is_read_from_where_its_markers_lie():
    def marker(mesh, *axes):
        return jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P(*axes)))

    mesh = AbstractMesh((2, 2), ("tensor", "data"))
    found = [marker(mesh, "data"), marker(mesh, "tensor")]
    group = placements.read_group(("data", "tensor"), found)
    assert group.axis_names == ("tensor", "data")
    assert placements.read_group(("data", "tensor"), [found[0], found[0]]) is None
    assert placements.read_group(("data", "tensor"), [found[0], marker(mesh)]) is None


def rows_in_a_shard_map(call):
    """`call` in a shard_map over "data", without a mesh of its own."""
    return jax.shard_map(
        call, in_specs=(P("data"), P(), P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )


def test_a_shard_map_in_a_shard_map_leaves_one_axis_to_the_partitioner():
    mesh, seen = make_mesh(), []
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    operands, expected = staged_operands()
    on_mesh = placed(mesh, operands, (P(), P("tensor"), P(), P("tensor")))
    with jax.set_mesh(mesh):
        check(in_a_stage(rows_in_a_shard_map(call), mesh), on_mesh, expected)
    assert seen[-1] == ((32, K), (512, K))


def test_a_shard_map_in_a_shard_map_is_refused_where_no_mesh_is_set():
    mesh, reasons = make_mesh(), []

    def call(a, *_):
        reasons.append(sharded.refuses_mesh())
        return a

    jax.jit(in_a_stage(rows_in_a_shard_map(call), mesh))(*staged_operands()[0])
    assert "jax.set_mesh" in reasons[0]


def test_sums_over_two_axes_in_one_program_are_each_over_their_own():
    mesh = make_mesh()
    call = partitioned(recorded_call([]), RULE, sum_dtype=jnp.float32)
    operands, expected = staged_operands()
    names = [n for n in PLACEMENTS if "inner dim" in n]
    places = [placed(mesh, operands, PLACEMENTS[name][0]) for name in names]

    def run(*groups):
        return [in_a_stage(call, mesh)(*group) for group in groups]

    for out in jax.jit(run)(*places):
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


def two_results(a, b):
    return jnp.tanh(a), b + a.sum(1, keepdims=True)


@pytest.mark.parametrize(
    "specs", [(P("data"), P("data", "tensor")), (P("tensor"), P(None, "data"))]
)
def test_several_results_lie_as_their_own_dims_do(specs):
    mesh = make_mesh()
    rule = ShardRule(operands=("mk", "mn"), results=("mk", "mn"), whole="k")
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((STAGES, *s)).astype(np.float32) for s in ((8, 4), (8, 16)))
    run = jax.shard_map(
        lambda a, b: jax.tree.map(lambda x: x[None], partitioned(two_results, rule)(a[0], b[0])),
        mesh=mesh,
        in_specs=P("stage"),
        out_specs=P("stage"),
        axis_names={"stage"},
    )
    found = jax.jit(run)(*placed(mesh, (a, b), specs))
    for out, expected in zip(found, jax.vmap(two_results)(a, b), strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_mesh", [True, False], ids=["mesh set", "mesh from the operands"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_explicit_axes_are_served_and_the_result_says_where_it_lies(placement, with_mesh):
    specs, a_shape, b_shape = PLACEMENTS[placement]
    mesh, seen = make_mesh(kind=AxisType.Explicit), []
    operands = make_operands()
    on_mesh = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
    ]
    types = []

    def run(*operands):
        out = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)(*operands)
        types.append(jax.typeof(out).sharding.spec)
        return out

    with jax.set_mesh(mesh) if with_mesh else contextlib.nullcontext():
        expected = recorded_call([])(*map(jnp.asarray, operands))
        check(run, on_mesh, expected, sums="inner" in placement)
    assert seen[-1] == (a_shape, b_shape)
    entries = [(*spec, None, None)[0] for spec in specs[:2]]
    assert types[0] == P(*entries)


def test_a_shard_map_on_explicit_axes_leaves_the_others_where_they_are():
    specs, a_shape, b_shape = PLACEMENTS["columns and inner dim"]
    mesh, seen = make_mesh(kind=AxisType.Explicit), []
    operands, expected = staged_operands()
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    with jax.set_mesh(mesh):
        check(in_a_stage(call, mesh), placed(mesh, operands, specs), expected, sums=True)
    assert seen[-1] == (a_shape, b_shape)


def test_explicit_and_automatic_axes_are_served_side_by_side():
    specs, a_shape, b_shape = PLACEMENTS["columns and inner dim"]
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh, seen = jax.make_mesh((2, 2, 2), ORDERS[0], axis_types=kinds), []
    operands = make_operands()
    on_mesh = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
    ]
    expected = recorded_call([])(*map(jnp.asarray, operands))
    call = partitioned(recorded_call(seen), RULE, sum_dtype=jnp.float32)
    with jax.set_mesh(mesh):
        check(call, on_mesh, expected, sums=True)
    assert seen[-1] == (a_shape, b_shape)


def test_steps_that_reshape_run_on_automatic_axes_and_their_result_is_typed_by_letters():
    mesh = make_mesh(kind=AxisType.Explicit)
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("data", "tensor")))
    w = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("tensor", "stage")))
    rule = ShardRule(operands=("mk", "kn"), results=("mn",), contracted="k")

    def product(x, w):
        return (x.reshape(2, 4, 4, 4).reshape(8, 16)) @ w

    with pytest.raises(Exception, match="reshape is not supported"):
        jax.jit(product)(x, w)
    out = jax.jit(on_automatic_axes(product, rule))(x, w)
    assert jax.typeof(out).sharding.spec == P("data", "stage")
    assert jnp.array_equal(out, jnp.full((8, 4), 16.0))
