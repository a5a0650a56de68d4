"""The state as checkpoints hold it: every layer once and in order, whatever pipeline trains it.

A pipeline may store its layers in another order, twice, or with empty places between them
(`StageLayers`). Saved so, a checkpoint could be read by that layout alone. It is turned into the
natural form on the devices before it is written, and back when it is read, by every reader alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.models.build import Arrays, Frame
from jaxfound.training.state import (
    Leaf,
    TrainState,
    abstract_state,
    abstract_train_state,
    is_masked,
    state_shardings,
)

type Change = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


class SavedForm:
    """Turns a run's state into what its checkpoints hold, and back."""

    def __init__(self, frame: Frame, tx: optax.GradientTransformation, *, mesh: Mesh) -> None:
        self.frame, self.tx, self.mesh = frame, tx, mesh
        self.is_stored = frame.stages is None or frame.stages.is_natural
        execution = replace(frame.execution, pipelining=None)
        self._natural = frame if self.is_stored else Frame(frame.cfg, execution=execution)

    @cached_property
    def like(self) -> TrainState:
        """The saved state as shapes with shardings: what a checkpoint is restored into."""
        if self.is_stored:
            return abstract_train_state(self.frame, self.tx, mesh=self.mesh)

        def placed(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
            spec = even_spec(place.spec, leaf.shape, dict(self.mesh.shape))
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state = abstract_state(self._natural, self.tx)
        return jax.tree.map(placed, state, state_shardings(self._natural, self.tx, mesh=self.mesh))

    @cached_property
    def weights_like(self) -> dict[str, dict[str, Leaf]]:
        """`params` and `buffers` of `like`."""
        return {"params": self.like.params, "buffers": self.like.buffers}

    def natural(self, state: TrainState) -> TrainState:
        """Return the state as it is saved; the state itself where it is stored so."""
        return state if self.is_stored else self._to_natural(state)

    def stored(self, state: TrainState) -> TrainState:
        """Return a saved state as the run keeps it."""
        return state if self.is_stored else self._to_stored(state)

    def stored_weights(self, arrays: Arrays) -> Arrays:
        """Return saved parameters and buffers as the run keeps them."""
        if self.is_stored:
            return arrays
        return self._weights_to_stored(arrays)

    @cached_property
    def _to_natural(self) -> Callable[[TrainState], TrainState]:
        places = jax.tree.map(lambda leaf: leaf.sharding, self.like)
        return jax.jit(lambda state: self._changed(state, self.frame.natural), out_shardings=places)

    @cached_property
    def _to_stored(self) -> Callable[[TrainState], TrainState]:
        places = state_shardings(self.frame, self.tx, mesh=self.mesh)
        return jax.jit(lambda state: self._changed(state, self.frame.stored), out_shardings=places)

    @cached_property
    def _weights_to_stored(self) -> Callable[[Arrays], Arrays]:
        places = self.frame.shardings(self.mesh)
        return jax.jit(lambda arrays: Arrays(*map(self.frame.stored, arrays)), out_shardings=places)

    def _changed(self, state: TrainState, change: Change) -> TrainState:
        def one(moment: Leaf, path: str) -> Leaf:
            return moment if is_masked(moment) else change({path: moment})[path]

        moments = optax.tree_utils.tree_map_params(
            self.tx, one, state.optimizer, {path: path for path in state.params}, is_leaf=is_masked
        )
        return state._replace(
            params=change(state.params),
            buffers=change(state.buffers),
            optimizer=cast(optax.OptState, moments),
        )


def even_spec(
    spec: PartitionSpec, shape: Sequence[int], degrees: Mapping[str, int]
) -> PartitionSpec:
    """Return a spec without uneven layers: `pipeline` moves to the largest dim that divides.

    Layers that stages share unevenly cannot be cut along their stack; along a dim that no axis cuts
    every device still holds its part alone. An array without such a dim, a norm's scale, is whole
    over `pipeline`: XLA cannot gather layers into two axes of one dim.
    """
    entries: list[tuple[str, ...]] = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    entries += [()] * (len(shape) - len(entries))

    def pieces(axes: Sequence[str]) -> int:
        return math.prod(degrees[axis] for axis in axes)

    for i, axes in enumerate(entries):
        if "pipeline" in axes and shape[i] % pieces(axes):
            entries[i] = tuple(a for a in axes if a != "pipeline")
            rest = [j for j in range(len(shape)) if j != i and pieces(entries[j]) == 1]
            fitting = [j for j in rest if shape[j] % degrees["pipeline"] == 0]
            if fitting:
                entries[max(fitting, key=lambda j: shape[j])] = ("pipeline",)
    return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))
