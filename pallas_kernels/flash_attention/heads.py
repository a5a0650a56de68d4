"""Attention calls that the partitioner can split: rows over some mesh axes, heads over others.

Cuts of the rows and of the query heads stay local. Key heads are cut as the query heads are where
they divide; where they do not, every device holds all of them, picks those that its query heads
read, and the gradients are summed over the devices. Nothing else may be cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels.placements import MeshAxes, Placed
from pallas_kernels.sharded import Part, ShardRule, divided


@dataclass(frozen=True)
class KeyHeads:
    """The key heads that the query heads of one device read.

    Attributes:
        num_queries: query heads of one device.
        group: query heads that share a key head.
        axes: mesh axes that cut the query heads but not the key heads; () = cut alike.
    """

    num_queries: int
    group: int
    axes: MeshAxes = ()

    def take(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S picked H"]:
        """Return the heads of `x` to attend over: one for all query heads, or one for each."""
        if not self.axes:
            return x
        first = lax.axis_index(self.axes) * self.num_queries
        if self.group % self.num_queries == 0:
            return lax.dynamic_slice_in_dim(x, first // self.group, 1, axis=2)
        return jnp.take(x, (first + jnp.arange(self.num_queries)) // self.group, axis=2)

    def give_back(
        self, grad: Float[Array, "B S picked H"], *, like: Float[Array, "B S K H"]
    ) -> Float[Array, "B S K H"]:
        """Return the gradient of `like` from that of what was taken of it."""
        if not self.axes:
            return grad
        # float32: several devices' shares are summed before they are rounded.
        wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
        (spread,) = jax.linear_transpose(self.take, wide)(grad.astype(jnp.float32))
        return lax.psum(spread, self.axes).astype(like.dtype)


def partitioned(
    call: Callable[..., Any], *, operands: Sequence[str], results: Sequence[str]
) -> Callable[..., Any]:
    """Return `call` with a partitioning rule and a rule for `jax.vmap`.

    Args:
        call: `call(key_heads, *arrays)`.
        operands: letters of each operand's dims: b for rows, n for query heads, k for key heads;
            the first must be the queries "btnh", the second the keys "bskh".
        results: the same for the results.
    """

    def whole(*arrays: jax.Array) -> Any:
        num_heads, num_kv_heads = arrays[0].shape[2], arrays[1].shape[2]
        return call(KeyHeads(num_heads, num_heads // num_kv_heads), *arrays)

    def cut(sizes: Mapping[str, int], placed: Sequence[Placed], _: Any) -> Part:
        queries, keys = placed[:2]
        axes = _axes(sizes, queries, num_kv_heads=keys.shape[2])
        num_heads = queries.shape[2]
        heads = KeyHeads(
            num_queries=num_heads // _parts(sizes, axes["n"]),
            group=num_heads // keys.shape[2],
            axes=() if axes["k"] else axes["n"],
        )
        return Part(
            call=partial(call, heads),
            operands=tuple(_spec(letters, axes) for letters in operands),
            results=tuple(_spec(letters, axes) for letters in results),
        )

    rule = ShardRule(operands=tuple(operands), results=tuple(results))
    return _mapped(divided(whole, rule, cut))


def _mapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with a rule for `jax.vmap`: a mapped dim is more rows."""

    @jax.custom_batching.custom_vmap
    def once(*arrays: jax.Array) -> Any:
        return call(*arrays)

    @once.def_vmap
    def _(axis_size: int, mapped: list[bool], *arrays: jax.Array) -> Any:
        def fold(x: jax.Array, is_mapped: bool) -> jax.Array:
            x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            # Rows first: a cut of the rows stays one.
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

        def unfold(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x.reshape(-1, axis_size, *x.shape[1:]), 0, 1)

        results = jax.tree.map(unfold, once(*map(fold, arrays, mapped)))
        return results, jax.tree.map(lambda _: True, results)

    return once


def _axes(sizes: Mapping[str, int], queries: Placed, *, num_kv_heads: int) -> dict[str, MeshAxes]:
    """Mesh axes that cut rows, query heads and key heads: as the queries lie, where it divides."""
    rows, heads = queries.axes[0], queries.axes[2]
    axes = {
        "b": rows if queries.shape[0] % _parts(sizes, rows) == 0 else (),
        "n": heads if queries.shape[2] % _parts(sizes, heads) == 0 else (),
    }
    return {**axes, "k": axes["n"] if num_kv_heads % _parts(sizes, axes["n"]) == 0 else ()}


def _parts(sizes: Mapping[str, int], axes: MeshAxes) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _spec(letters: str, axes: dict[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) or None for letter in letters))
