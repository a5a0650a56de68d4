"""What the backward pass keeps from the forward pass, by name."""

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

# Operations that only move or round numbers: cheaper to do again than to keep.
MOVES = (
    "sharding_constraint",
    "convert_element_type",
    "reshape",
    "squeeze",
    "transpose",
    "broadcast_in_dim",
    "gather",
)


# Name that attention kernels give to their results (`pallas_kernels.flash_attention`).
ATTENTION = "attention"


def all_but_moves(prim: Primitive, *_: object, **params: object) -> bool:
    """Return whether the result of an operation is kept: everything that takes arithmetic.

    Weights are only moved on their way to a product: gathered over fsdp, rounded, picked by
    expert. Kept, the gathered weights of all layers would be on every device at once.
    """
    gathers_weights = prim.name == "all_gather" and params.get("axis_name") in ("fsdp", ("fsdp",))
    return prim.name not in MOVES and not gathers_weights


def matmul_outputs(prim: Primitive, *avals: object, **params: object) -> bool:
    """Return whether the result of an operation is kept: products with weights are.

    A linear layer brings its own backward pass, and its product is inside that call.
    """
    if prim.name == "name":
        return params["name"] == ATTENTION
    if prim.name == "custom_vjp_call":
        return _multiplies(params["call_jaxpr"])
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *avals, **params)


def _multiplies(program: object) -> bool:
    """Return whether a jaxpr, or one inside it, has a matrix product without batch dims."""
    inner = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    if not isinstance(inner, Jaxpr):
        return False
    return any(
        (eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0])
        or any(_multiplies(value) for value in eqn.params.values())
        for eqn in inner.eqns
    )


POLICIES: dict[str, Callable[..., bool]] = {
    "none": all_but_moves,
    "matmul_outputs": matmul_outputs,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialize[**P, R](
    fn: Callable[P, R], policy: str, *, in_loop: bool, drops_moves: bool
) -> Callable[P, R]:
    """Return `fn` with its residuals limited to what `policy` keeps.

    What is computed again must not be merged with the forward pass, or it is kept after all: a
    loop sees to that, and elsewhere barriers do, at the cost of fusion. Under "none" only moves are
    done again, and those the compiler may merge, unless what they gather must not stay.

    Args:
        fn: a layer.
        policy: a name in `POLICIES`, which are the config's words.
        in_loop: whether the layer runs inside a loop.
        drops_moves: whether the results of moves must be gone until the backward pass, as weights
            must that are gathered from other devices.

    Raises:
        KeyError: if there is no policy of that name.
    """
    apart = not in_loop and (policy != "none" or drops_moves)
    return jax.checkpoint(fn, policy=POLICIES[policy], prevent_cse=apart)
