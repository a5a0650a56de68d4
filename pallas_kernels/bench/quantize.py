"""Time quantising: bound by memory, so its floor is its bytes at the speed of a copy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench.measure import Check, Part, Problem, Work
from pallas_kernels.bench.timing import compiled_candidate, untimed
from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, Quantized
from pallas_kernels.quantize import (
    OP,
    quantize,
    quantize_both,
    quantize_squares,
    requantize_transposed,
    swiglu_both,
    swiglu_gradients_both,
)
from pallas_kernels.quantize.cases import BENCH_SHAPES, QuantizeCase, Way, bytes_moved
from pallas_kernels.quantize.reference import swiglu, swiglu_gradients

# Rows, columns.
Sizes = tuple[int, int]
SIZES: tuple[Sizes, ...] = BENCH_SHAPES
PLAIN: dict[str, Format] = {"1x128": ACTIVATION, "128x128": WEIGHT}
BOTH, TRANSPOSED = "both_1x128", "transposed_1x128"
SWIGLU, GRADIENTS = "swiglu_1x128", "swiglu_gradients_1x128"
SQUARES = "squares"
CHECKED_ROWS = 128
# Inputs rotate through more memory than any L2 holds.
ROTATION_BYTES = 200_000_000
MAX_SETS = 24


def num_sets(sizes: Sizes) -> int:
    """How many inputs rotate."""
    return max(2, min(MAX_SETS, -(-ROTATION_BYTES // (2 * sizes[0] * sizes[1]))))


def operand_bytes(sizes: Sizes) -> int:
    """About what the inputs, and those quantised already, take."""
    return 4 * num_sets(sizes) * sizes[0] * sizes[1]


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("MK", sizes, strict=True))


def work_of(case: QuantizeCase) -> Work:
    """Bytes of one pass over the input of a case, and of what comes of it."""
    # Weights come in float32.
    return Work(0, bytes_moved(case, input_bytes=4 if case.way == "squares" else 2), "none")


def problem(sizes: Sizes) -> Problem:
    """Both formats of the recipe, what is rounded both ways, and transposes."""
    keys = [jax.random.key(seed) for seed in range(num_sets(sizes))]
    make = untimed(lambda key: jax.random.normal(key, sizes, jnp.bfloat16))
    inputs = [(jax.block_until_ready(make(key)),) for key in keys]
    tiles = untimed(partial(quantize, format=ACTIVATION))
    quantised = [(jax.block_until_ready(tiles(x)),) for (x,) in inputs]
    parts: list[Part] = []

    def add(name: str, case: QuantizeCase, run: Callable[..., Any], operands: Any) -> None:
        for backend in OP.all_backends:
            if backend.refuses(case) is None:
                full, timed = f"{backend.name}_{name}", partial(run, backend=backend.name)
                build = partial(compiled_candidate, full, timed, operands)
                parts.append(Part(full, work_of(case), build))

    def case_of(format: Format, way: Way) -> QuantizeCase:
        return QuantizeCase(*sizes, format=format, hardware=hardware.current(), way=way)

    for name, format in PLAIN.items():
        add(name, case_of(format, "plain"), partial(quantize, format=format), inputs)
    add(BOTH, case_of(ACTIVATION, "both"), partial(quantize_both, format=ACTIVATION), inputs)
    add(TRANSPOSED, case_of(ACTIVATION, "transposed"), requantize_transposed, quantised)
    several = [untimed(_of_swiglu)(x) for (x,) in inputs]
    pairs = [(gate, up) for gate, up, _ in several]
    add(SWIGLU, case_of(ACTIVATION, "swiglu"), swiglu_both, pairs)
    add(GRADIENTS, case_of(ACTIVATION, "swiglu_gradients"), swiglu_gradients_both, several)
    weights = [(untimed(partial(jnp.asarray, dtype=jnp.float32))(x),) for (x,) in inputs]
    add(SQUARES, case_of(WEIGHT, "squares"), partial(quantize_squares, dtype=jnp.bfloat16), weights)
    return Problem("quantize", named(sizes), parts, partial(_checker, inputs[0][0]))


def _of_swiglu(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gate, up and the gradient of their product, each another array."""
    return x, -x, 2 * x


def _checker(x: jax.Array) -> Check:
    """Compare what comes back with the input: the error is the format's, not the kernel's."""
    few = slice(0, CHECKED_ROWS)
    back: Callable[[Quantized], jax.Array] = untimed(lambda q: q.dequantize()[few])
    one_way = lambda matrix: np.asarray(matrix[few].astype(jnp.float32))

    def both_ways(matrix: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        return one_way(matrix), one_way(matrix.T)

    gate, up, grad = _of_swiglu(x)
    expected = {
        BOTH: both_ways(x),
        TRANSPOSED: both_ways(x)[1:],
        SWIGLU: both_ways(untimed(swiglu)(gate, up)[0]),
        GRADIENTS: sum(map(both_ways, untimed(swiglu_gradients)(gate, up, grad)), ()),
    }

    def check(name: str, result: Any) -> Difference:
        way = next((way for way in expected if name.endswith(f"_{way}")), None)
        rights = (one_way(x),) if way is None else expected[way]
        found = jax.tree.leaves(result, is_leaf=lambda one: isinstance(one, Quantized))
        pairs = zip(found, rights, strict=True)
        return max(difference(np.asarray(back(q)), right) for q, right in pairs)

    return check
