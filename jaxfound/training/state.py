"""What changes during training, and where on the mesh it lives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.models.build import Frame

# An array; in a state that describes another, its shape or its sharding.
Leaf = Any


class TrainState(NamedTuple):
    """Everything a resumed run needs; the batch of a step is a function of `step` alone.

    Attributes:
        step: optimizer steps done, int32; also the position in the data.
        params: float32 master weights by dotted path.
        buffers: float32 arrays no optimizer touches (the router's bias), by dotted path.
        optimizer: optax's state.
        rng: key data of the run, uint32 [2]; consumers fold the step in.
    """

    step: Leaf
    params: dict[str, Leaf]
    buffers: dict[str, Leaf]
    optimizer: optax.OptState
    rng: Leaf


def create_train_state(
    frame: Frame, tx: optax.GradientTransformation, *, seed: int, mesh: Mesh
) -> TrainState:
    """Return the state of step 0, every array created where the mesh keeps it."""

    def fresh() -> TrainState:
        arrays = frame.fresh(seed)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=arrays.params,
            buffers=arrays.buffers,
            optimizer=tx.init(arrays.params),
            rng=jax.random.key_data(jax.random.key(seed)),
        )

    return jax.jit(fresh, out_shardings=state_shardings(frame, tx, mesh=mesh))()


def state_shardings(frame: Frame, tx: optax.GradientTransformation, *, mesh: Mesh) -> TrainState:
    """Return the sharding of every array of the state.

    A moment lies where its gradient and its parameter come to meet it: from ZeRO stage 1 on cut
    over fsdp, whatever the parameter is.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = frame.shardings(mesh)
    moments = optax.tree_utils.tree_map_params(
        tx,
        lambda moment, sharding: moment if is_masked(moment) else sharding,
        jax.eval_shape(tx.init, frame.shapes().params),
        frame.slot_shardings(mesh),
        transform_non_params=lambda _: whole,
        is_leaf=is_masked,
    )
    return TrainState(whole, arrays.params, arrays.buffers, moments, whole)


def is_masked(moment: object) -> bool:
    """Return whether a parameter has no moment here: another part of the optimizer moves it."""
    return isinstance(moment, optax.MaskedNode)


def abstract_train_state(
    frame: Frame, tx: optax.GradientTransformation, *, mesh: Mesh
) -> TrainState:
    """Return the state as shapes with shardings: what a checkpoint is restored into."""
    shapes = frame.shapes()
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=shapes.params,
        buffers=shapes.buffers,
        optimizer=jax.eval_shape(tx.init, shapes.params),
        rng=jax.ShapeDtypeStruct((2,), jnp.uint32),
    )
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        state,
        state_shardings(frame, tx, mesh=mesh),
    )
