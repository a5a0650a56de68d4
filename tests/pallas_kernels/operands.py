"""Operands whose scale blocks all differ in magnitude, so that a wrong scale cannot hide."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT
from pallas_kernels.quantize import quantize, quantize_squares
from pallas_kernels.quantize.reference import SMALLEST_SCALE


def varied(shape, *, seed):
    """Normal values times a power of two from 2^-6 to 2^6 that is another for every block."""
    rng = np.random.default_rng([seed, *shape])
    *stack, rows, columns = shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    powers = 2.0 ** rng.integers(-6, 7, (*stack, *blocks))
    spread = powers.repeat(BLOCK, -2).repeat(BLOCK, -1)[..., :rows, :columns]
    by_row = 2.0 ** rng.integers(-3, 4, (*stack, rows, 1))
    return (rng.standard_normal(shape) * spread * by_row).astype(np.float32)


quantized = jax.jit(quantize, static_argnames=("format", "backend"))


def matmul_operands(m, n, k, *, seed=0, b_format=WEIGHT):
    a = quantized(jnp.asarray(varied((m, k), seed=seed)), format=ACTIVATION)
    b = quantized(jnp.asarray(varied((n, k), seed=seed + 1)), format=b_format)
    return a, b


def tiles_by_numpy(x):
    """The 8-bit elements of `x` in tiles of 1x128 along its rows, and the scales, by numpy."""
    x = np.asarray(x, np.float32)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    finite = np.isfinite(padded)
    largest = np.abs(np.where(finite, padded, 0.0)).max(-1)
    scales = np.where(largest > 0, np.maximum(largest / np.float32(448), SMALLEST_SCALE), 1.0)
    inverse = np.float32(1) / scales.astype(np.float32)
    products = np.where(finite, padded, np.nan) * inverse[..., None]
    # Multiplied in float32, then rounded once.
    elements = products.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return elements.reshape(len(x), -1), scales.astype(np.float32)


def squares_by_numpy(x):
    """The 8-bit elements of matrices in squares of 128x128, and the scales, by numpy."""
    x = np.asarray(x, np.float32)
    edges = [(0, 0)] * (x.ndim - 2) + [(0, -n % BLOCK) for n in x.shape[-2:]]
    padded = np.pad(x, edges)
    *stack, rows, columns = padded.shape
    blocks = padded.reshape(*stack, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    tiles = blocks.swapaxes(-3, -2).reshape(-1, BLOCK * BLOCK)
    finite = np.isfinite(tiles)
    largest = np.abs(np.where(finite, tiles, 0.0)).max(-1)
    scales = np.where(largest > 0, np.maximum(largest / np.float32(448), SMALLEST_SCALE), 1.0)
    scales = scales.astype(np.float32)
    products = np.where(finite, tiles, np.nan) * (np.float32(1) / scales)[:, None]
    elements = products.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scales = scales.reshape(*stack, rows // BLOCK, columns // BLOCK)
    return elements.reshape(*scales.shape, BLOCK, BLOCK).swapaxes(-3, -2).reshape(
        padded.shape
    ), scales


def squares_apart(shape, dtype):
    """How many steps elements of the kernel lie from numpy's; the transpose is the same bits."""
    x = np.array(varied(shape, seed=2), np.float32)
    x[..., 0, :3] = np.nan, np.inf, -np.inf
    x[..., -1, :] = 0.0
    found = quantize_squares(jnp.asarray(x), dtype=dtype, backend="jax_triton")
    turned, plain = (np.asarray(v).view(np.uint8) for v in (found.turned, found.values))
    np.testing.assert_array_equal(turned, plain.swapaxes(-2, -1))
    return steps_apart(found, *squares_by_numpy(jnp.asarray(x, dtype)))


def steps_apart(q, elements, scales):
    """How many steps each stored element lies from one of `tiles_by_numpy`; scales are checked."""
    np.testing.assert_allclose(q.scales, scales, rtol=2**-22)
    # Bits below the sign count up with the value, so neighbours are one apart; both zeros are 0.
    bits = [np.asarray(v).view(np.uint8).astype(int) for v in (q.values, elements)]
    places = [np.where(one & 0x80, -(one & 0x7F), one) for one in bits]
    return np.abs(places[0] - places[1])


def dequantized(q):
    """What the stored elements and scales stand for, by numpy in float64."""
    values, spread = np.asarray(q.values, np.float64), np.asarray(q.scales, np.float64)
    for axis, block in zip((-2, -1), q.format.block, strict=True):
        spread = spread.repeat(block, axis)
    spread = spread[..., : values.shape[-2], : values.shape[-1]]
    return (values * spread)[..., : q.rows, : q.columns]


def exact_product(a, b):
    """The product of the dequantised values in float64."""
    return dequantized(a) @ dequantized(b).T


def widened_operands(e, m, n, k, *, dtype, shared=False):
    """Rows, weights in squares, and their product in float64, all positive: no sum cancels."""
    rng = np.random.default_rng([e, m, n, k])
    x = jnp.asarray(rng.uniform(0.5, 2, (m, k) if shared else (e, m, k)), dtype)
    magnitudes = 2.0 ** rng.integers(-6, 7, (e, -(-n // 128), -(-k // 128)))
    spread = magnitudes.repeat(128, 1).repeat(128, 2)[:, :n, :k]
    w = quantize(jnp.asarray(rng.uniform(0.5, 2, (e, n, k)) * spread, jnp.float32), format=WEIGHT)
    full = np.asarray(w.dequantize(jnp.float32), np.float64)
    rows = np.broadcast_to(np.asarray(x, np.float64), (e, m, k))
    return x, w, np.einsum("emk,enk->emn", rows, full)
