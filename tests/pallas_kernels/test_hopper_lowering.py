"""Every Hopper kernel at odd sizes passes the GPU compiler's checks of shapes and layouts.

On the CPU and without a plugin: the interpreter copies any shape, the compiler does not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hardware, mosaic
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.fp8_matmul.mosaic_gpu import DECODE_TILES
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import TEST_CASES
from pallas_kernels.grouped_matmul.mosaic_bfloat16 import TILE, grouped_product
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table, override

# Odd in every dim; few and many rows; results narrower than a tile.
SHAPES = [(1, 1, 1), (7, 129, 13), (13, 576, 4097), (129, 13, 1152), (1152, 4097, 127)]


def lower(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with hardware.target("NVIDIA H200"):
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def product(x, w, *, w_format, out_dtype):
    a, b = quantize(x, format=ACTIVATION), quantize(w, format=w_format)
    return fp8_matmul(a, b, out_dtype=out_dtype, backend="mosaic_gpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("w_format", "out_dtype"),
    [(WEIGHT, jnp.bfloat16), (WEIGHT, jnp.float32), (ACTIVATION, jnp.float32)],
    ids=["weights", "weights float32", "wgrad"],
)
def test_the_block_scaled_product_compiles_at_odd_sizes(shape, w_format, out_dtype):
    m, n, k = shape
    run = partial(product, w_format=w_format, out_dtype=out_dtype)
    lower(run, ((m, k), jnp.bfloat16), ((n, k), jnp.bfloat16))


@pytest.mark.parametrize("tile", DECODE_TILES[::3], ids=str)
def test_every_number_of_few_rows_compiles_in_several_steps(tile):
    for m in (1, 13, 100):
        table = Table("NVIDIA H200").with_entry(
            "fp8_matmul", f"m{1 << (m - 1).bit_length()}_n300_k1536", settings=tile.__dict__
        )
        with override(table):
            run = partial(product, w_format=WEIGHT, out_dtype=jnp.bfloat16)
            lower(run, ((m, 1536), jnp.bfloat16), ((300, 1536), jnp.bfloat16))


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("sizes", "rows", "n", "k"), TEST_CASES[::2], ids=str)
def test_grouped_products_compile_at_odd_sizes_forward_and_backward(sizes, rows, n, k, precision):
    def step(x, w, grad, sizes):
        out, vjp = jax.vjp(
            lambda x, w: grouped_matmul(
                x, w, group_sizes=sizes, precision=precision, backend="mosaic_gpu"
            ),
            x,
            w,
        )
        return out, *vjp(grad)

    lower(
        step,
        ((rows, k), jnp.bfloat16),
        ((len(sizes), k, n), jnp.bfloat16),
        ((rows, n), jnp.bfloat16),
        ((len(sizes),), jnp.int32),
    )


@pytest.mark.parametrize(("num_heads", "num_queries"), [(1, 1), (3, 2)])
def test_latent_decode_compiles_at_few_heads(num_heads, num_queries):
    run = partial(mla_decode, latent=512, sm_scale=0.1, split_len=128, backend="mosaic_gpu")
    lower(
        lambda q, cache, table, lengths: run(q, cache, block_table=table, lengths=lengths),
        ((3, num_queries, num_heads, 576), jnp.bfloat16),
        ((17, 64, 576), jnp.bfloat16),
        ((3, 5), jnp.int32),
        ((3,), jnp.int32),
    )


@pytest.mark.parametrize(("n", "num_conditional"), [(64, 4), (256, 0), (320, 4)])
def test_no_store_lies_wholly_behind_the_last_column(n, num_conditional, monkeypatch):
    """The compiler would land such a store on a result that is one pattern wide."""
    conditional = []
    when = mosaic.pl.when
    monkeypatch.setattr(
        "pallas_kernels.hopper_product.pl.when",
        lambda inside: (
            lambda run: (
                conditional.append(inside) if isinstance(run, partial) else None,
                when(inside)(run),
            )
        ),
    )
    lower(
        lambda a, b, groups: grouped_product(
            a,
            b,
            groups=groups,
            grouping="rows",
            b_inner_first=True,
            num_cores=132,
            out_dtype=jnp.bfloat16,
            tile=TILE,
        ),
        ((256, 128), jnp.bfloat16),
        ((2, 128, n), jnp.bfloat16),
        ((2,), jnp.int32),
    )
    assert len(conditional) == num_conditional


def test_stages_that_a_copy_may_not_start_on_are_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        mosaic.shared((4, 8), jnp.float32, matrix=False)
    mosaic.shared((4, 32), jnp.float32, matrix=False)


class Part:
    """Stands for a kernel's view of an array."""

    def __init__(self, *shape):
        self.shape, self.ndim, self.dtype = shape, len(shape), jnp.dtype(jnp.float32)


@pytest.mark.parametrize(("array", "what"), [((2, 7), "28 bytes"), ((129, 64), "129 rows")])
def test_arrays_that_the_copy_engine_cannot_cut_are_refused(array, what):
    with pytest.raises(ValueError, match=what):
        mosaic.copy_in(Part(*array), Part(8, 32), None)
    with pytest.raises(ValueError, match=what):
        mosaic.copy_out(Part(8, 32), Part(*array))
