"""Where XLA's partitioner put an array: the mesh axes that cut each dim, also inside a shard_map.

Inside a shard_map that leaves axes automatic, XLA partitions a call for one group of devices that
agree on the manual axes. It counts the devices of a group in an order that follows from the call's
result and that it does not tell. So a call takes one marker for each automatic axis: an array
that is known to be cut over that axis. From where the markers lie the order can be read.

This file alone reads the tilings of devices and the mesh that is set, for which JAX has no public
names inside `jit`.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """An operand: its shape, and the mesh axes that cut each dim, outermost first."""

    shape: tuple[int, ...]
    axes: tuple[MeshAxes, ...]


def axes_of_kind(mesh: Mesh | AbstractMesh, kind: AxisType) -> MeshAxes:
    """The axes of one kind that have more than one device."""
    kinds = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    return tuple(name for name, its_kind, size in kinds if its_kind == kind and size > 1)


def mesh_of(arrays: Sequence[Array]) -> AbstractMesh:
    """The mesh in force, else the one that the arrays' types name."""
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays))
    return next((mesh for mesh in meshes if mesh.axis_names), meshes[0])


def mesh_is_set() -> bool:
    """True inside `jax.set_mesh`: what is lowered now knows its devices."""
    internals: Any = importlib.import_module("jax._src.mesh")
    return not internals.get_concrete_mesh().empty


def automatic(sizes: Mapping[str, int]) -> AbstractMesh:
    """The mesh of these axes, all automatic."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def markers(mesh: AbstractMesh, axes: MeshAxes) -> list[Int[Array, " size"]]:
    """For each axis an array that is cut over it."""
    return [
        lax.with_sharding_constraint(
            jnp.arange(mesh.shape[axis]), NamedSharding(mesh, PartitionSpec(axis))
        )
        for axis in axes
    ]


def read_group(axes: MeshAxes, found: Sequence[jax.ShapeDtypeStruct]) -> AbstractMesh | None:
    """The group's mesh, its axes in the order in which XLA counts devices; None if unreadable.

    Args:
        found: the markers of `axes`, as the partitioner placed them.
    """
    strides: dict[str, int] = {}
    for axis, marker in zip(axes, found, strict=True):
        part = _part_of_each_device(marker)
        if part is None:
            return None
        strides[axis] = int(np.argmax(part[0] == 1))
    sizes = {axis: marker.shape[0] for axis, marker in zip(axes, found, strict=True)}
    ordered = sorted(axes, key=lambda axis: -strides[axis])
    group = automatic({axis: sizes[axis] for axis in ordered})
    placed = zip(axes, (axes_of(marker, group) for marker in found), strict=True)
    return group if all(cut == ((axis,),) for axis, cut in placed) else None


def placed(array: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> Placed:
    """An operand as the partitioner placed it on `mesh`."""
    return Placed(array.shape, axes_of(array, mesh))


def axes_of(array: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> tuple[MeshAxes, ...]:
    """The axes of `mesh` that cut each dim of an array as the partitioner placed it.

    A dim that only a part of an axis cuts has none: it is gathered.
    """
    parts = _part_of_each_device(array)
    if parts is None:
        return ((),) * array.ndim
    return tuple(_axes_that_step(part.reshape(mesh.axis_sizes), mesh.axis_names) for part in parts)


def axes_of_spec(spec: PartitionSpec, num_dims: int) -> tuple[MeshAxes, ...]:
    """The axes that `spec` names for each dim."""
    entries = (*spec, *(None,) * (num_dims - len(spec)))
    return tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in entries
    )


def _part_of_each_device(array: jax.ShapeDtypeStruct) -> list[np.ndarray] | None:
    """For each dim, which part of it each device holds; None if all hold the whole array."""
    sharding: Any = array.sharding
    if sharding is None:
        return None
    tiling = sharding._to_xla_hlo_sharding(array.ndim)
    if not tiling.is_tiled():
        return None
    # Dims behind the array's own count devices with equal parts.
    grid = tiling.tile_assignment_dimensions()
    devices = np.asarray(tiling.tile_assignment_devices())
    parts = []
    for index in np.indices(grid)[: array.ndim]:
        part = np.empty(devices.size, np.int64)
        part[devices] = index.reshape(-1)
        parts.append(part)
    return parts


def _axes_that_step(part: np.ndarray, names: Sequence[str]) -> MeshAxes:
    """The axes, outermost first, over whose devices a dim is cut; () if no axes cut it so.

    Args:
        part: which part of the dim each device of the mesh holds.
    """
    origin = (0,) * part.ndim
    steps = {
        axis: int(part[(*origin[:axis], 1, *origin[axis + 1 :])])
        for axis, size in enumerate(part.shape)
        if size > 1
    }
    axes = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
    index = np.indices(part.shape)
    expected = np.zeros_like(part)
    for axis in axes:
        expected = expected * part.shape[axis] + index[axis]
    return tuple(names[axis] for axis in axes) if np.array_equal(part, expected) else ()
