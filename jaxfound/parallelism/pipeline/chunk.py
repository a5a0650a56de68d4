"""The layers of a chunk, forward and backward.

The backward pass is written out: it walks the layers in reverse and adds the gradients of each to
the sums as it passes. Differentiating the walk would return the gradients of all of them at once,
beside the sums that they are then added to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfound.parallelism.remat import rematerialize

# Any pytree of arrays.
type Tree = Any
# A gradient of the output -> what became of the parameters' gradients, a gradient of the input.
type Pull = Callable[[jax.Array], tuple[Tree, jax.Array]]

# Of a layer's parameters, what is fixed, input and piece: what gradients go to, and what lies
# nowhere else while the walk goes on.
IS_VARIED = (True, False, True, False)
IS_SAVED = (False, False, True, False)


@dataclass(frozen=True)
class Layers:
    """How one layer is computed, and many.

    Attributes:
        run: (params, fixed, input, piece) -> (output, loss, report) of one layer.
        remat: what the backward pass keeps of a layer: a name in `parallelism.remat.POLICIES`.
        in_a_step: layers unrolled in a step of the walk; 0 = all.
    """

    run: Callable[[Tree, Tree, jax.Array, Tree], tuple[jax.Array, jax.Array, Tree]]
    remat: str = "full"
    in_a_step: int = 1

    def unroll(self, num_layers: int) -> int:
        """Return how many of so many layers a step of the walk has."""
        return min(self.in_a_step or num_layers, num_layers)


class Chunk(NamedTuple):
    """One of a rank's chunks.

    Attributes:
        params: parameters of all the rank's chunks, each array [chunks layers ...].
        fixed: what else layers need and no gradient goes to, each array [chunks layers ...].
        number: which chunk it is.
    """

    params: Tree
    fixed: Tree
    number: jax.Array | int

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return jax.tree.leaves(self.fixed)[0].shape[1]

    def layer(self, index: jax.Array | int) -> tuple[Tree, Tree]:
        """Return the parameters of a layer, and what else it needs.

        They are taken from where they lie: of several chunks none is copied to take it apart.
        """
        return tuple(pick_layer(tree, self.number, index) for tree in (self.params, self.fixed))


class Passed(NamedTuple):
    """A forward pass that can be gone back.

    Attributes:
        output: of the last layer.
        report: what the layers reported [layers ...].
        pull: goes back; every layer's loss counts once.
    """

    output: jax.Array
    report: Tree
    pull: Pull


def walk_forward(layers: Layers, chunk: Chunk, x: jax.Array, piece: Tree) -> jax.Array:
    """Return the output of a chunk."""

    def one(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        params, fixed = chunk.layer(index)
        return layers.run(params, fixed, x, piece)[0], None

    count = chunk.num_layers
    return lax.scan(one, x, jnp.arange(count), unroll=layers.unroll(count))[0]


def walk_adding(
    layers: Layers,
    chunk: Chunk,
    x: jax.Array,
    piece: Tree,
    *,
    sums: Tree,
    pin: Callable[[Tree], Tree],
) -> Passed:
    """Return a chunk's forward pass; going back gives `sums` with its gradients added.

    What is kept on the way is what the policy keeps of each layer, its parameters never: the way
    back takes them from where they lie.

    Args:
        layers: how layers are run.
        chunk: which are.
        x: input of the first.
        piece: the micro-batch.
        sums: of gradients, each array [chunks layers ...].
        pin: keeps them in their place on the axes that are left to the partitioner.
    """
    count = chunk.num_layers
    order, unroll = jnp.arange(count), layers.unroll(count)
    run = rematerialize(layers.run, layers.remat, in_loop=unroll < count, drops_moves=True)

    def of_layer(params: Tree, fixed: Tree, x: jax.Array, piece: Tree) -> tuple[tuple, Tree]:
        y, loss, report = run(params, fixed, x, piece)
        return (y, loss), report

    def forth(x: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple]:
        at = (*chunk.layer(index), x, piece)
        (y, loss), pull, report = jax.vjp(
            of_layer, *at, has_aux=True, in_nzs=IS_VARIED, saveable_args=IS_SAVED
        )
        return y, (pull, loss, report)

    def back(carry: tuple[jax.Array, Tree], at: tuple) -> tuple[tuple[jax.Array, Tree], None]:
        of_y, sums = carry
        index, pull, loss = at
        params, fixed = chunk.layer(index)
        pull = pull.replace(args_res=[params, fixed, pull.args_res[2], piece])
        of_params, _, of_x, _ = pull((of_y, jnp.ones_like(loss)))
        return (of_x, pin(add_to_layer(sums, of_params, chunk.number, index))), None

    y, (pulls, losses, report) = lax.scan(forth, x, order, unroll=unroll)

    def pull(of_y: jax.Array) -> tuple[Tree, jax.Array]:
        way = (order, pulls, losses)
        (of_x, added), _ = lax.scan(back, (of_y, sums), way, reverse=True, unroll=unroll)
        return added, of_x

    return Passed(y, report, pull)


def walk_apart(layers: Layers, params: Tree, fixed: Tree, x: jax.Array, piece: Tree) -> Passed:
    """Return a chunk's forward pass, unrolled; going back gives its gradients [layers ...].

    Args:
        layers: how layers are run.
        params: of the chunk, each array [layers ...].
        fixed: what else its layers need, each array [layers ...].
        x: input of the first.
        piece: the micro-batch.
    """
    run = rematerialize(layers.run, layers.remat, in_loop=False, drops_moves=True)

    def one(x: jax.Array, at: tuple[Tree, Tree]) -> tuple[jax.Array, tuple]:
        y, loss, report = run(*at, x, piece)
        return y, (loss, report)

    def walk(params: Tree, x: jax.Array) -> tuple[tuple, Tree]:
        count = len(jax.tree.leaves(fixed)[0])
        y, (losses, report) = lax.scan(one, x, (params, fixed), unroll=count)
        return (y, losses), report

    (y, losses), pull, report = jax.vjp(walk, params, x, has_aux=True)
    return Passed(y, report, lambda of_y: pull((of_y, jnp.ones_like(losses))))


def pick_layer(tree: Tree, chunk: jax.Array | int, index: jax.Array | int) -> Tree:
    """Return a layer's part of arrays [chunks layers ...]."""

    def pick(a: jax.Array) -> jax.Array:
        rest = a.shape[2:]
        start = (chunk, index, *[0] * len(rest))
        return lax.dynamic_slice(a, start, (1, 1, *rest)).reshape(rest)

    return jax.tree.map(pick, tree)


def add_to_layer(total: Tree, part: Tree, chunk: jax.Array | int, index: jax.Array | int) -> Tree:
    """Return sums [chunks layers ...] with a part added to one layer's, in the sums' format."""

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        both = pick_layer(a, chunk, index) + b.astype(a.dtype)
        return lax.dynamic_update_slice(a, both[None, None], (chunk, index, *[0] * b.ndim))

    return jax.tree.map(add, total, part)
