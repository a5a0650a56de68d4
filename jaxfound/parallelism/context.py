"""Rows cut over the `context` axis so that causal attention costs every device the same.

A row is cut into 2c chunks for c devices; device i holds chunks i and 2c - 1 - i. A chunk sees
itself and the chunks before it, so each device computes 2c + 1 pairs of chunks, whatever i is;
with neighbouring chunks the last device would compute almost all the others' work again.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.parallel import AxisName
from jaxfound.parallelism.axes import ShardingRules, is_manual

AXIS: AxisName = "context"
# Chunks of a row on one device: an early one and the late one that makes up for it.
CHUNKS_EACH = 2


def context_degree() -> int:
    """Return the devices that share a row on the mesh in force; 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def chunk_order(degree: int) -> tuple[int, ...]:
    """Return which chunk of a row lies at each place of the arranged row, device by device."""
    last = CHUNKS_EACH * degree - 1
    return tuple(chunk for i in range(degree) for chunk in (i, last - i))


def places_of(length: int, degree: int) -> np.ndarray:
    """Return the place in its row of each token of an arranged row [T].

    Raises:
        ValueError: if a row cannot be cut into 2 x degree chunks.
    """
    num_chunks = CHUNKS_EACH * degree
    if length % num_chunks:
        raise ValueError(
            f"rows of {length} tokens cannot be cut into {num_chunks} chunks for context={degree}. "
            f"Use a length that {num_chunks} divides"
        )
    return np.arange(length).reshape(num_chunks, -1)[list(chunk_order(degree))].reshape(-1)


def arranged(x: jax.Array, degree: int) -> jax.Array:
    """Return x [B T ...] with the chunks of each row in the order of the devices."""
    return _chunks_moved(x, chunk_order(degree))


def in_order(x: jax.Array, degree: int) -> jax.Array:
    """Return an arranged x [B T ...] with its chunks in the order of the row again."""
    return _chunks_moved(x, tuple(int(i) for i in np.argsort(chunk_order(degree))))


def whole_rows(x: jax.Array, *dims: str | None, rules: ShardingRules) -> jax.Array:
    """Return the arranged rows x [B T ...], cut over `context`, whole: one copy a device.

    The copies are [c·B T ...], cut over `context` along the first dim, so that what is computed
    from a copy stays its device's and the gradients of all copies are summed in one
    reduce_scatter, here.

    Args:
        x: what a device has of each row.
        dims: names of the dims behind B and T.
        rules: how they lie on the mesh.
    """
    if context_degree() == 1:
        return x

    parts = rules.activation_spec(("batch", "seq", *dims))
    copies = rules.activation_spec(("copies", None, *dims))

    def gather(part: jax.Array) -> jax.Array:
        return jax.lax.all_gather(part, AXIS, axis=1, tiled=True)

    def scatter(grad: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(grad, AXIS, scatter_dimension=1, tiled=True)

    # Its own gradient: that of a map over all axes would sum equal copies over `tensor` again.
    whole = jax.custom_vjp(rules.on_each_device(gather, takes=(parts,), gives=copies))
    back = rules.on_each_device(scatter, takes=(copies,), gives=parts)
    whole.defvjp(lambda x: (whole(x), None), lambda _, grad: (back(grad),))
    return whole(x)


def of_whole_rows(ids: jax.Array) -> jax.Array:
    """Return ids [B T] of whole arranged rows, of which a device of a pipeline holds a part."""
    return jax.lax.all_gather(ids, AXIS, axis=1, tiled=True) if is_manual(AXIS) else ids


def parts_here() -> int:
    """Return the devices' parts that the rows of an array consist of here: 1 in a pipeline."""
    return 1 if is_manual(AXIS) else context_degree()


def _chunks_moved(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    if len(order) == CHUNKS_EACH:
        return x
    chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, i : i + 1] for i in order], axis=1).reshape(x.shape)
