"""The residual stream cut along the sequence over `tensor`.

Norms, residual sums and what is kept of them then have a device's part of the tokens. A block
gathers all tokens in front of its products and leaves each device the sum of its part behind them:
all_gather and reduce_scatter in place of one all_reduce, in the other order for gradients.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4.2.2.
"""

import jax

from jaxfound.parallelism.axes import ACTIVATION_AXES, STREAM_SEQ, ShardingRules, free_axes

STREAM = ("batch", STREAM_SEQ, "embed")
WHOLE = ("batch", "seq", "embed")


def is_cut(x: jax.Array, rules: ShardingRules) -> bool:
    """Return whether the rules cut the tokens of x [B T D] over tensor on the mesh in force.

    Rows that it does not divide stay whole: one token at a time, when text is generated.
    """
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if not rules.cuts_stream or "tensor" not in free:
        return False
    pieces = rules.pieces([axis for axis in ACTIVATION_AXES[STREAM_SEQ] if axis in free])
    return not mesh.empty and x.shape[1] % pieces == 0


def stream_parts(x: jax.Array, rules: ShardingRules) -> int:
    """Return the parts over tensor that the rows of x [B T D] of the stream consist of."""
    return rules.degree("tensor") if is_cut(x, rules) else 1


def in_stream(x: jax.Array, rules: ShardingRules) -> jax.Array:
    """Keep x [B T D] where the residual stream lies."""
    return rules.constrain(x, *(STREAM if is_cut(x, rules) else WHOLE))


def from_stream(x: jax.Array, rules: ShardingRules) -> jax.Array:
    """Return x [B T D] of the stream with all tokens on every device of tensor.

    The gradients that its readers make are summed where the stream lies: a reduce_scatter.
    """
    if not is_cut(x, rules):
        return x

    def gathered(x: jax.Array) -> jax.Array:
        return rules.constrain(rules.constrain(x, *STREAM), *WHOLE)

    read = jax.custom_vjp(gathered)
    # Pinned to the cut alone: the sum is then made in its parts, and never whole.
    read.defvjp(lambda x: (gathered(x), None), lambda _, grad: (rules.constrain(grad, *STREAM),))
    return read(x)


def to_stream(x: jax.Array, rules: ShardingRules) -> jax.Array:
    """Return the output x [B T D] of a block's products where the stream lies: a reduce_scatter.

    Its gradient is gathered for the products behind it.
    """
    if not is_cut(x, rules):
        return rules.constrain(x, *WHOLE)

    def cut(x: jax.Array) -> jax.Array:
        return rules.constrain(x, *STREAM)

    def back(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (rules.constrain(rules.constrain(grad, *STREAM), *WHOLE),)

    written = jax.custom_vjp(cut)
    written.defvjp(lambda x: (cut(x), None), back)
    return written(x)
