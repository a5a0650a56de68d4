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
        queued = _queue(self._table) if self._queued is None else self._queued
        return {
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
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    word = WORDS[info(x.dtype).bits]
    return jax.lax.bitcast_convert_type(x, jnp.dtype(word)).astype(jnp.uint32)
