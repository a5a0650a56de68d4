"""The state as checkpoints hold it: every layer once and in order, whatever pipeline trains it.

A pipeline may store its layers in another order, twice, or with empty places between them
(`StageLayers`). Saved so, a checkpoint could be read by that layout alone. It is turned into the
natural form on the devices before it is written, and back when it is read, by every reader alike.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import cast

import jax
import optax
from jax.sharding import Mesh

from jaxfound.models.build import Arrays, Frame
from jaxfound.training.state import (
    Leaf,
    TrainState,
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
        whole = frame.execution.whole
        self._natural = frame if self.is_stored else Frame(frame.cfg, execution=whole)

    @cached_property
    def like(self) -> TrainState:
        """The saved state as shapes with shardings: what a checkpoint is restored into."""
        return abstract_train_state(self._natural, self.tx, mesh=self.mesh)

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
