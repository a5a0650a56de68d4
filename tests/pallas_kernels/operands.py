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


def matmul_operands(m, n, k, *, seed=0, b_format=WEIGHT):
    a = jax.jit(lambda x: quantize(x, format=ACTIVATION))(jnp.asarray(varied((m, k), seed=seed)))
    b = jax.jit(lambda x: quantize(x, format=b_format))(jnp.asarray(varied((n, k), seed=seed + 1)))
    return a, b


def exact_product(a, b):
    """The product of the dequantised values in float64."""
    return np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
