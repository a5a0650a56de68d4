"""Few rows times 8-bit weights: every shape beside float64, and what does not fit is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware
from pallas_kernels.formats import ACTIVATION, WEIGHT, FormatError
from pallas_kernels.quantize import quantize
from pallas_kernels.widened_matmul import OP, widened_matmul
from pallas_kernels.widened_matmul.cases import TEST_SHAPES, make_case
from pallas_kernels.widened_matmul.jax_triton import choose_tile
from tests.pallas_kernels.operands import widened_operands


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", TEST_SHAPES, ids=str)
def test_every_shape_is_the_product_of_the_widened_weights(shape, dtype, shared):
    x, w, expected = widened_operands(*shape, dtype=dtype, shared=shared)
    out = widened_matmul(x, w)
    assert out.shape == expected.shape
    assert out.dtype == dtype
    # In bfloat16 weights and results are rounded to 8 bits; every sum is of one sign.
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected, rtol=1e-5 if dtype == "float32" else 2**-7
    )


def test_a_tile_has_the_matrix_that_is_named_for_it():
    x, w, _ = widened_operands(3, 5, 70, 130, dtype="float32")
    tiles = jnp.stack([x[2], x[0], x[2], x[1]])
    out = widened_matmul(tiles, w, matrices=jnp.array([2, 0, 1, -1]))
    each = [
        widened_matmul(tile[None], w, matrices=jnp.array([m]))[0]
        for tile, m in zip(tiles, (2, 0, 1), strict=False)
    ]
    np.testing.assert_allclose(out[:3], np.stack(each), rtol=1e-6)
    np.testing.assert_allclose(out[:2], widened_matmul(x, w)[np.array([2, 0])], rtol=1e-6)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize(
    ("x", "columns", "format", "words"),
    [
        ((4, 129), 128, WEIGHT, "K"),
        ((3, 4, 128), 128, WEIGHT, "number of matrices, here 2"),
        ((4, 128), 128, ACTIVATION, "squares"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, columns, format, words):
    w = quantize(jnp.ones((2, 16, columns)), format=format)
    with pytest.raises(FormatError, match=words):
        widened_matmul(jnp.ones(x), w)


def test_a_single_matrix_without_a_stack_is_refused():
    with pytest.raises(FormatError, match="stack"):
        widened_matmul(jnp.ones((4, 128)), quantize(jnp.ones((16, 128)), format=WEIGHT))


@pytest.mark.parametrize(
    ("sizes", "weights", "splits"),
    [
        ((64, 16, 1408, 2176), 128, 1),
        ((1, 16, 2048, 2176), 64, 8),
        # Sums of 64 rows are four times as much to write in parts.
        ((1, 64, 2048, 2176), 64, 6),
        ((1, 1, 64, 128), 64, 1),
    ],
)
def test_a_tile_fills_the_cores_where_none_was_measured(sizes, weights, splits):
    tile = choose_tile(make_case(*sizes, hardware=hardware.find("NVIDIA H200")))
    assert (tile.weights, tile.num_splits) == (weights, splits)
    assert tile.rows >= sizes[1]


def test_the_fastest_backend_is_named_with_the_reason_of_the_others():
    case = make_case(64, 16, 1408, 2048, hardware=hardware.find("cpu"))
    assert OP.choose(case).name == "xla"
