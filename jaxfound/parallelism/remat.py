"""What the backward pass keeps from the forward pass, by name."""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive

# Operations that only move or round numbers: cheaper to do again than to keep.
MOVES = (
    "sharding_constraint",
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "gather",
)


def all_but_moves(prim: Primitive, *_: object, **__: object) -> bool:
    """Return whether the result of an operation is kept: everything that takes arithmetic.

    Weights are only moved on their way to a product: gathered over fsdp, rounded, picked by
    expert. Kept, the gathered weights of all layers would be on every device at once.
    """
    return prim.name not in MOVES


POLICIES: dict[str, Callable[..., bool]] = {
    "none": all_but_moves,
    "matmul_outputs": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialize[**P, R](fn: Callable[P, R], policy: str, *, in_loop: bool) -> Callable[P, R]:
    """Return `fn` with its residuals limited to what `policy` keeps.

    Args:
        fn: a layer.
        policy: a name in `POLICIES`, which are the config's words.
        in_loop: whether the layer runs inside a loop, which keeps the compiler from merging the
            recomputation with the forward pass; elsewhere barriers do, at the cost of fusion.

    Raises:
        KeyError: if there is no policy of that name.
    """
    return jax.checkpoint(fn, policy=POLICIES[policy], prevent_cse=not in_loop)
