"""Opaque calls that the partitioner can split: a kernel's dims under letters, and what may shard.

XLA cannot look into a Mosaic call: without a rule it gathers every operand and each device does
the whole product. `partitioned` gives the call a rule. Free dims stay local; a contracted dim
that is sharded is summed over its mesh axes; dims that count the blocks of another dim follow it.

Where operands lie is read from their types on explicit axes, and asked of XLA's partitioner on
automatic ones, also of those that a shard_map leaves automatic. On manual axes a call sees shards.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import mosaic, placements
from pallas_kernels.placements import MeshAxes, Placed, axes_of_kind

log = logging.getLogger(__name__)

# Letters for leading dims that a call only carries along.
STACK_LETTERS = "stuvwxyz"


def refuses_mesh() -> str | None:
    """Why the mesh in force keeps an opaque call from being split; None if nothing does.

    Manual, automatic and explicit axes are served, also side by side.
    """
    if is_local():
        return None
    mesh = jax.sharding.get_abstract_mesh()
    manual = axes_of_kind(mesh, AxisType.Manual)
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return (
            f"the mesh {dict(mesh.shape)} is split by the GSPMD partitioner, and opaque calls have "
            "a rule for Shardy only. Set jax_use_shardy_partitioner=True, which is the default."
        )
    # JAX lowers the inner of two shard_maps on a mesh without devices, unless one is set.
    if len(manual) > 1 and not placements.mesh_is_set():
        return (
            f"the mesh {dict(mesh.shape)} is manual in {manual} and has no devices here, which "
            "JAX needs to split an opaque call. Trace inside `with jax.set_mesh(mesh):`."
        )
    return None


def is_local() -> bool:
    """Whether arrays are what one device has: the mesh in force is manual, or of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = axes_of_kind(mesh, AxisType.Manual)
    return mesh.size == math.prod(mesh.shape[axis] for axis in manual)


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

    def as_text(self, *, markers: MeshAxes = ()) -> str:
        """The rule in the partitioner's einsum-like notation; block letters are left unlinked.

        Args:
            markers: mesh axes for each of which one more operand of one dim is passed.
        """
        operands, results = (
            [" ".join(self._factor(c) for c in letters) or "()" for letters in side]
            for side in (self.operands, self.results)
        )
        operands += [f"{axis}_marker" for axis in markers]
        return f"{', '.join(operands)} -> {', '.join(results)}"

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


@dataclass(frozen=True)
class Part:
    """What each device does of a call.

    Attributes:
        call: runs on the device's parts of the operands.
        operands: where each operand must lie.
        results: where each result then lies.
    """

    call: Callable[..., Any]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


# Given the sizes of the mesh axes, the operands and the whole results: what each device does.
Cut = Callable[[Mapping[str, int], Sequence[Placed], Any], Part]


def partitioned(
    call: Callable[..., Any], rule: ShardRule, *, sum_dtype: jax.typing.DTypeLike | None = None
) -> Callable[..., Any]:
    """Return `call` with a partitioning rule.

    Args:
        call: `call(*arrays, dtype=None)`; `dtype` overrides the dtype of its result, so that
            partial results of a sharded contraction are summed before they are rounded.
        sum_dtype: that dtype; needed where the rule contracts.
    """

    def cut(sizes: Mapping[str, int], operands: Sequence[Placed], results: Any) -> Part:
        axes = _axes_of_letters(rule, sizes, operands)
        summed = tuple(axis for letter in rule.contracted for axis in axes[letter])

        def local(*arrays: jax.Array) -> Any:
            if not summed:
                return _varying(call)(*arrays)
            partial_result = _varying(call)(*arrays, dtype=sum_dtype)
            return lax.psum(partial_result, summed).astype(results.dtype)

        return Part(
            call=local,
            operands=tuple(_spec(letters, axes) for letters in rule.operands),
            results=tuple(_spec(letters, axes) for letters in rule.results),
        )

    return divided(call, rule, cut)


def divided(call: Callable[..., Any], rule: ShardRule, cut: Cut) -> Callable[..., Any]:
    """Return `call` such that on a mesh each device does the part that `cut` gives it.

    `partitioned` is this with the cut that follows from the rule alone.

    Args:
        call: the call on whole operands, or on the shards that a shard_map hands it.
        rule: tells the partitioner which dims of operands and results are the same.
    """
    whole = _varying(call)

    def run(*arrays: jax.Array) -> Any:
        mesh = placements.mesh_of(arrays)
        if mosaic.is_interpreting():
            return whole(*arrays)
        if mesh.explicit_axes:
            return _by_types(run, cut, mesh, arrays)
        if not axes_of_kind(mesh, AxisType.Manual):
            return _by_partitioner(whole, rule, cut)(*arrays)
        if axes_of_kind(mesh, AxisType.Auto):
            return _by_partitioner_of_groups(whole, rule, cut=cut, mesh=mesh)(*arrays)
        return whole(*arrays)

    return run


def _varying(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` whose results are typed as different over every axis its operands differ over."""

    def typed(*arrays: jax.Array, **options: Any) -> Any:
        axes = varying_axes(*arrays)
        return jax.tree.map(lambda result: vary(result, axes), call(*arrays, **options))

    return typed


def on_automatic_axes(call: Callable[..., Any], rule: ShardRule) -> Callable[..., Any]:
    """Return `call` with explicit axes automatic inside, so that its steps need no placements.

    Results are typed as the rule's letters say; without explicit axes it is `call`.
    """

    def run(*arrays: jax.Array) -> Any:
        mesh = placements.mesh_of(arrays)
        if not mesh.explicit_axes:
            return call(*arrays)
        sizes, operands = _typed(mesh, arrays)
        axes = _axes_of_letters(rule, sizes, operands)
        places = tuple(NamedSharding(mesh, _spec(letters, axes)) for letters in rule.results)
        return _retyped(call, mesh.explicit_axes, places)(*arrays)

    return run


def _by_types(
    run: Callable[..., Any], cut: Cut, mesh: AbstractMesh, arrays: Sequence[jax.Array]
) -> Any:
    """The call on automatic axes, its results typed as the cut of the operands' types says."""
    part = cut(*_typed(mesh, arrays), None)
    places = tuple(NamedSharding(mesh, spec) for spec in part.results)
    return _retyped(run, mesh.explicit_axes, places)(*arrays)


def _typed(mesh: AbstractMesh, arrays: Sequence[jax.Array]) -> tuple[dict[str, int], list[Placed]]:
    """The sizes of the explicit axes, and the operands as their types place them."""
    types = [jax.typeof(x) for x in arrays]
    operands = [Placed(t.shape, placements.axes_of_spec(t.sharding.spec, t.ndim)) for t in types]
    return {axis: mesh.shape[axis] for axis in mesh.explicit_axes}, operands


def _retyped(
    call: Callable[..., Any], axes: MeshAxes, places: tuple[NamedSharding, ...]
) -> Callable[..., Any]:
    return jax.sharding.auto_axes(call, axes=axes, out_sharding=_one_or_all(places))


def _by_partitioner(whole: Callable[..., Any], rule: ShardRule, cut: Cut) -> Callable[..., Any]:
    """The call with a rule that XLA's partitioner asks once it knows where the operands lie."""
    wrapped = custom_partitioning(whole)

    def partition(given: Mesh, arguments: Any, results: Any) -> Any:
        operands = [placements.placed(array, given) for array in arguments]
        part = cut(given.shape, operands, results)
        return given, _on_one_device(part.call), *_places(part, given)

    # JAX names no axes of a dim that only a part of an axis cuts, as a reshape may leave it.
    wrapped.def_partition(partition=partition, sharding_rule=rule.as_text(), decode_shardings=False)
    return wrapped


def _by_partitioner_of_groups(
    whole: Callable[..., Any], rule: ShardRule, *, cut: Cut, mesh: AbstractMesh
) -> Callable[..., Any]:
    """The same inside a shard_map that leaves axes automatic."""
    free = axes_of_kind(mesh, AxisType.Auto)
    wrapped = custom_partitioning(lambda *marked: whole(*marked[: -len(free)]))

    def partition(_: Mesh, arguments: Any, results: Any) -> Any:
        arrays = arguments[: -len(free)]
        group = placements.read_group(free, arguments[-len(free) :])
        if group is None:
            log.warning("kernel.gathered", extra={"reason": "the order of devices is unreadable"})
            group = placements.automatic({axis: mesh.shape[axis] for axis in free})
            operands = [Placed(array.shape, ((),) * array.ndim) for array in arrays]
        else:
            operands = [placements.placed(array, group) for array in arrays]
        part = cut(group.shape, operands, results)
        local = _on_one_device(lambda *parts: part.call(*parts[: -len(free)]))
        marked = replace(part, operands=(*part.operands, *(PartitionSpec(axis) for axis in free)))
        # A sum over an axis is written for all devices, not for a group.
        return placements.automatic(mesh.shape), local, *_places(marked, group)

    wrapped.def_partition(
        partition=partition, sharding_rule=rule.as_text(markers=free), decode_shardings=False
    )
    return lambda *arrays: wrapped(*arrays, *placements.markers(mesh, free))


def _on_one_device(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` traced without the mesh in force, on whose types its parts have no place."""

    def local(*arrays: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(placements.automatic({})):
            return call(*arrays)

    return local


def _places(part: Part, mesh: Mesh | AbstractMesh) -> tuple[Any, tuple[NamedSharding, ...]]:
    """Where results and operands lie, as a partitioning rule returns them."""
    results = tuple(NamedSharding(mesh, spec) for spec in part.results)
    return _one_or_all(results), tuple(NamedSharding(mesh, spec) for spec in part.operands)


def _one_or_all(found: tuple[Any, ...]) -> Any:
    """What a call with one result, or with several, returns."""
    return found[0] if len(found) == 1 else found


def _spec(letters: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) or None for letter in letters))


def _axes_of_letters(
    rule: ShardRule, mesh_sizes: Mapping[str, int], operands: Sequence[Placed]
) -> dict[str, MeshAxes]:
    """The mesh axes that cut each letter: the first operand that is cut there decides.

    An axis cuts one letter only, and a letter only into equal parts of whole blocks; otherwise
    the letter stays whole and is gathered.
    """
    sizes = rule.sizes(tuple(operand.shape for operand in operands))
    granularity = dict(rule.blocks.values())
    axes: dict[str, MeshAxes] = dict.fromkeys(sizes, ())
    taken: set[str] = set()
    for letters, operand in zip(rule.operands, operands, strict=True):
        for letter, wanted in zip(letters, operand.axes, strict=True):
            blocked = letter in rule.blocks or axes[letter]
            if not wanted or blocked or taken & set(wanted):
                continue
            parts = math.prod(mesh_sizes[axis] for axis in wanted)
            if letter in rule.whole or sizes[letter] % (parts * granularity.get(letter, 1)):
                _log_gather(letter, sizes[letter], parts, granularity.get(letter, 1))
                continue
            axes[letter] = wanted
            taken |= set(wanted)
    for letter, (base, _) in rule.blocks.items():
        axes[letter] = axes[base]
    return axes


@lru_cache(maxsize=1024)
def _log_gather(letter: str, size: int, parts: int, multiple: int) -> None:
    log.info(
        "kernel.gathered",
        extra={"dim": letter, "size": size, "parts": parts, "multiple": multiple},
    )


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
            results = once(*arrays)
            return results, jax.tree.map(lambda _: True, results)
        every = [
            x if is_mapped else jax.numpy.broadcast_to(x, (axis_size, *x.shape))
            for x, is_mapped in zip(arrays, mapped, strict=True)
        ]
        results = lax.map(lambda xs: once(*xs), tuple(every))
        return results, jax.tree.map(lambda _: True, results)

    return once
