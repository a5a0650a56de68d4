"""How a kernel's block-scaled product is split over a mesh and mapped over stacks."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import sharded
from pallas_kernels.formats import BLOCK, Quantized
from pallas_kernels.fp8_matmul.cases import MatmulCase


def run_partitioned(
    product: Callable[..., Array],
    a: Quantized,
    b: Quantized,
    *,
    case: MatmulCase,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "*stack m n"]:
    """Return A·Bᵀ by `product` on each device's parts; sharded operands stay where they are.

    Args:
        product: called with values of A [*stack, M, K] and B [N, K], their scales, and the
            keywords `num_columns` (None = all rows of B), `case` and `dtype`.
    """
    call = sharded.batched(
        partial(_partitioned, product, case, jnp.dtype(out_dtype)), stacked=(0, 2)
    )
    return call(a.values, b.values, a.scales, b.scales)


def _partitioned(
    product: Callable[..., Array], case: MatmulCase, dtype: jnp.dtype, *operands: Array
) -> Array:
    """The product of arrays that may be sharded, with any number of stack dims on A."""
    a, b, _, _ = operands
    exact = b.shape[0] == case.n
    stack = sharded.STACK_LETTERS[: a.ndim - 2]
    squares = case.b_block_rows > 1
    rule = sharded.ShardRule(
        operands=(f"{stack}mk", "nk", f"{stack}mK", "NK" if squares else "nK"),
        results=(f"{stack}m{'n' if exact else 'o'}",),
        blocks={"K": ("k", BLOCK), **({"N": ("n", BLOCK)} if squares else {})},
        contracted="k",
        # Padded columns are cropped from the result, so its parts would not match B's.
        whole="" if exact else "n",
    )
    call = partial(product, num_columns=None if exact else case.n, case=case, dtype=dtype)
    return sharded.partitioned(call, rule, sum_dtype=jnp.float32)(*operands)
