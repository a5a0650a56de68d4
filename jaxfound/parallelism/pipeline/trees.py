"""Sums, slots and entries of trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Any pytree of arrays.
type Tree = Any


def added(total: Tree, part: Tree) -> Tree:
    """Return sums with a part added, in the format of the sums."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def pick(tree: Tree, index: jax.Array | int) -> Tree:
    """Return entry `index` of each array's first dim."""
    if isinstance(index, int):
        return jax.tree.map(lambda a: a[index], tree)
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def put(slots: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Return the slots with one of them replaced."""
    return lax.dynamic_update_index_in_dim(slots, value.astype(slots.dtype), index, 0)


def zeros(shapes: Tree) -> Tree:
    """Return zeros of these shapes and formats."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def float32_zeros(like: Tree) -> Tree:
    """Return float32 zeros of these shapes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), like)
