"""Pytrees as flat tables of named leaves: what a checkpoint stores and what a restore asks for."""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxfound.resources.checkpoint.errors import CheckpointError

LeafPath = tuple[str, ...]
AbstractLeaf = jax.Array | jax.ShapeDtypeStruct

# Random keys are stored as the integers behind them; the dtype's name says how to wrap them again.
KEY_IMPLS: dict[str, str] = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}
# Leaves named in one error message; a wrong model differs in all of them.
MAX_NAMED = 8


class LeafSpec(NamedTuple):
    """One leaf: its path in the tree, its shape and the name of its dtype."""

    path: LeafPath
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        """The dotted path, for people."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def flatten(tree: object) -> dict[LeafPath, AbstractLeaf]:
    """Return the leaves of `tree` by path, in the order of the tree.

    Raises:
        CheckpointError: if a leaf is neither a jax array nor a ShapeDtypeStruct, or if two leaves
            have the same path.
    """
    table: dict[LeafPath, AbstractLeaf] = {}
    for entries, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in entries)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"leaf {'.'.join(path)!r} is a {type(leaf).__name__}: a checkpoint's state holds "
                "jax arrays only. Use jnp.asarray, or put plain values into the metadata"
            )
        if not path or path in table:
            raise CheckpointError(
                f"leaf {'.'.join(path)!r} has no path of its own: every leaf needs a name that no "
                "other leaf has. Put the state into a dict with distinct keys"
            )
        if is_key(leaf) and str(leaf.dtype) not in KEY_IMPLS:
            raise CheckpointError(
                f"leaf {'.'.join(path)!r} holds random keys of {leaf.dtype}, which cannot be "
                f"stored: use one of {list(KEY_IMPLS.values())}"
            )
        table[path] = leaf
    return table


def describe(table: Mapping[LeafPath, AbstractLeaf]) -> tuple[LeafSpec, ...]:
    """Return what every leaf of `table` is, sorted by path."""
    return tuple(
        LeafSpec(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in sorted(table.items())
    )


def check_fits(
    have: Iterable[LeafSpec], want: Iterable[LeafSpec], *, where: str, allow_unread: bool
) -> None:
    """Return when every wanted leaf is there with its shape and dtype, and none is left over.

    Args:
        have: the leaves of the checkpoint.
        want: the leaves that are asked for.
        where: the checkpoint, for the message.
        allow_unread: True when leaves that nobody asks for may stay on disk.
    Raises:
        CheckpointError: names the leaves that are missing, left over or different.
    """
    stored = {leaf.path: leaf for leaf in have}
    asked = {leaf.path: leaf for leaf in want}
    missing = [leaf.name for path, leaf in asked.items() if path not in stored]
    unread = [leaf.name for path, leaf in stored.items() if path not in asked]
    differ = [
        f"{leaf.name}: {stored[path]} in the checkpoint, {leaf} asked"
        for path, leaf in asked.items()
        if path in stored and stored[path] != leaf
    ]
    faults = [
        *_named("missing from the checkpoint", missing),
        *_named("only in the checkpoint", [] if allow_unread else unread),
        *_named("different", differ),
    ]
    if faults:
        raise CheckpointError(
            f"{where} does not fit the state that it is restored into.\n  "
            + "\n  ".join(faults)
            + "\nBuild the state from the config that was saved with the run, or train the "
            "changed model under another run name"
        )


def _named(what: str, names: list[str]) -> list[str]:
    """Return one line that lists the first of `names`; none for an empty list."""
    if not names:
        return []
    rest = f" … and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"{what} ({len(names)}): {'; '.join(names[:MAX_NAMED])}{rest}"]


def is_key(leaf: AbstractLeaf) -> bool:
    """Say whether `leaf` holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unwrap(leaf: jax.Array) -> jax.Array:
    """Return the numbers of `leaf`: the integers behind random keys, anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def unwrap_abstract(leaf: AbstractLeaf) -> jax.ShapeDtypeStruct:
    """Return what `unwrap` gives for a leaf like this one, with the same sharding."""
    plain = cast(
        jax.ShapeDtypeStruct, jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    )
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=target_sharding(leaf))


def wrap(numbers: jax.Array, *, like: AbstractLeaf) -> jax.Array:
    """Return `numbers` as random keys where `like` holds keys; the inverse of `unwrap`."""
    if not is_key(like):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=KEY_IMPLS[str(like.dtype)])


def target_sharding(leaf: AbstractLeaf) -> jax.sharding.Sharding:
    """Return where `leaf` is to live: its own sharding, or the first local device when it has none.

    Raises:
        CheckpointError: if the sharding names a mesh without devices.
    """
    sharding = leaf.sharding
    if sharding is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise CheckpointError(
            f"the state to restore into is sharded over {sharding}, a mesh without devices. "
            "Give every ShapeDtypeStruct a NamedSharding over a mesh of devices"
        )
    return cast(jax.sharding.Sharding, sharding)
