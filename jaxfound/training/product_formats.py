"""In which number formats a program multiplies matrices, before any compiler has touched it."""

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxfound.training.op_by_op import source_of

PRODUCT, LOOP = "dot_general", "scan"
ATTENTION = "flash_attention/"


class Products(NamedTuple):
    """The products of one line of source in one format and of one shape.

    Attributes:
        format: the widest of the operands'.
        shapes: of the two operands.
        source: `file:line` of who asked for them, callers after it.
        flops: of all their runs, 2 for each multiplication.
    """

    format: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    source: str
    flops: int


def products_in(program: Jaxpr) -> tuple[Products, ...]:
    """Return the products of a traced program by format and source, the most FLOPs first.

    What kernels multiply is inside of them and is not told; nor is attention's reference, which
    wants float32 where it is used in place of a kernel. Branches count as if all were taken.
    """
    found: dict[tuple[str, tuple[tuple[int, ...], tuple[int, ...]], str], int] = {}
    for eqn, times in _products(program, 1):
        operands = [cast(ShapedArray, v.aval) for v in eqn.invars]
        widest = max((array.dtype for array in operands), key=lambda dtype: dtype.itemsize)
        left, right = (tuple(array.shape) for array in operands)
        key = (str(widest), (left, right), source_of(eqn))
        found[key] = found.get(key, 0) + times * flops_of(eqn)
    rows = (Products(*key, flops) for key, flops in found.items())
    return tuple(sorted(rows, key=lambda row: -row.flops))


def flops_of(eqn: JaxprEqn) -> int:
    """Return the FLOPs of one product."""
    (inner, _), _ = eqn.params["dimension_numbers"]
    left, result = (cast(ShapedArray, v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    return 2 * math.prod(result.shape) * math.prod(left.shape[dim] for dim in inner)


def _products(program: Jaxpr, times: int) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the products of a program with how often each runs."""
    for eqn in program.eqns:
        if eqn.primitive.name == PRODUCT:
            if not source_of(eqn).startswith(ATTENTION):
                yield eqn, times
            continue
        runs = times * (eqn.params["length"] if eqn.primitive.name == LOOP else 1)
        for inner in jaxprs_in_params(eqn.params):
            yield from _products(inner, runs)
