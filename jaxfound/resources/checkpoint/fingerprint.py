"""One number for the contents of an array, the same on every mesh, computed where the array is.

Sums of files say that bytes are those that were written. A fingerprint is of what the devices hold:
it also sees a piece that was read into the wrong place, or that was wrong before it was written.

The number is the sum of (bits of an element) x (an odd number made from its index), modulo 2^32. A
change of one bit changes it for certain, an exchange of elements in all likelihood. Sums do not
depend on their order, so the mesh does not matter; integers, so no rounding.
"""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.resources.checkpoint.leaves import LeafPath, is_key

# Knuth's multiplier: indices that differ in one dimension get weights far apart.
MULTIPLIER = 2654435761
# Of an array that numpy looks at, at a time: what it makes of that stays in a cache.
PART_BYTES = 1 << 20
# Unsigned integers that hold the bits of an element of so many bits; 64 bits are two of 32.
WORDS: Mapping[int, str] = {
    2: "uint2", 4: "uint4", 8: "uint8", 16: "uint16", 32: "uint32", 64: "uint32",
}  # fmt: skip


class Prints:
    """The fingerprints of a table of leaves, on their way from the devices.

    Computing them is queued now, before the leaves can be donated, and `read` waits for the
    numbers; or, for leaves that nobody donates, it is left to `read`.
    """

    def __init__(
        self, table: Mapping[LeafPath, jax.Array], *, when: Literal["now", "on_read"] = "now"
    ) -> None:
        self._table = table
        self._queued = _queue(table) if when == "now" else None

    def read(self) -> dict[LeafPath, int]:
        """Return the numbers by leaf."""
        here: dict[LeafPath, int] = {}
        queued = self._queued
        if queued is None:
            here = {path: _in_parts(leaf) for path, leaf in self._table.items() if _is_near(leaf)}
            queued = _queue({p: leaf for p, leaf in self._table.items() if p not in here})
        return here | {
            path: int(number)
            for paths, numbers in queued
            for path, number in zip(paths, np.asarray(numbers.addressable_data(0)), strict=True)
        }


def _queue(table: Mapping[LeafPath, jax.Array]) -> list[tuple[list[LeafPath], jax.Array]]:
    """Start to compute the fingerprints; one program runs on one set of devices."""
    groups: dict[frozenset[object], list[LeafPath]] = defaultdict(list)
    for path, leaf in table.items():
        groups[frozenset(leaf.sharding.device_set)].append(path)
    return [(paths, _all([table[path] for path in paths])) for paths in groups.values()]


def _is_near(leaf: jax.Array) -> bool:
    """Whether all of a leaf is in this process's memory, its elements whole bytes in one word."""
    if is_key(leaf) or not leaf.is_fully_addressable:
        return False
    if leaf.dtype == jnp.bool_ or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return False
    on_cpu = all(device.platform == "cpu" for device in leaf.sharding.device_set)
    return on_cpu and _bits_of(leaf.dtype) in (8, 16, 32)


def _in_parts(leaf: jax.Array) -> int:
    """Return the fingerprint of a leaf that is near.

    By numpy, some lines at a time: XLA for a CPU writes all products of an array out before it
    adds them up, as much memory again as a state takes.
    """
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return sum(_of_shard(np.asarray(shard.data), shard.index) for shard in shards) % 2**32


def _of_shard(numbers: np.ndarray, index: tuple[slice, ...]) -> int:
    words = np.atleast_1d(numbers).view(f"uint{8 * numbers.itemsize}")
    starts = [part.start or 0 for part in index] or [0]
    lines = max(PART_BYTES * len(words) // max(numbers.nbytes, 1), 1)
    total = 0
    for first in range(0, len(words), lines):
        part = words[first : first + lines].astype(np.uint32)
        weights = np.zeros((), np.uint32)
        for start, size in zip([starts[0] + first, *starts[1:]], part.shape, strict=True):
            positions = np.arange(start, start + size, dtype=np.uint64).astype(np.uint32)
            weights = weights[..., None] * np.uint32(MULTIPLIER) + positions
        part *= 2 * weights + 1
        total += int(part.sum(dtype=np.uint32))
    return total


def differing(have: Mapping[LeafPath, int], want: Mapping[LeafPath, int]) -> list[str]:
    """Return a sentence for every leaf of `have` whose fingerprint in `want` is another."""
    return [
        f"leaf {'.'.join(path)} has fingerprint {number:08x} on the devices, "
        f"{want[path]:08x} when it was saved"
        for path, number in have.items()
        if path in want and want[path] != number
    ]


@jax.jit
def _all(leaves: list[jax.Array]) -> jax.Array:
    """Return the fingerprints of all `leaves`, everywhere."""
    return jnp.stack([fingerprint(leaf) for leaf in leaves])


def fingerprint(x: jax.Array) -> jax.Array:
    """Return the fingerprint of `x`, a uint32, for use under jit."""
    bits = _bits(jax.random.key_data(x) if is_key(x) else x)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        position = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        index = index * jnp.uint32(MULTIPLIER) + position
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of `x` as uint32: 64-bit and complex elements as two of them."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _bits(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    word = WORDS[_bits_of(x.dtype)]
    return jax.lax.bitcast_convert_type(x, jnp.dtype(word)).astype(jnp.uint32)


def _bits_of(dtype: jnp.dtype) -> int:
    """Return the bits of a real number in a format."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits
