"""All 729 products of odd sizes on the XLA path, each against float64, each row for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT, Quantized
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.fp8_matmul.cases import ODD_SIZES


def make_operand(rows, columns, *, format):
    """Elements and scales drawn as such, without `quantize`, and the matrix they stand for.

    No two blocks have one magnitude, so that a wrong scale cannot hide. All elements of a row have
    one sign, so that no sum cancels: a result that is alone in its row is as precise as any.
    """
    rng = np.random.default_rng([rows, columns, format.block[0]])
    stored, num_blocks = format.padded((rows, columns)), format.num_blocks((rows, columns))
    values = np.zeros(stored, format.dtype)
    elements = np.abs(rng.normal(0, 100, (rows, columns))).clip(1, 448)
    values[:rows, :columns] = elements * rng.choice([-1, 1], (rows, 1))
    scales = 2.0 ** rng.integers(-6, 7, num_blocks) * rng.uniform(1, 2, num_blocks)
    scales = scales.astype(np.float32)
    spread = scales.astype(np.float64)
    for axis, block in enumerate(format.block):
        spread = spread.repeat(block, axis)
    operand = Quantized(
        values=jnp.asarray(values),
        scales=jnp.asarray(scales),
        rows=rows,
        columns=columns,
        format=format,
    )
    return operand, (values.astype(np.float64) * spread)[:rows, :columns]


# All weights of one inner size in one program: a ninth of the compilations.
@jax.jit
def products(a, weights):
    dtypes = jnp.float32, jnp.bfloat16
    return [[fp8_matmul(a, b, out_dtype=d, backend="xla") for d in dtypes] for b in weights]


@pytest.mark.slow
@pytest.mark.parametrize("k", ODD_SIZES)
def test_every_product_of_odd_sizes_with_this_inner_size_is_right_in_every_row(k):
    weights = [make_operand(n, k, format=WEIGHT) for n in ODD_SIZES]
    tolerance = TOLERANCES["fp8_matmul", "float32"]
    wrong = []
    for m in ODD_SIZES:
        a, exact_a = make_operand(m, k, format=ACTIVATION)
        found = products(a, [b for b, _ in weights])
        for n, (out, rounded), (_, exact_b) in zip(ODD_SIZES, found, weights, strict=True):
            assert (out.shape, out.dtype) == ((m, n), jnp.float32)
            error = difference(np.asarray(out, np.float64), exact_a @ exact_b.T)
            # Rounded once, at the end: what is left to check of a bfloat16 result.
            equal = jnp.array_equal(rounded, out.astype(jnp.bfloat16))
            if not (equal and error.within(tolerance)):
                wrong.append(((m, n, k), error))
    assert not wrong
