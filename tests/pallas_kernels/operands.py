"""Operands whose scale blocks all differ in magnitude, so that a wrong scale cannot hide."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT
from pallas_kernels.quantize import quantize


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
