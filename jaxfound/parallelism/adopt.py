"""Takes in a script's own arrays: spread over a mesh as they are, without a model of ours.

A script keeps its modules, its optimizer and its jitted step. Its state, any pytree, is laid over
the mesh here; jit follows where its arguments lie. Shapes alone decide, so that an optimizer's
moments lie beside their parameter without being told which is whose.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.config.parallel import AXES
from jaxfound.parallelism.axes import ShardingRules
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.mesh import build_mesh
from jaxfound.parallelism.plan import ParallelPlan

log = logging.getLogger(__name__)

# A smaller array stays whole: gathering it costs more than holding it.
MIN_ELEMENTS = 1024


@runtime_checkable
class Declared(Protocol):
    """A variable that may say what its dims are, as `flax.nnx.Variable` does by `out_sharding`."""

    def get_metadata(self) -> dict[str, object]:
        """Return what is known of the variable besides its array."""
        ...


class Spread[T](NamedTuple):
    """A state on a mesh.

    Attributes:
        state: the tree that was given, each array where the mesh keeps it.
        rows: where a batch goes, `jax.device_put(batch, rows)`: its first dim is split over the
            batch axes.
    """

    state: T
    rows: NamedSharding


def spread[T](state: T, *, data: int = 1, fsdp: int = 1, tensor: int = 1) -> "Spread[T]":
    """Lay a script's state over every device of the job.

    Args:
        state: any pytree of arrays, e.g. `nnx.state((model, optimizer))`.
        data: copies of the state, each of which sees other rows.
        fsdp: pieces that every large array is cut into; they see other rows too.
        tensor: pieces of the dims that annotations put on this axis; without any it repeats work.
    Raises:
        PlanError: if the degrees do not multiply to the number of devices, or an annotated dim
            does not divide.
    """
    degrees = {"data": data, "fsdp": fsdp, "tensor": tensor}
    plan = ParallelPlan(degrees=tuple(degrees.get(axis, 1) for axis in AXES))
    mesh = build_mesh(plan)
    placed = jax.device_put(state, shardings_of(state, mesh=mesh))
    rows = NamedSharding(mesh, ShardingRules().activation_spec(("batch",)))
    return Spread(placed, rows)


def shardings_of[T](state: T, *, mesh: Mesh) -> T:
    """Return the state's tree with a NamedSharding in place of each array.

    A variable that says what its dims are (`nnx.Param(w, out_sharding=("embed", "ffn"),
    eager_sharding=False)`, in the words of docs/vocabulary.md or as names of mesh axes) is split
    accordingly. Any other array is cut over `fsdp` along its largest dim that divides, the first of
    equals; it stays whole when none does or when it is small.

    A model too large for one device is born in place with these:
    `jax.jit(make, out_shardings=shardings_of(jax.eval_shape(make), mesh=mesh))()`.

    Args:
        state: any pytree of arrays or of `jax.ShapeDtypeStruct`.
        mesh: from `build_mesh`.
    Raises:
        PlanError: if an annotated dim does not divide over its axes; names the array.
    """

    def of(path: tuple[object, ...], entry: object) -> object:
        dims = _dims_of(entry)
        name = jax.tree_util.keystr(path)
        return jax.tree.map(lambda a: NamedSharding(mesh, _spec(a, dims, mesh, name=name)), entry)

    found = jax.tree_util.tree_map_with_path(of, state, is_leaf=lambda e: isinstance(e, Declared))
    return cast(T, found)


def _dims_of(entry: object) -> tuple[str | None, ...] | None:
    """Return the dims that a variable says it has, None when it says nothing."""
    said = entry.get_metadata().get("out_sharding") if isinstance(entry, Declared) else None
    return None if said is None else tuple(cast(Sequence[str | None], said))


def _spec(
    array: jax.Array | jax.ShapeDtypeStruct,
    dims: tuple[str | None, ...] | None,
    mesh: Mesh,
    *,
    name: str,
) -> PartitionSpec:
    """Return how one array lies on the mesh."""
    if dims is None or len(dims) != array.ndim:
        return _largest_over_fsdp(array, mesh)
    rules = ShardingRules().param_spec(dims)
    spec = PartitionSpec(*(d if d in AXES else rule for d, rule in zip(dims, rules, strict=True)))
    try:
        NamedSharding(mesh, spec).shard_shape(array.shape)
    except ValueError as error:
        raise PlanError(
            f"{name} {array.shape} has the dims {dims}, which lie as {spec}, but the mesh is "
            f"{dict(mesh.shape)}: a dim does not divide. Change the degrees, or name the dim None"
        ) from error
    return spec


def _largest_over_fsdp(array: jax.Array | jax.ShapeDtypeStruct, mesh: Mesh) -> PartitionSpec:
    """Return the spec that cuts the largest dim that divides over fsdp."""
    degree = mesh.shape["fsdp"]
    fitting = [i for i, size in enumerate(array.shape) if size % degree == 0]
    if degree == 1 or array.size < MIN_ELEMENTS or not fitting:
        if array.size >= MIN_ELEMENTS and degree > 1:
            log.warning("adopt.whole", extra={"shape": array.shape, "fsdp": degree})
        return PartitionSpec()
    chosen = max(fitting, key=lambda i: array.shape[i])
    return PartitionSpec(*("fsdp" if i == chosen else None for i in range(array.ndim)))
