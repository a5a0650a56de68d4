"""Stacked layers taken apart where their number formats change: each part is a loop of its own."""

from typing import NamedTuple

import jax
from flax import nnx

from jaxfound.config.layer_formats import segments_alike
from jaxfound.models.block import Block
from jaxfound.models.execution import Execution
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.moe import Experts


class Segment(NamedTuple):
    """Layers that compute alike.

    Attributes:
        blocks: the layers, stacked.
        first: number of the first of them in the model.
    """

    blocks: Block
    first: int


def segments_of(blocks: Block, execution: Execution, *, first: int) -> list[Segment]:
    """Return stacked blocks as segments whose layers have the same formats.

    The arrays of a segment are slices of the stack, and gradients of all segments make one stack.
    Where no rule names layers the blocks are returned as they are.

    Args:
        blocks: a stack.
        execution: what its formats are.
        first: number of its first layer in the model.
    """
    if not execution.precision.names_layers:
        return [Segment(blocks, first)]
    num_layers = jax.tree.leaves(blocks)[0].shape[0]
    layers = range(first, first + num_layers)
    runs = segments_alike(execution.precision, [each.path for each in operations(blocks)], layers)
    leaves, tree = jax.tree.flatten(blocks)
    # A split and not slices: its gradient is one concatenation, theirs a sum of padded stacks.
    cut = [jax.lax.split(leaf, [len(run) for run in runs]) for leaf in leaves]
    parts = [tree.unflatten(part) for part in zip(*cut, strict=True)]
    return [
        Segment(in_formats(part, execution, layer=run.start), run.start)
        for part, run in zip(parts, runs, strict=True)
    ]


def in_formats(block: Block, execution: Execution, *, layer: int) -> Block:
    """Give the operations of a block the formats of the model's layer `layer`; return the block."""
    for operation in operations(block):
        operation.format = execution.precision.format_of(operation.path, layer)
    return block


def operations(block: Block) -> list[Linear | Experts]:
    """Return the operations of a block that rules are about."""
    modules = (module for _, module in nnx.iter_modules(block))
    return [module for module in modules if isinstance(module, Linear | Experts)]


def linears(block: Block) -> list[Linear]:
    """Return the linear operations of a block."""
    return [module for _, module in nnx.iter_modules(block) if isinstance(module, Linear)]
