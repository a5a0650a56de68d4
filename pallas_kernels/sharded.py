"""Opaque calls that the partitioner can split: a kernel's dims under letters, and what may shard.

XLA cannot look into a Mosaic call: without a rule it gathers every operand and each device does
the whole product. `partitioned` gives the call a rule. Free dims stay local; a contracted dim
that is sharded is summed over its mesh axes; dims that count the blocks of another dim follow it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import mosaic

MeshAxes = tuple[str, ...]

# Letters for leading dims that a call only carries along.
STACK_LETTERS = "stuvwxyz"


def refuses_mesh() -> str | None:
    """Why the mesh in force keeps an opaque call from being split; None if nothing does.

    Fully automatic and fully manual meshes are served. Where a shard_map leaves some axes
    automatic, XLA's partitioner aborts on an opaque call, so it must not be given one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = {kind for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if size > 1}
    if AxisType.Manual in kinds and len(kinds) > 1:
        return (
            f"the mesh {dict(mesh.shape)} is manual in {mesh.manual_axes} only, and XLA cannot "
            "split an opaque call there. Make every axis of the shard_map manual, or none."
        )
    if AxisType.Explicit in kinds:
        return (
            "the mesh has explicit axes, whose types an opaque call cannot state. "
            "Build it with axis_types=(AxisType.Auto,) * n."
        )
    return None


@dataclass(frozen=True)
class ShardRule:
    """Which dims of a call may be sharded, by letters.

    Attributes:
        operands: the letter of each dim of each operand, such as ("mk", "nk").
        results: the same for the results.
        blocks: a letter that counts blocks of another one: ("K", ("k", 128)) says that K is k
            over 128, so k is cut only at multiples of 128 and K is cut with it.
        contracted: letters that are summed over: a sharded one costs one all-reduce.
        whole: letters that must not be sharded.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    blocks: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    contracted: str = ""
    whole: str = ""

    def sizes(self, shapes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        """The size of each letter."""
        found: dict[str, int] = {}
        for letters, shape in zip(self.operands, shapes, strict=True):
            found.update(zip(letters, shape, strict=True))
        return found

    def as_text(self) -> str:
        """The rule in the partitioner's einsum-like notation; block letters are left unlinked."""
        sides = (self.operands, self.results)
        return " -> ".join(
            ", ".join(" ".join(self._factor(c) for c in letters) or "()" for letters in side)
            for side in sides
        )

    @staticmethod
    def _factor(letter: str) -> str:
        return f"{letter}_blocks" if letter.isupper() else letter


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which any of `arrays` differs from device to device."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` typed as different over `axes`; its gradient is then summed over those it was equal on.

    Inside a shard_map, a hand-written gradient must have the axes of its operand: the gradient of
    a weight that is equal everywhere differs between devices until somebody sums it.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def partitioned(
    call: Callable[..., Any], rule: ShardRule, *, sum_dtype: jax.typing.DTypeLike | None = None
) -> Callable[..., Any]:
    """Return `call` with a partitioning rule.

    Args:
        call: `call(*arrays, dtype=None)`; `dtype` overrides the dtype of its result, so that
            partial results of a sharded contraction are summed before they are rounded.
        sum_dtype: that dtype; needed where the rule contracts.
    """

    def whole(*arrays: jax.Array) -> Any:
        axes = varying_axes(*arrays)
        return jax.tree.map(lambda result: vary(result, axes), call(*arrays))

    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    if manual or mosaic.is_interpreting():
        return whole
    wrapped = custom_partitioning(whole)

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        axes = _axes_of_letters(rule, mesh, [(a.shape, a.sharding) for a in arguments])
        specs = [NamedSharding(mesh, _spec(letters, axes)) for letters in rule.operands]
        out = [NamedSharding(mesh, _spec(letters, axes)) for letters in rule.results]
        summed = tuple(axis for letter in rule.contracted for axis in axes[letter])

        def local(*arrays: jax.Array) -> Any:
            if not summed:
                return call(*arrays)
            partial_result = call(*arrays, dtype=sum_dtype)
            return lax.psum(partial_result, summed).astype(results.dtype)

        return mesh, local, tuple(out) if len(out) > 1 else out[0], tuple(specs)

    wrapped.def_partition(partition=partition, sharding_rule=rule.as_text())
    return wrapped


def _spec(letters: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) or None for letter in letters))


def _axes_of_letters(
    rule: ShardRule, mesh: Mesh, arguments: list[tuple[tuple[int, ...], Any]]
) -> dict[str, MeshAxes]:
    """The mesh axes that cut each letter: the first operand that is cut there decides.

    An axis cuts one letter only, and a letter only into equal parts of whole blocks; otherwise
    the letter stays whole and the partitioner gathers it.
    """
    sizes = rule.sizes(tuple(shape for shape, _ in arguments))
    granularity = dict(rule.blocks.values())
    axes: dict[str, MeshAxes] = dict.fromkeys(sizes, ())
    taken: set[str] = set()
    for letters, (_, sharding) in zip(rule.operands, arguments, strict=True):
        spec = sharding.spec if sharding is not None else ()
        for letter, entry in zip(letters, spec, strict=False):
            wanted = _as_axes(entry)
            blocked = letter in rule.blocks or letter in rule.whole or axes[letter]
            if not wanted or blocked or taken & set(wanted):
                continue
            parts = math.prod(mesh.shape[axis] for axis in wanted)
            if sizes[letter] % (parts * granularity.get(letter, 1)):
                continue
            axes[letter] = wanted
            taken |= set(wanted)
    for letter, (base, _) in rule.blocks.items():
        axes[letter] = axes[base]
    return axes


def _as_axes(entry: str | MeshAxes | None) -> MeshAxes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def batched(call: Callable[..., Any], stacked: tuple[int, ...]) -> Callable[..., Any]:
    """Return `call` with a rule for `jax.vmap`.

    Args:
        stacked: the operands that may have any number of leading dims. If only those are mapped
            over, the mapped dim is one more of them; otherwise the calls run one after another.
    """

    @jax.custom_batching.custom_vmap
    def once(*arrays: jax.Array) -> Any:
        return call(*arrays)

    @once.def_vmap
    def _(axis_size: int, mapped: list[bool], *arrays: jax.Array) -> Any:
        if set(stacked) == {i for i, is_mapped in enumerate(mapped) if is_mapped}:
            return once(*arrays), True
        every = [
            x if is_mapped else jax.numpy.broadcast_to(x, (axis_size, *x.shape))
            for x, is_mapped in zip(arrays, mapped, strict=True)
        ]
        return lax.map(lambda xs: once(*xs), tuple(every)), True

    return once
