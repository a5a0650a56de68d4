"""Trained arrays and buffers, annotated with the logical name of every dimension."""

import jax
import jax.numpy as jnp
from flax import nnx

Dims = tuple[tuple[str | None, int], ...]


class Buffer(nnx.Variable):
    """State that is saved and sharded like a parameter, but that no optimizer touches."""


def names(dims: Dims) -> tuple[str | None, ...]:
    """Return the logical names of `dims`."""
    return tuple(name for name, _ in dims)


def sizes(dims: Dims) -> tuple[int, ...]:
    """Return the sizes of `dims`."""
    return tuple(size for _, size in dims)


def weight(rngs: nnx.Rngs, dims: Dims, *, std: float) -> nnx.Param:
    """Return a float32 matrix drawn from a normal distribution of deviation `std`."""
    value = std * jax.random.normal(rngs.params(), sizes(dims), jnp.float32)
    # eager_sharding off: the jitted build lays arrays out in one step (models/build.py).
    return nnx.Param(value, out_sharding=names(dims), eager_sharding=False)


def scale(dims: Dims) -> nnx.Param:
    """Return a float32 array of ones, a norm's scale."""
    return nnx.Param(
        jnp.ones(sizes(dims), jnp.float32), out_sharding=names(dims), eager_sharding=False
    )


def zeros_buffer(dims: Dims) -> Buffer:
    """Return a float32 buffer of zeros."""
    return Buffer(
        jnp.zeros(sizes(dims), jnp.float32), out_sharding=names(dims), eager_sharding=False
    )
