"""The Triton kernels on the card: odd sizes, poisoned memory, dead slots, repeatability."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import triton, tuning
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, Quantized
from pallas_kernels.fp8_matmul import fp8_matmul, jax_triton
from pallas_kernels.fp8_matmul.cases import FEW_ROWS, tuning_key
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.quantize import quantize, quantize_both, requantize_transposed
from pallas_kernels.tuning import Table
from pallas_kernels.widened_matmul import widened_matmul
from tests.pallas_kernels.latent_cache import make_batch
from tests.pallas_kernels.operands import (
    dequantized,
    matmul_operands,
    squares_apart,
    steps_apart,
    tiles_by_numpy,
    varied,
    widened_operands,
)
from tests.pallas_kernels.test_fp8_on_gpu import check, poison_memory
from tests.pallas_kernels.test_mla_on_gpu import OPTIONS, lengths_of, reference

MISSING = triton.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

# Few rows and many, one and several tiles, parts of K; every dim odd somewhere.
SHAPES = [
    (1, 1, 1),
    (7, 129, 13),
    (13, 576, 4097),
    (127, 1, 1152),
    (128, 4096, 7168),
    (129, 13, 576),
    (576, 4097, 7),
    (4097, 1152, 129),
]
TILES = [
    *jax_triton.TILES,
    *(
        jax_triton.Tile(left=64, right=128, num_warps=4, num_stages=4, num_splits=splits)
        for splits in (1, 5)
    ),
]


def product(a, b, **options):
    return jax.jit(lambda a, b: fp8_matmul(a, b, backend="jax_triton", **options))(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_products_are_right_in_every_row(shape):
    a, b = matmul_operands(*shape)
    poison_memory()
    check(product(a, b), a, b)


@pytest.mark.parametrize("b_format", [WEIGHT, ACTIVATION], ids=str)
def test_float32_products_are_right(b_format):
    a, b = matmul_operands(1030, 577, 1152, b_format=b_format)
    poison_memory()
    check(product(a, b, out_dtype=jnp.float32), a, b, out_dtype="float32")


@pytest.mark.parametrize("rows", [100, 300])
def test_mixed_elements_are_right_and_chosen_without_asking(rows):
    a = quantize(jnp.asarray(varied((rows, 300), seed=0)), format=Format((1, 128), element="e5m2"))
    _, b = matmul_operands(rows, 260, 300)
    poison_memory()
    asked = product(a, b)
    check(asked, a, b)
    assert jnp.array_equal(jax.jit(fp8_matmul)(a, b), asked)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_is_right_and_repeats_bit_for_bit(tile):
    m, n, k = (1000 if tile in jax_triton.TILES else FEW_ROWS), 2112, 1536
    a, b = matmul_operands(m, n, k)
    table = Table(jax.devices()[0].device_kind).with_entry(
        jax_triton.TUNED, tuning_key(m, n, k), settings=tile.__dict__
    )
    with tuning.override(table):
        run = jax.jit(lambda a, b: fp8_matmul(a, b, backend="jax_triton")).lower(a, b).compile()
    poison_memory()
    first = run(a, b)
    check(first, a, b)
    for _ in range(3):
        poison_memory()
        assert jnp.array_equal(run(a, b), first)


def test_stacked_and_mapped_activations_are_the_rows_of_one_product():
    a, b = matmul_operands(6, 16, 130)
    whole = product(a, b)
    halves = jax.tree.map(lambda x: x.reshape(2, 3, -1), a)
    stack = type(a)(halves.values, halves.scales, 3, a.columns, a.format)
    assert jnp.array_equal(product(stack, b).reshape(6, 16), whole)
    assert jnp.array_equal(jax.vmap(lambda a: product(a, b))(stack).reshape(6, 16), whole)


# Whole blocks, edges in each dim and in both, one column, more than one wave of programs.
QUANTIZED = [(128, 256), (200, 130), (129, 4097), (300, 1), (4096, 7168)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", QUANTIZED, ids=str)
def test_quantising_is_the_reference_s_but_for_ties(shape, dtype):
    x = np.array(varied(shape, seed=2), np.float32)
    x[0, :3] = (np.nan, np.inf, -np.inf)[: shape[1]]
    x[-1, :] = 0.0
    x = jnp.asarray(x, dtype)

    given = quantize(x, format=ACTIVATION, backend="xla")

    def run():
        options = {"format": ACTIVATION, "backend": "jax_triton"}
        again = requantize_transposed(given, backend="jax_triton")
        return (quantize(x, **options), *quantize_both(x, **options), again)

    poison_memory()
    found = jax.jit(run)()
    plain, turned = tiles_by_numpy(x), tiles_by_numpy(x.T)
    expected = (plain, plain, turned, tiles_by_numpy(dequantized(given).T))
    for q, tiles in zip(found, expected, strict=True):
        apart = steps_apart(q, *tiles)
        # A quotient at the middle between two elements may go either way.
        assert apart.max(initial=0) <= 1
        assert (apart > 0).mean() <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(128, 256), (3, 200, 130), (4, 2560, 6912)], ids=str)
def test_squares_are_numpy_s_and_so_is_their_transpose(shape, dtype):
    poison_memory()
    apart = squares_apart(shape, dtype)
    assert apart.max() <= 1
    assert (apart > 0).mean() <= 1e-4


@pytest.mark.parametrize("shared", [True, False], ids=["one input", "an input each"])
@pytest.mark.parametrize(
    "sizes", [(64, 16, 1408, 2048), (6, 64, 2048, 1408), (1, 100, 3072, 2048), (3, 7, 200, 130)]
)
def test_widened_weights_multiply_right_in_every_row(sizes, shared):
    x, w, expected = widened_operands(*sizes, dtype="bfloat16", shared=shared)
    order = np.arange(sizes[0])[::-1]
    read = order % 3 != 1
    poison_memory()
    run = jax.jit(lambda x, w, m: widened_matmul(x, w, matrices=m, backend="jax_triton"))
    out = run(x if shared else x[order], w, np.where(read, order, -1))
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    measured = difference(out[read], expected[order][read])
    assert measured.within(TOLERANCES["fp8_matmul", "bfloat16"]), measured


def test_every_value_of_8_bits_is_widened_as_it_is():
    # Each at even columns and odd ones, but NaN.
    codes = np.add.outer(np.arange(128), np.arange(256)).astype(np.uint8).reshape(2, 128, 128)
    codes[codes % 128 == 127] = 0
    values = codes.view(ml_dtypes.float8_e4m3fn)
    w = Quantized(jnp.asarray(values), jnp.ones((2, 1, 1)), 128, 128, WEIGHT)
    out = widened_matmul(jnp.eye(128, dtype=jnp.bfloat16), w, backend="jax_triton")
    np.testing.assert_array_equal(np.asarray(out, np.float32).mT, values.astype(np.float32))


def decode(batch, *, split_len):
    run = lambda b: mla_decode(**b, **OPTIONS, split_len=split_len, backend="jax_triton")
    return jax.jit(run)(batch)


def check_decode(batch, *, split_len):
    poison_memory()
    found, expected = decode(batch, split_len=split_len), reference(batch)
    as64 = lambda t: np.asarray(t.astype(jnp.float32), np.float64)
    measured = difference(as64(found.out), as64(expected.out))
    assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_queries"), [(1, 1), (9, 3), (63, 1), (128, 1), (126, 2)]
)
def test_every_number_of_heads_and_queries_is_right(num_heads, num_queries):
    lengths = [0, *lengths_of(5, 300)]
    batch = make_batch(lengths, num_heads, num_queries=num_queries, dtype=jnp.bfloat16)
    check_decode(batch, split_len=128)


@pytest.mark.parametrize("split_len", [1024, None])
@pytest.mark.parametrize(("batch_size", "largest"), [(1, 4096), (16, 1500)])
def test_ragged_lengths_are_right_whole_and_in_parts(batch_size, largest, split_len):
    batch = make_batch(lengths_of(batch_size, largest), 128, dtype=jnp.bfloat16)
    check_decode(batch, split_len=split_len)


@pytest.mark.parametrize("num_heads", [12, 128])
def test_a_row_is_the_same_bit_for_bit_alone_again_and_in_a_batch(num_heads):
    batch = make_batch(lengths_of(5, 2500), num_heads, dtype=jnp.bfloat16)
    together = decode(batch, split_len=1024)
    poison_memory()
    again = decode(batch, split_len=1024)
    assert jnp.array_equal(again.out, together.out)
    assert jnp.array_equal(again.lse, together.lse)
    for row in range(5):
        one = {name: array[row : row + 1] for name, array in batch.items() if name != "cache"}
        alone = decode({**one, "cache": batch["cache"]}, split_len=1024)
        assert jnp.array_equal(alone.out[0], together.out[row])
        assert jnp.array_equal(alone.lse[0], together.lse[row])


def test_another_page_and_narrow_latents_are_right():
    options = {"latent": 64, "sm_scale": 0.2}
    batch = make_batch(
        [0, 47, 333], 20, num_queries=2, page=48, latent=64, rope=16, dtype=jnp.bfloat16
    )
    poison_memory()
    found, expected = (
        jax.jit(lambda b, name=name: mla_decode(**b, **options, split_len=96, backend=name))(batch)
        for name in ("jax_triton", "xla")
    )
    measured = difference(*(np.asarray(t.out, np.float64) for t in (found, expected)))
    assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-4, atol=1e-5)
