"""Logical dims of arrays and the mesh axes that split them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxfound.config.parallel import AxisName

BATCH_AXES: tuple[AxisName, ...] = ("data", "fsdp", "expert")

# A dim that is not a key here is never split. fsdp cuts a parameter along `embed`, or along the
# latent rank where there is no `embed`: an axis cuts the first dim that asks for it, once.
PARAM_AXES: Mapping[str, tuple[AxisName, ...]] = {
    "layers": ("pipeline",),
    "experts": ("expert",),
    "embed": ("fsdp",),
    "latent": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
}
ACTIVATION_AXES: Mapping[str, tuple[AxisName, ...]] = {
    "batch": BATCH_AXES,
    "seq": ("context",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
}


@dataclass(frozen=True)
class ShardingRules:
    """Maps the logical dims of parameters and activations to mesh axes.

    Attributes:
        unsplit: dims that stay whole although the table above would split them, e.g. `kv_heads`
            when there are fewer of them than tensor-parallel devices.
    """

    unsplit: tuple[str, ...] = ()

    def param_axes(self, dims: Sequence[str | None]) -> tuple[tuple[AxisName, ...], ...]:
        """Return the mesh axes that split each dim of a stored parameter."""
        return self._axes(dims, PARAM_AXES)

    def param_spec(self, dims: Sequence[str | None]) -> PartitionSpec:
        """Return how a parameter with these dims is stored on the mesh."""
        return self._spec(dims, PARAM_AXES)

    def activation_spec(self, dims: Sequence[str | None]) -> PartitionSpec:
        """Return how an activation with these dims lies on the mesh."""
        return self._spec(dims, ACTIVATION_AXES)

    def gathered_spec(self, dims: Sequence[str | None]) -> PartitionSpec:
        """Return how a parameter lies while it is used: whole over fsdp, split over the rest."""
        table = {d: a for d, a in PARAM_AXES.items() if "fsdp" not in a}
        return self._spec(dims, table)

    def constrain(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """Pin an activation to its place on the mesh in force; without a mesh it is `x`."""
        return _pin(x, self.activation_spec(dims))

    def gather(self, w: jax.Array, *dims: str | None) -> jax.Array:
        """Pin a parameter to its place during use, which all-gathers what fsdp split.

        Left to itself the partitioner may gather activations instead and split the product over
        fsdp: tensor parallelism that nobody asked for.
        """
        return _pin(w, self.gathered_spec(dims))

    def on_each_device[*In, Out](
        self,
        fn: Callable[[*In], Out],
        *,
        takes: Sequence[PartitionSpec],
        gives: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Callable[[*In], Out]:
        """Return `fn` run by each device on its own shards, when the mesh has more than one.

        Sorts and top-k are whole-array operations to the partitioner: left to it, every token
        would be gathered on every device.

        Args:
            fn: sees shards; sums over an axis with `sum_over`.
            takes: how each argument lies on the mesh.
            gives: how the results lie.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = {a for a in mesh.axis_names if mesh.shape[a] > 1}
        if not manual:
            return fn
        outs = gives if isinstance(gives, tuple) else (gives,)
        specs = tuple(_only(s, manual) for s in outs)
        # check_vma off: the shards' types would have to be cast by hand around every scatter.
        return jax.shard_map(
            fn,
            in_specs=tuple(_only(s, manual) for s in takes),
            out_specs=specs if isinstance(gives, tuple) else specs[0],
            axis_names=manual,
            check_vma=False,
        )

    def _spec(
        self, dims: Sequence[str | None], table: Mapping[str, tuple[AxisName, ...]]
    ) -> PartitionSpec:
        entries = self._axes(dims, table)
        return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))

    def _axes(
        self, dims: Sequence[str | None], table: Mapping[str, tuple[AxisName, ...]]
    ) -> tuple[tuple[AxisName, ...], ...]:
        used: set[AxisName] = set()
        found = []
        for dim in dims:
            asked = () if dim is None or dim in self.unsplit else table.get(dim, ())
            found.append(tuple(axis for axis in asked if axis not in used))
            used.update(found[-1])
        return tuple(found)


TABLE_RULES = ShardingRules()


def sum_over(x: jax.Array, axis: AxisName) -> jax.Array:
    """Return the sum of x over a mesh axis inside `on_each_device`; x itself when it is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.psum(x, axis) if mesh.shape.get(axis, 1) > 1 else x


def _pin(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain `x` to `spec` over the axes the mesh in force leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    free = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Auto}
    return jax.lax.with_sharding_constraint(x, _only(spec, free))


def _only(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    """Return `spec` without the axes that are not in `axes`."""
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    return PartitionSpec(*(tuple(n for n in e if n in axes) or None for e in entries))
