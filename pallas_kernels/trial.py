"""Another backend beside the one that serves: both run, and what differs is not used."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.accuracy import TOLERANCES, Tolerance
from pallas_kernels.registry import Backend, KernelError, KernelOp, Rule

# Where the table has no row: results that differ by the order of their sums alone.
EXACT = Tolerance(total=1e-6, row=2e-6)

# Told of every comparison: the differences of the whole and of the worst row, and whether the
# candidate's result was used.
Told = Callable[[float, float, bool], None]


def preferring(backend: str) -> Rule:
    """Return the rule that `backend` serves an op; KernelError, once traced, if it refuses."""
    return lambda op, _, case: op.choose(case, backend=backend)


def comparing(backend: str, told: Told) -> Rule:
    """Return the rule that `backend` runs beside the one that serves.

    In the compiled program, both results are compared by the tolerances of their format. Within
    them `backend`'s is used; beyond them, or where it is not finite, the one that served before.

    Args:
        backend: the candidate.
        told: called by the program, in a thread of JAX's, after every comparison.

    Raises:
        KernelError: once traced, if `backend` refuses the case, or serves it already.
    """

    def rule(op: KernelOp[Any], served: Backend[Any], case: Any) -> Backend[Any]:
        candidate = op.choose(case, backend=backend)
        if candidate.name == served.name:
            raise KernelError(f"{op.name}: {backend!r} serves already; there is nothing to compare")

        def run(*args: Any, **keys: Any) -> Any:
            before, after = served.run(*args, **keys), candidate.run(*args, **keys)
            total, row, within = difference(after, before, op=op.name)
            jax.debug.callback(told, total, row, within)
            return jax.tree.map(lambda new, old: jnp.where(within, new, old), after, before)

        return Backend(f"{served.name} beside {candidate.name}", served.refuses, run)

    return rule


def difference(after: Any, before: Any, *, op: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the worst differences of the whole and of a row, and whether all are within limits.

    The measure is that of `accuracy.cosine_difference`, Σ(x - y)² / Σ(x² + y²), of every array of
    the two results; rows are along the last dim.
    """
    found = [
        _difference(new, old, op=op)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    ]
    totals, rows, withins = zip(*found, strict=True)
    return (
        jnp.max(jnp.stack(totals)),
        jnp.max(jnp.stack(rows)),
        jnp.all(jnp.stack(withins)),
    )


def _difference(new: jax.Array, old: jax.Array, *, op: str) -> tuple[jax.Array, ...]:
    limit = next((t for (o, d), t in TOLERANCES.items() if (o, d) == (op, str(old.dtype))), EXACT)
    x, y = new.astype(jnp.float32), old.astype(jnp.float32)
    # Infinities, such as the sum of no exponentials, are equal or not; they have no size.
    same = x == y
    apart = jnp.where(same, 0.0, jnp.square(x - y))
    size = jnp.where(same & ~jnp.isfinite(x), 0.0, jnp.square(x) + jnp.square(y))
    row = jnp.max(_share(apart.sum(-1), size.sum(-1))) if x.ndim else _share(apart, size)
    total = _share(apart.sum(), size.sum())
    # Written so that NaN is not within.
    return total, row, (total <= limit.total) & (row <= limit.row)


def _share(apart: jax.Array, size: jax.Array) -> jax.Array:
    return jnp.where(apart == 0, 0.0, apart / jnp.where(size == 0, 1.0, size))
