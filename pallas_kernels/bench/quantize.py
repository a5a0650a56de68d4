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
from pallas_kernels.bench.timing import Candidate, compiled_candidate, untimed
from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, Quantized
from pallas_kernels.quantize import quantize, requantize_transposed
from pallas_kernels.quantize.cases import BENCH_SHAPES, QuantizeCase, bytes_moved

# Rows, columns.
Sizes = tuple[int, int]
SIZES: tuple[Sizes, ...] = BENCH_SHAPES
FORMATS: dict[str, Format] = {"xla_1x128": ACTIVATION, "xla_128x128": WEIGHT}
TRANSPOSED = "xla_transposed_1x128"
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


def work_of(sizes: Sizes, format: Format) -> Work:
    """Bytes of one pass over a bfloat16 input."""
    case = QuantizeCase(*sizes, format=format, hardware=hardware.current())
    return Work(0, bytes_moved(case), "none")


def transposed_work(sizes: Sizes) -> Work:
    """Bytes of one pass from 1x128 tiles to 1x128 tiles of the transpose."""
    rows, columns = sizes
    there, back = ACTIVATION.padded((rows, columns)), ACTIVATION.padded((columns, rows))
    elements = there[0] * there[1] + back[0] * back[1]
    return Work(0, elements + 4 * elements // 128, "none")


def problem(sizes: Sizes) -> Problem:
    """Both formats of the recipe, and the fused transpose for the weight gradient."""
    keys = [jax.random.key(seed) for seed in range(num_sets(sizes))]
    make = untimed(lambda key: jax.random.normal(key, sizes, jnp.bfloat16))
    inputs = [(jax.block_until_ready(make(key)),) for key in keys]
    tiles = untimed(partial(quantize, format=ACTIVATION))
    quantised = [(jax.block_until_ready(tiles(x)),) for (x,) in inputs]

    def build(name: str, format: Format) -> Candidate:
        return compiled_candidate(name, partial(quantize, format=format), inputs)

    parts = [
        Part(name, work_of(sizes, format), partial(build, name, format))
        for name, format in FORMATS.items()
    ]
    parts.append(
        Part(
            TRANSPOSED,
            transposed_work(sizes),
            lambda: compiled_candidate(TRANSPOSED, requantize_transposed, quantised),
        )
    )
    return Problem("quantize", named(sizes), parts, partial(_checker, inputs[0][0]))


def _checker(x: jax.Array) -> Check:
    """Compare what comes back with the input: the error is the format's, not the kernel's."""
    few = slice(0, CHECKED_ROWS)
    expected = np.asarray(x[few].astype(jnp.float32))
    columns = np.asarray(x[:, few].astype(jnp.float32)).T
    back: Callable[[Quantized], jax.Array] = untimed(lambda q: q.dequantize()[few])

    def check(name: str, result: Any) -> Difference:
        right = columns if name == TRANSPOSED else expected
        return difference(np.asarray(back(result)), right)

    return check
