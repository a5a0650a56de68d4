"""What the backward pass keeps from the forward pass, by name."""

from collections.abc import Callable
from typing import Any

import jax

# None: keep everything, no jax.checkpoint at all.
POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "matmul_outputs": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialize[**P, R](fn: Callable[P, R], policy: str) -> Callable[P, R]:
    """Return `fn` with its residuals limited to what `policy` keeps.

    Raises:
        KeyError: if there is no policy of that name; the config's words are these names.
    """
    keep: Any = POLICIES[policy]
    if keep is None:
        return fn
    # prevent_cse is for code outside a scan; inside one the loop already keeps XLA from merging
    # the recomputation with the forward pass, and the barriers would cost fusion.
    return jax.checkpoint(fn, policy=keep, prevent_cse=False)
