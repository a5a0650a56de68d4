"""Quantising: bounds on every kind of block, and non-finite inputs that stay visible."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, FormatError
from pallas_kernels.quantize import quantize, requantize_transposed, rounded
from pallas_kernels.quantize.cases import BASES, FORMATS, TEST_SHAPES
from pallas_kernels.quantize.reference import scale_of

EDGES = Path(__file__).parent.parent / "data" / "S05"
# Half a unit in the last place of e4m3's 3 and e5m2's 2 mantissa bits.
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SMALLEST_STEP = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
POWER_OF_TWO = Format(block=(1, 128), scale="power_of_two")


def quantize_and_back(x, format):
    @jax.jit
    def both(x):
        q = quantize(x, format=format)
        return q, q.dequantize()

    q, back = both(jnp.asarray(x))
    return q, np.asarray(back, np.float64)


def scales_by_numpy(x, format):
    """The scale of each block in float64, from its definition."""
    rows, columns = format.block
    scales = np.ones([-(-n // b) for n, b in zip(x.shape, format.block, strict=True)])
    for i, j in np.ndindex(scales.shape):
        block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        ratio = np.abs(block.astype(np.float64)).max() / format.largest
        if ratio:
            exact = format.scale == "power_of_two"
            scales[i, j] = 2.0 ** np.ceil(np.log2(ratio)) if exact else ratio
    return scales


GRID = [((200, 130), format) for format in FORMATS]
GRID += [(shape, format) for shape in TEST_SHAPES for format in BASES if shape != (200, 130)]


@pytest.mark.parametrize(("shape", "format"), GRID, ids=str)
def test_quantising_equals_numpy_and_stays_within_half_a_step(shape, format):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x *= 2.0 ** np.random.default_rng(1).integers(-6, 6, (*shape[:1], 1))
    q, back = quantize_and_back(x, format)
    assert back.shape == shape
    if not x.size:
        return
    # XLA divides by a constant through its reciprocal: one unit in the last place.
    ulp = 0.0 if format.scale == "power_of_two" else 2.0**-23
    scales = np.asarray(q.scales, np.float64)
    np.testing.assert_allclose(scales, scales_by_numpy(x, format), rtol=ulp)
    spread = np.repeat(np.repeat(scales, format.block[0], 0), format.block[1], 1)
    step = spread[: shape[0], : shape[1]] * SMALLEST_STEP[format.element]
    bound = np.maximum(np.abs(x) * HALF_STEP[format.element], step / 2) * 1.001
    assert (np.abs(back - x) <= bound).all()


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_activation_edges_stay_within_their_bound(scale):
    case = np.load(EDGES / "act.npz")
    q = quantize(jnp.asarray(case["x"]), format=Format(block=(1, 128), scale=scale))
    values, scales = np.asarray(q.values, np.float32), np.asarray(q.scales)
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 448
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    back = np.asarray(q.dequantize(), np.float64)
    assert (np.abs(back - case["x"]) <= case["bound"]).all()
    assert (back[0, :128] == 0).all()
    assert (back[1] == 0).all()


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_weight_edges_with_partial_and_zero_blocks_come_back(scale):
    w = np.load(EDGES / "wt.npz")["w"]
    _, back = quantize_and_back(w, Format(block=(128, 128), scale=scale))
    assert (back[128:, :128] == 0).all()
    for at in (np.s_[:128, :128], np.s_[:128, 128:], np.s_[128:, 128:]):
        # Half a unit of 3 mantissa bits, or of the subnormal step under a scale rounded up twofold.
        step = np.abs(w[at]).max() / 448 * 2 * 2.0**-10
        assert (np.abs(back[at] - w[at]) <= np.maximum(np.abs(w[at]) / 16, step) * 1.01).all()


@pytest.mark.parametrize("format", [*BASES, Format(block=(1, 128), element="e5m2")], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_visible_and_alone(format, bad):
    x = np.random.default_rng(2).standard_normal((128, 256)).astype(np.float32)
    x[3, 40] = bad
    _, back = quantize_and_back(x, format)
    assert np.isnan(back[3, 40])
    assert np.isfinite(np.delete(back.ravel(), 3 * 256 + 40)).all()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_power_of_two_scales_are_the_smallest_that_cover_the_block(element):
    format = Format(block=(1, 128), element=element, scale="power_of_two")
    exact = format.largest * 2.0 ** np.arange(-100, 100, dtype=np.float64)
    x = np.concatenate([exact, np.nextafter(exact.astype(np.float32), np.float32(np.inf))])
    expected = np.concatenate([exact, 2 * exact]) / format.largest
    found = jax.jit(lambda x: scale_of(x, format))(jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def test_the_gradient_passes_straight_through_rounding_even_at_the_edges():
    x = jnp.asarray(np.load(EDGES / "act.npz")["x"])
    grad = jax.grad(lambda x: (2.0 * rounded(x, format=ACTIVATION)).sum())(x)
    assert jnp.array_equal(grad, jnp.full_like(x, 2.0))


def test_power_of_two_scales_requantise_without_loss_where_magnitudes_agree():
    x = jax.random.uniform(jax.random.key(3), (256, 128), minval=1.0, maxval=1.9)
    q = quantize(x, format=POWER_OF_TWO)
    again = requantize_transposed(q)
    assert jnp.array_equal(again.dequantize(), q.dequantize().T)


def test_requantising_for_wgrad_needs_row_tiles():
    q = quantize(jnp.ones((4, 4)), format=WEIGHT)
    with pytest.raises(FormatError, match="1x128"):
        requantize_transposed(q)


def test_a_stack_is_quantised_matrix_by_matrix():
    x = jax.random.normal(jax.random.key(4), (3, 130, 200))
    q = quantize(x, format=WEIGHT)
    one = quantize(x[1], format=WEIGHT)
    assert jnp.array_equal(q.values[1], one.values)
    assert jnp.array_equal(q.scales[1], one.scales)
