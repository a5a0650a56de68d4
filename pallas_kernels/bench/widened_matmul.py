"""Time few rows times weights in 8 bits: bound by reading them, beside the same in bfloat16."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench.measure import Check, Part, Problem, Work
from pallas_kernels.bench.timing import compiled_candidate, untimed
from pallas_kernels.formats import WEIGHT
from pallas_kernels.quantize import quantize
from pallas_kernels.widened_matmul import OP, widened_matmul
from pallas_kernels.widened_matmul.cases import BENCH_SHAPES, make_case

# E, M, N, K; all matrices multiply the same rows.
Sizes = tuple[int, int, int, int]
SIZES: tuple[Sizes, ...] = BENCH_SHAPES
BFLOAT16 = "xla_bfloat16"
# Weights rotate through more memory than any L2 holds.
ROTATION_BYTES = 200_000_000
MAX_SETS = 24


def num_sets(sizes: Sizes) -> int:
    """How many stacks of weights rotate."""
    e, _, n, k = sizes
    return max(2, min(MAX_SETS, -(-ROTATION_BYTES // (e * n * k))))


def operand_bytes(sizes: Sizes) -> int:
    """About what the weights take, in 8 bits and in 16."""
    e, _, n, k = sizes
    return 3 * num_sets(sizes) * e * n * k


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("EMNK", sizes, strict=True))


def problem(sizes: Sizes) -> Problem:
    """Every backend on weights in 8 bits, and XLA's product of weights in bfloat16."""
    e, m, n, k = sizes
    case = make_case(e, m, n, k, hardware=hardware.current())
    rows = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    draw = untimed(lambda key: quantize(jax.random.normal(key, (e, n, k)), format=WEIGHT))
    weights = [draw(jax.random.key(seed)) for seed in range(1, num_sets(sizes) + 1)]
    wide = [untimed(lambda w: w.dequantize(jnp.bfloat16))(w) for w in weights]
    work = Work(case.flops, case.bytes_moved, "bfloat16")
    parts = []
    for backend in OP.all_backends:
        if backend.refuses(case) is None:
            run = partial(widened_matmul, backend=backend.name)
            sets = [(rows, w) for w in weights]
            build = partial(compiled_candidate, backend.name, run, sets)
            parts.append(Part(backend.name, work, build))
    multiply = lambda x, w: jnp.einsum("mk,enk->emn", x, w)
    build = partial(compiled_candidate, BFLOAT16, multiply, [(rows, w) for w in wide])
    moved = case.bytes_moved + e * n * k
    parts.append(Part(BFLOAT16, Work(case.flops, moved, "bfloat16"), build, against=parts[0].name))
    return Problem("widened_matmul", named(sizes), parts, partial(_checker, rows, wide[0]))


def _checker(rows: jax.Array, weights: jax.Array) -> Check:
    """Compare with the product of the widened weights in float32."""
    exact = untimed(
        lambda x, w: jnp.einsum(
            "mk,enk->emn", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest"
        )
    )
    expected = np.asarray(exact(rows, weights))

    def check(name: str, result: Any) -> Difference:
        return difference(np.asarray(result.astype(jnp.float32)), expected)

    return check
