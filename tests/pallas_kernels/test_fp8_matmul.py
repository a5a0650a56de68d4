"""The block-scaled product: every size on the XLA path; operands that do not fit are refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, FormatError
from pallas_kernels.fp8_matmul import fp8_matmul, fp8_matmul_sum
from pallas_kernels.fp8_matmul.cases import ODD_SIZES
from pallas_kernels.quantize import quantize
from pallas_kernels.registry import KernelError, explain
from tests.pallas_kernels.operands import exact_product, matmul_operands, varied

SHAPES = json.loads((Path(__file__).parent.parent / "data" / "S19" / "shapes.json").read_text())

# Every odd size in every place once, small enough for the default run.
SOME_SHAPES = [
    (m, n, k)
    for m, n, k in zip(
        ODD_SIZES,
        (576, 13, 1, 127, 0, 1152, 7, 129, 129),
        (129, 1152, 127, 576, 13, 0, 129, 7, 576),
        strict=True,
    )
]


def check(m, n, k, *, out_dtype="bfloat16", b_format=WEIGHT):
    a, b = matmul_operands(m, n, k, b_format=b_format)
    out = jax.jit(lambda a, b: fp8_matmul(a, b, out_dtype=out_dtype))(a, b)
    assert (out.shape, out.dtype) == ((m, n), jnp.dtype(out_dtype))
    found = difference(np.asarray(out, np.float64), exact_product(a, b))
    assert found.within(TOLERANCES["fp8_matmul", out_dtype]), (found, (m, n, k))


@pytest.mark.parametrize(("m", "n", "k"), [*map(tuple, SHAPES["shapes"]), *SOME_SHAPES], ids=str)
def test_odd_shapes_are_right_in_every_row(m, n, k):
    check(m, n, k)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("b_format", [WEIGHT, ACTIVATION], ids=str)
def test_both_weight_formats_and_result_dtypes_are_right(b_format, out_dtype):
    check(130, 136, 300, out_dtype=out_dtype, b_format=b_format)


def test_no_inner_dim_gives_zeros_or_the_addend():
    a, b = matmul_operands(5, 64, 0)
    assert jnp.array_equal(fp8_matmul(a, b), jnp.zeros((5, 64), jnp.bfloat16))
    c = jnp.asarray(varied((5, 64), seed=7))
    assert jnp.array_equal(fp8_matmul(a, b, c=c, out_dtype=jnp.float32), c)


def test_the_addend_is_added_before_rounding():
    a, b = matmul_operands(9, 16, 128)
    c = jnp.asarray(varied((9, 16), seed=8))
    out = fp8_matmul(a, b, c=c)
    expected = (exact_product(a, b) + np.asarray(c, np.float64)).astype(np.float32)
    assert difference(np.asarray(out, np.float64), expected).within(
        TOLERANCES["fp8_matmul", "bfloat16"]
    )


def test_a_value_that_is_not_finite_reaches_its_row_and_no_other():
    x = varied((4, 256), seed=1)
    x[2, 5] = np.inf
    a = quantize(jnp.asarray(x), format=ACTIVATION)
    _, b = matmul_operands(4, 8, 256)
    out = np.asarray(fp8_matmul(a, b), np.float32)
    assert np.isnan(out[2]).all()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_leading_dims_are_carried_along_and_mapped_over():
    a, b = matmul_operands(6, 16, 130)
    flat = fp8_matmul(a, b)
    stack = replace(a, values=a.values.reshape(2, 3, -1), scales=a.scales.reshape(2, 3, -1), rows=3)
    assert jnp.array_equal(fp8_matmul(stack, b).reshape(6, 16), flat)
    assert jnp.array_equal(jax.vmap(lambda a: fp8_matmul(a, b))(stack).reshape(6, 16), flat)


POWER_OF_TWO = Format(block=(128, 128), scale="power_of_two")
BAD_OPERANDS = [
    ("scale kinds", lambda a, b: (a, quantize(b.dequantize(), format=POWER_OF_TWO))),
    ("a must be in tiles", lambda a, b: (b, b)),
    (
        "b must be in blocks",
        lambda a, b: (
            a,
            b.mT.mT if False else quantize(b.dequantize(), format=Format(block=(128, 1))),
        ),
    ),
    ("must be \\[N, K\\]", lambda a, b: (a, quantize(b.dequantize()[:, :100], format=WEIGHT))),
]


@pytest.mark.parametrize(("words", "spoil"), BAD_OPERANDS)
def test_operands_that_do_not_fit_are_refused_with_the_rule(words, spoil):
    with pytest.raises(FormatError, match=words):
        fp8_matmul(*spoil(*matmul_operands(4, 8, 128)))


def test_a_sum_of_products_is_the_sum_of_the_products():
    pairs = [matmul_operands(9, 13, k) for k in (129, 7, 300)]
    out = jax.jit(lambda pairs: fp8_matmul_sum(pairs, out_dtype="float32"))(pairs)
    found = difference(np.asarray(out, np.float64), sum(exact_product(a, b) for a, b in pairs))
    assert found.within(TOLERANCES["fp8_matmul", "float32"]), found


@pytest.mark.parametrize(
    ("pairs", "words"),
    [((), "none"), ((matmul_operands(4, 8, 128), matmul_operands(4, 9, 128)), "4x8, 4x9")],
    ids=["no pair", "two shapes"],
)
def test_products_of_several_shapes_are_not_added(pairs, words):
    with pytest.raises(FormatError, match=words):
        fp8_matmul_sum(pairs)


def test_a_result_dtype_that_no_kernel_writes_is_refused():
    with pytest.raises(FormatError, match="float16"):
        fp8_matmul(*matmul_operands(4, 8, 128), out_dtype=jnp.float16)


def test_asking_for_the_hopper_kernel_on_a_cpu_says_why_not():
    with pytest.raises(KernelError, match="sm90"):
        fp8_matmul(*matmul_operands(4, 8, 128), backend="mosaic_gpu")


def test_explain_reports_how_much_of_the_work_is_padding():
    ratio = {
        k: explain("fp8_matmul", 4096, 4096, k, device="h200")[0].padded_flop_ratio
        for k in (13, 16, 128)
    }
    assert ratio == {13: 128 / 13, 16: 8.0, 128: 1.0}
