"""The Hopper grouped kernels on the card: empty groups, odd sizes, poisoned memory, repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import difference
from pallas_kernels.bench.grouped_matmul import tiles_to_try
from pallas_kernels.grouped_matmul import grouped_matmul, masked_grouped_matmul
from pallas_kernels.grouped_matmul.cases import TEST_CASES
from pallas_kernels.tuning import Table
from tests.pallas_kernels.test_fp8_on_gpu import poison_memory

pytestmark = pytest.mark.gpu

LARGE = [
    ((0, 700, 0, 1, 300, 23), 1030, 1408, 2048),
    ((4096,), 4097, 576, 1536),
    ((0,) * 31 + (900,), 1000, 2112, 512),
]


def operands(sizes, rows, n, k):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-6, 7, (rows, 1))
    x[sum(sizes) :] = np.nan
    w = rng.standard_normal((len(sizes), k, n)) * 2.0 ** rng.integers(-6, 7, (len(sizes), 1, 1))
    grad = rng.standard_normal((rows, n))
    arrays = [jnp.asarray(t, jnp.bfloat16) for t in (x, w, grad)]
    return *arrays, jnp.asarray(sizes, jnp.int32)


def step(precision):
    def run(x, w, grad, sizes):
        out, vjp = jax.vjp(
            lambda x, w: grouped_matmul(x, w, group_sizes=sizes, precision=precision), x, w
        )
        return out, *vjp(grad)

    return jax.jit(run)


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("sizes", "rows", "n", "k"), [*TEST_CASES[::3], *LARGE], ids=str)
def test_forward_and_backward_equal_the_xla_path(sizes, rows, n, k, precision):
    arguments = operands(sizes, rows, n, k)
    with hardware.target("cpu"):
        expected = step(precision)(*arguments)
    poison_memory()
    found = step(precision)(*arguments)
    for ours, right in zip(found, expected, strict=True):
        a, b = (np.asarray(t, np.float64) for t in (ours, right))
        assert difference(a, b).total <= 1e-5
    assert not np.asarray(found[0], np.float64)[sum(sizes) :].any()
    empty = [i for i, size in enumerate(sizes) if not size]
    assert not np.asarray(found[2], np.float64)[empty].any()
    poison_memory()
    for ours, again in zip(found, step(precision)(*arguments), strict=True):
        assert jnp.array_equal(ours, again)


@pytest.mark.parametrize(
    ("precision", "tile"), [(p, t) for p in ("bfloat16", "fp8") for t in tiles_to_try(p)], ids=str
)
def test_every_tile_is_right_where_groups_end_anywhere(precision, tile):
    """Five groups of uneven sizes, one empty, over an odd number of row tiles."""
    x, w, _, sizes = operands((0, 700, 129, 1, 300), 1130, 1408, 2048)
    table = Table(jax.devices()[0].device_kind).with_entry(
        f"grouped_{precision}", "g5_n1408_k2048", settings=tile.__dict__
    )

    def run(x, w):
        return grouped_matmul(x, w, group_sizes=sizes, precision=precision)

    with hardware.target("cpu"):
        expected = np.asarray(jax.jit(run)(x, w), np.float64)
    with tuning.override(table):
        ours = jax.jit(lambda x, w: run(x, w)).lower(x, w).compile()
    poison_memory()
    first = ours(x, w)
    assert difference(np.asarray(first, np.float64), expected).total <= 1e-5
    for _ in range(3):
        poison_memory()
        assert jnp.array_equal(ours(x, w), first)


@pytest.mark.parametrize("room", [100, 192])
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_masked_groups_equal_the_xla_path(precision, room):
    sizes = jnp.asarray([20, 0, 33, 1, room, 7], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (6, room, 1024), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (6, 1024, 576), jnp.bfloat16)
    x = jnp.where(jnp.arange(room)[None, :, None] < sizes[:, None, None], x, jnp.nan)

    def run(x, w):
        return masked_grouped_matmul(x, w, group_sizes=sizes, precision=precision)

    with hardware.target("cpu"):
        expected = jax.jit(run)(x, w)
    poison_memory()
    a, b = (np.asarray(t, np.float64) for t in (jax.jit(run)(x, w), expected))
    assert difference(a, b).total <= 1e-5
