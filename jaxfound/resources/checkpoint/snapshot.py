"""A copy of the state in host memory that later steps cannot change."""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.resources.checkpoint.errors import CheckpointError
from jaxfound.resources.checkpoint.leaves import LeafPath, unwrap
from jaxfound.resources.topology import Device

# Of a device's memory, what a copy beside the state leaves free: blocks lie where they were given.
MARGIN = 0.1


class Stage:
    """Copies on the devices from which a snapshot goes to the host while steps go on.

    A step that donates the state waits until all of it has left for the host, a second for each
    50 GB; behind a copy on the device it waits for that. It is made where the most that steps have
    taken leaves room for it.
    """

    def __init__(self) -> None:
        self._fitted: dict[Device, int] = {}

    def copies(self, arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
        """Return copies beside `arrays`, not finished yet; None where there is no room for them."""
        wanted: dict[Device, int] = defaultdict(int)
        for array in arrays:
            for shard in array.addressable_shards:
                wanted[shard.device] += shard.data.nbytes
        for device, num_bytes in wanted.items():
            stats = device.memory_stats() or {}
            if not has_room(stats, num_bytes=num_bytes, fitted=self._fitted.get(device, 0)):
                return None
        try:
            copies = _copies(arrays)
        except jax.errors.JaxRuntimeError:
            # In pieces too small for it.
            return None
        self._fitted = dict(wanted)
        return copies


def has_room(stats: Mapping[str, int], *, num_bytes: int, fitted: int) -> bool:
    """Say whether a device has room for a copy beside the most that was ever in use.

    Args:
        stats: what the device says of its memory; empty where it says nothing.
        num_bytes: of the copy.
        fitted: bytes of an earlier copy, which the most that was in use may count.
    """
    if not {"bytes_limit", "peak_bytes_in_use"} <= stats.keys():
        return False
    limit, peak = stats["bytes_limit"], stats["peak_bytes_in_use"]
    return num_bytes <= fitted or num_bytes <= limit - peak - int(MARGIN * limit)


def _copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Start to copy arrays where they are; one program runs on one set of devices."""
    groups: dict[frozenset[Device], list[int]] = defaultdict(list)
    for place, array in enumerate(arrays):
        groups[frozenset(array.sharding.device_set)].append(place)
    found = list(arrays)
    for places in groups.values():
        for place, copy in zip(places, _copied([arrays[i] for i in places]), strict=True):
            found[place] = copy
    return found


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def to_host(arrays: Sequence[jax.Array], *, stage: Stage | None = None) -> list[jax.Array]:
    """Return copies in host memory, finished; on their way there from those of a `stage`."""
    targets = [host_sharding(array.sharding) for array in arrays]
    staged = None if stage is None else stage.copies(arrays)
    if staged is not None:
        return jax.device_put(staged, targets, may_alias=False)
    return jax.block_until_ready(jax.device_put(list(arrays), targets, may_alias=False))


def take(
    table: Mapping[LeafPath, jax.Array], *, stage: Stage | None = None
) -> dict[LeafPath, jax.Array]:
    """Return copies of all leaves, one replica each, random keys as integers.

    The copies are in pinned host memory where the device has one (a GPU's transfer into it is many
    times faster than into pageable memory), and beside the originals where the device's memory is
    the host's. A view would not do: on CPU `np.asarray` shares the buffer, and donation of the
    original then writes later steps into it. They are finished, or come from copies of a `stage`.

    Raises:
        CheckpointError: if a leaf has shards on devices of another process.
    """
    for path, leaf in table.items():
        if not leaf.is_fully_addressable:
            raise CheckpointError(
                f"leaf {'.'.join(path)!r} has shards on devices of other processes, but this "
                "manager knows of one process. Give it the job's ControlPlane"
            )
    replicas = [one_replica(unwrap(leaf)) for leaf in table.values()]
    return dict(zip(table, to_host(replicas, stage=stage), strict=True))


def warm(table: Mapping[LeafPath, jax.Array]) -> None:
    """Allocate the host memory of a snapshot of this process's shards of `table`, and free it.

    The pool of pinned memory keeps it: the first use costs half a second a gigabyte, later ones
    nothing (measured on one H200).
    """
    views = [shard.data for leaf in table.values() for shard in unwrap(leaf).addressable_shards]
    to_host(views)


def is_in_host_memory(table: Mapping[LeafPath, jax.Array]) -> bool:
    """Say whether the devices of all leaves compute in the host's memory."""
    devices = {device for leaf in table.values() for device in leaf.sharding.device_set}
    return all(device.platform == "cpu" for device in devices)


def host_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return `sharding` in pinned host memory; unchanged where the device has no other memory."""
    device = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return sharding
    return sharding.with_memory_kind("pinned_host")


def one_replica(x: jax.Array) -> jax.Array:
    """Return `x` on as few devices as hold it once, sharing its buffers.

    Eight data-parallel devices hold the same state eight times; the host needs it once.
    """
    if x.is_fully_replicated:
        return x.addressable_data(0)
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return x
    used = axes_of(sharding.spec)
    mesh = sharding.mesh
    chosen = tuple(slice(None) if name in used else 0 for name in mesh.axis_names)
    names = tuple(name for name in mesh.axis_names if name in used)
    small = NamedSharding(Mesh(mesh.devices[chosen], names), sharding.spec)
    pieces = [shard.data for shard in x.addressable_shards if shard.device in small.device_set]
    return jax.make_array_from_single_device_arrays(x.shape, small, pieces)


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Return the mesh axes that `spec` splits a dimension over."""
    axes: set[str] = set()
    for entry in spec:
        axes.update([entry] if isinstance(entry, str) else entry or ())
    return frozenset(axes)
