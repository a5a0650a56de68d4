"""Grouped products: empty groups, rows of no group, masked rows; forward, backward, interpreted."""

from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, mosaic, tuning
from pallas_kernels.accuracy import difference
from pallas_kernels.formats import WEIGHT
from pallas_kernels.grouped_matmul import align, grouped_matmul, masked_grouped_matmul, reference
from pallas_kernels.grouped_matmul.cases import TEST_CASES
from pallas_kernels.grouped_matmul.layout import num_tiles
from pallas_kernels.hopper_product import Tile
from pallas_kernels.quantize import quantize

CASE = Path(__file__).parent.parent / "data" / "S18" / "case.npz"
# Cosine difference from float64 on unrounded operands: half the squared relative error of two
# operands rounded to 24, 8 and 4 bits; fp8 of a handful of values is worse than its average.
LIMIT = {"float32": 1e-12, "bfloat16": 2e-5, "fp8": 3e-3}


def operands(sizes, rows, n, k, *, dtype=jnp.float32):
    rng = np.random.default_rng(len(sizes) + rows)
    x = rng.standard_normal((rows, k))
    x[sum(sizes) :] = np.nan
    w, grad = rng.standard_normal((len(sizes), k, n)), rng.standard_normal((rows, n))
    arrays = [jnp.asarray(t, dtype) for t in (x, w, grad)]
    return *arrays, jnp.asarray(sizes, jnp.int32)


def forward_and_backward(function, x, w, grad, sizes):
    @jax.jit
    def run(x, w, grad):
        out, vjp = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return out, *vjp(grad)

    return [np.asarray(t, np.float64) for t in run(x, w, grad)]


def of(precision, **options):
    return lambda x, w, sizes: grouped_matmul(
        x, w, group_sizes=sizes, precision=precision, **options
    )


@cache
def expected_of(*case):
    """What the reference gives for a case of the grid."""
    return forward_and_backward(reference.grouped_matmul, *operands(*case))


@pytest.mark.parametrize("precision", LIMIT)
@pytest.mark.parametrize(("sizes", "rows", "n", "k"), TEST_CASES[:4], ids=str)
def test_values_and_gradients_are_those_of_the_reference(sizes, rows, n, k, precision):
    x, w, grad, group_sizes = operands(sizes, rows, n, k)
    found = forward_and_backward(of(precision), x, w, grad, group_sizes)
    for ours, right in zip(found, expected_of(sizes, rows, n, k), strict=True):
        assert difference(ours, right).total <= LIMIT[precision]
    out, grad_x, grad_w = found
    assert not out[sum(sizes) :].any()
    assert not grad_x[sum(sizes) :].any()
    assert not grad_w[[i for i, size in enumerate(sizes) if not size]].any()


@pytest.mark.parametrize(("suffix", "rows"), [("", 12), ("_short", 9)])
def test_the_case_with_empty_groups_and_unowned_rows_is_right(suffix, rows):
    case = np.load(CASE)
    x, w, grad = (jnp.asarray(case[name]) for name in ("x" + suffix, "w", "dy"))
    sizes = jnp.asarray(case["sizes" + suffix], jnp.int32)
    out, grad_x, grad_w = forward_and_backward(of("float32"), x, w, grad, sizes)
    names = ("y_short_first9", "dx_short_first9") if suffix else ("y", "dx")
    np.testing.assert_allclose(out[:rows], case[names[0]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_x[:rows], case[names[1]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_w, case["dw" + suffix], rtol=1e-5, atol=1e-5)
    assert not grad_w[[0, 2, 3, 5]].any()


@partial(jax.jit, static_argnames="tile_rows")
def there_and_back(sizes, rows, *, tile_rows):
    """The layout, the rows at their aligned places, and those back where they were."""
    layout = align(sizes, num_rows=len(rows), tile_rows=tile_rows)
    aligned = layout.spread(rows)
    return layout, aligned, layout.collect(aligned)


@pytest.mark.parametrize("sizes", [(0, 4, 0, 0, 8, 0), (12,), (0, 0, 0), (1, 128, 129)], ids=str)
@pytest.mark.parametrize("tile_rows", [8, 128])
def test_every_group_starts_at_a_tile_and_every_row_comes_back(sizes, tile_rows):
    num_rows = sum(sizes) + 3
    rows = np.arange(1, num_rows + 1, dtype=np.float32)[:, None]
    found = there_and_back(np.asarray(sizes, np.int32), rows, tile_rows=tile_rows)
    layout, aligned, back = jax.tree.map(np.asarray, found)
    assert len(aligned) == tile_rows * num_tiles(num_rows, len(sizes), tile_rows=tile_rows)
    tiles = aligned.reshape(-1, tile_rows)
    first = 1
    for group, size in enumerate(sizes):
        mine = tiles[layout.tile_groups == group].reshape(-1)
        np.testing.assert_array_equal(mine[:size], np.arange(first, first + size))
        assert not mine[size:].any()
        first += size
    np.testing.assert_array_equal(back[: sum(sizes)], rows[: sum(sizes)])
    assert not back[sum(sizes) :].any()


@pytest.mark.parametrize("precision", LIMIT)
def test_rows_in_whole_tiles_are_multiplied_where_they_stand(precision):
    sizes, rng = np.asarray([128, 0, 256, 0, 0], np.int32), np.random.default_rng(3)
    used, rows = int(sizes.sum()), 640
    x, grad = rng.standard_normal((2, rows, 40)).astype(np.float32)
    w = rng.standard_normal((len(sizes), 40, 40)).astype(np.float32)
    x[used:] = grad[used:] = np.nan

    def run(x, w, grad, **options):
        sized = {"group_sizes": jnp.asarray(sizes), "precision": precision, **options}
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, **sized), x, w)
        return out, *pull(grad)

    there = jax.jit(partial(run, in_tiles=True))
    moved = jax.jit(run)(x, w, grad)
    for ours, theirs, is_rows in zip(there(x, w, grad), moved, (True, True, False), strict=True):
        end = used if is_rows else len(sizes)
        assert np.isfinite(ours[:end]).all()
        assert difference(np.asarray(ours[:end]), np.asarray(theirs[:end])).total <= 1e-9
    # Small arrays of numbers of tiles are looked up; rows are not.
    gathers = [line for line in there.lower(x, w, grad).as_text().splitlines() if "gather" in line]
    assert not any("x40x" in line for line in gathers)


def test_rows_that_are_no_whole_tiles_cannot_stay():
    sizes = jnp.asarray([128, 2], jnp.int32)
    with pytest.raises(ValueError, match="130 rows are no whole tiles of 128"):
        grouped_matmul(
            jnp.ones((130, 8)), jnp.ones((2, 8, 8)), group_sizes=sizes, precision="float32",
            in_tiles=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "room"), [("float32", 6), ("float32", 130), ("bfloat16", 6), ("fp8", 6)]
)
def test_only_the_first_rows_of_each_masked_group_count(precision, room):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, room, 40)), rng.standard_normal((3, 40, 16))
    sizes = np.asarray([6, 0, 2], np.int32)
    for group, size in enumerate(sizes):
        x[group, size:] = np.nan
    out = jax.jit(masked_grouped_matmul, static_argnames="precision")(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(w, jnp.float32),
        group_sizes=jnp.asarray(sizes),
        precision=precision,
    )
    expected = np.where(np.isnan(x).any(-1, keepdims=True), 0.0, np.nan_to_num(x) @ w)
    assert difference(np.asarray(out), expected).total <= LIMIT[precision]
    assert not np.asarray(out)[1].any()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_over_all_the_room_are_those_of_the_grouped_product(precision):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.normal(k, s) for k, s in zip(keys, [(3, 6, 40), (3, 40, 16)], strict=False))
    weight = jax.random.normal(keys[2], (3, 6, 16))
    sizes = jnp.asarray([6, 0, 2])

    def loss(x, w, *, backend):
        out = masked_grouped_matmul(x, w, group_sizes=sizes, precision=precision, backend=backend)
        return (out * weight).sum()

    found = jax.grad(partial(loss, backend=None), (0, 1))(x, w)
    expected = jax.grad(partial(loss, backend="xla"), (0, 1))(x, w)
    for ours, right in zip(found, expected, strict=True):
        assert difference(np.asarray(ours), np.asarray(right)).total <= LIMIT[precision]


@pytest.mark.parametrize("in_tiles", [False, True])
def test_matrices_in_squares_are_multiplied_as_they_are(in_tiles):
    sizes, rows, n, k = (128, 0, 256), 384, 40, 136
    x, w, grad, group_sizes = operands(sizes, rows, n, k)
    squares = jax.jit(partial(quantize, format=WEIGHT))(w)
    named = {"group_sizes": group_sizes, "precision": "fp8", "in_tiles": in_tiles}

    def run(x, w, grad, **options):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, **named, **options), x, w)
        return out, *pull(grad)

    expected = jax.jit(run)(x, w, grad)
    beside = jax.jit(run)(x, jnp.full_like(w, jnp.nan), grad, quantized=squares)
    for ours, right in zip(beside, expected, strict=True):
        np.testing.assert_array_equal(ours, right)
    alone = jax.jit(lambda x, w: jax.vjp(lambda x: grouped_matmul(x, w, **named), x))
    out, pull = alone(x, squares)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(pull(grad)[0], expected[1])


def test_matrices_in_squares_are_for_fp8_alone():
    x, w, _, sizes = operands((2, 3), 5, 8, 16)
    with pytest.raises(ValueError, match="w is in e4m3 128x128 float32: precision='bfloat16'"):
        grouped_matmul(
            x, quantize(w, format=WEIGHT), group_sizes=sizes, precision="bfloat16"
        )  # fmt: skip


def test_operands_that_do_not_fit_are_refused_with_their_shapes():
    x, w, _, sizes = operands((2, 3), 5, 8, 16)
    with pytest.raises(ValueError, match=r"\(5, 16\)"):
        grouped_matmul(x, w[:, :8], group_sizes=sizes, precision="float32")


@pytest.mark.parametrize(("precision", "cluster"), [("bfloat16", 1), ("fp8", 1), ("bfloat16", 2)])
def test_the_hopper_kernels_equal_the_xla_path_forward_and_backward(precision, cluster):
    sizes, rows, n, k = (0, 9, 0, 5), 16, 24, 40
    x, w, grad, group_sizes = operands(sizes, rows, n, k, dtype=jnp.bfloat16)
    expected = forward_and_backward(of(precision), x, w, grad, group_sizes)
    # Blocks of a cluster share each copy, forward of rows and for the weights' gradient of columns.
    tile = Tile(num_groups=2, columns=64, num_stages=2, cluster=cluster)
    table = tuning.Table("NVIDIA H200")
    if cluster > 1:
        table = table.with_entry(f"grouped_{precision}", f"g4_n{n}_k{k}", settings=asdict(tile))
    with mosaic.interpreted(), hardware.target("NVIDIA H200"), tuning.override(table):
        run = of(precision, backend="mosaic_gpu")
        found = forward_and_backward(run, x, w, grad, group_sizes)
    for ours, right in zip(found, expected, strict=True):
        assert difference(ours, right).total <= 5e-6
    assert not found[2][[0, 2]].any()


def expert_parallel(precision):
    """Gradients for both operands with two experts on each of four devices."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    own = jax.P("expert")

    def loss(x, w, sizes):
        return (grouped_matmul(x, w, group_sizes=sizes, precision=precision) ** 2).sum()

    return jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=(own, own, own), out_specs=(own, own)
    )


@pytest.mark.multidevice
@pytest.mark.parametrize("precision", LIMIT)
def test_devices_that_get_no_token_give_zeros_and_do_not_disturb_the_others(precision):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 40)).astype(np.float32)
    w = rng.standard_normal((8, 40, 24)).astype(np.float32)
    sizes = np.asarray([0, 4, 0, 0, 3, 1, 0, 0], np.int32)
    found = jax.jit(expert_parallel(precision))(x, w, sizes)
    grad_x, grad_w = (np.asarray(grad) for grad in found)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def expected_of_device(x, w, sizes):
        return (reference.grouped_matmul(x, w, sizes) ** 2).sum()

    for device in range(4):
        rows, experts = slice(4 * device, 4 * device + 4), slice(2 * device, 2 * device + 2)
        expected = expected_of_device(x[rows], w[experts], sizes[experts])
        for ours, right in zip((grad_x[rows], grad_w[experts]), expected, strict=True):
            assert difference(ours, np.asarray(right)).total <= 4 * LIMIT[precision]
    assert not grad_w[[0, 2, 3, 6, 7]].any()


@pytest.mark.multidevice
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_the_hopper_kernels_lower_inside_a_shard_map(precision):
    shapes = ((1024, 256), (8, 256, 128), (8,))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    with hardware.target("NVIDIA H200"):
        traced = jax.jit(expert_parallel(precision)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 3
