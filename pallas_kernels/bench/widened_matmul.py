"""Time few rows times weights in 8 bits: bound by reading them, beside the same in bfloat16."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench.measure import Check, Part, Problem, Work, in_threads
from pallas_kernels.bench.timing import (
    SWEEP_REST_S,
    Candidate,
    Record,
    compiled_candidate,
    interleaved,
    untimed,
)
from pallas_kernels.formats import BLOCK, WEIGHT, Quantized
from pallas_kernels.hardware import SM90_SCRATCH_BYTES
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table
from pallas_kernels.widened_matmul import OP, widened_matmul
from pallas_kernels.widened_matmul.cases import BENCH_SHAPES, make_case, tuning_key
from pallas_kernels.widened_matmul.jax_triton import ROW_TILES, Tile, warps_for

# E, M, N, K; all matrices multiply the same rows.
Sizes = tuple[int, int, int, int]
SIZES: tuple[Sizes, ...] = BENCH_SHAPES
OURS, BFLOAT16 = "jax_triton", "xla_bfloat16"
# Weights rotate through more memory than any L2 holds.
ROTATION_BYTES = 200_000_000
MAX_SETS = 24
NUM_COMPILE_THREADS = 12
# In the norm of the whole: weights and results are rounded to bfloat16.
MOST_ERROR = 1e-2


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


def draw(sizes: Sizes) -> tuple[Array, list[Quantized]]:
    """Return rows [M, K] and stacks of weights that rotate."""
    e, m, n, k = sizes
    rows = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    one = untimed(lambda key: quantize(jax.random.normal(key, (e, n, k)), format=WEIGHT))
    return rows, [one(jax.random.key(seed)) for seed in range(1, num_sets(sizes) + 1)]


def problem(sizes: Sizes) -> Problem:
    """Every backend on weights in 8 bits, and XLA's product of weights in bfloat16."""
    e, m, n, k = sizes
    case = make_case(e, m, n, k, hardware=hardware.current())
    rows, weights = draw(sizes)
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
    check = _difference(rows, weights)
    return lambda name, result: check(result)


def _difference(rows: jax.Array, weights: jax.Array) -> Callable[[Any], Difference]:
    """Return what says how far a result is from the product in float32."""
    exact = untimed(
        lambda x, w: jnp.einsum(
            "mk,enk->emn", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest"
        )
    )
    expected = np.asarray(exact(rows, weights))
    return lambda result: difference(np.asarray(result.astype(jnp.float32)), expected)


def tiles_to_try(sizes: Sizes) -> list[Tile]:
    """The tiles that a sweep compares at `sizes`: those whose sums and stages fit."""
    e, m, n, k = sizes
    rows = next(size for size in ROW_TILES if size >= m)
    found = []
    cores = hardware.current().num_cores
    many = e * -(-n // BLOCK) >= cores
    for weights, num_stages in product((64, 128), (2, 3, 4, 6)):
        splits = (1,) if many else _splits_to_try(e * -(-n // weights), -(-k // BLOCK))
        stage_bytes = weights * BLOCK + rows * BLOCK * 2
        if num_stages * stage_bytes > SM90_SCRATCH_BYTES:
            continue
        tile = Tile(weights, rows, num_warps=warps_for(weights, rows), num_stages=num_stages)
        found += [replace(tile, num_splits=split) for split in splits]
    return found


def _splits_to_try(programs: int, num_steps: int) -> list[int]:
    """Parts of K, of two steps or more, that give half the cores work and none more than four."""
    cores = hardware.current().num_cores
    whole = [split for split in (1, 2, 4, 8) if 2 * split <= num_steps or split == 1]
    return [split for split in whole if cores <= 2 * split * programs < 8 * cores] or whole[-1:]


def tune(
    sizes: Sizes, table: Table, *, num_rounds: int = 3, num_threads: int = NUM_COMPILE_THREADS
) -> Iterator[tuple[Record, Table]]:
    """Yield a record for each tile at `sizes`, and the table with the fastest right one so far."""
    rows, weights = draw(sizes)
    case = make_case(*sizes, hardware=hardware.current())
    key, tiles = tuning_key(case), tiles_to_try(sizes)
    sets = [(rows, w) for w in weights]

    def build(index: int) -> Candidate:
        one = Table(table.device).with_entry("widened_matmul", key, settings=asdict(tiles[index]))
        with tuning.override(one):
            run = partial(widened_matmul, backend=OURS)
            return compiled_candidate(str(index), run, sets)

    builds = [partial(build, index) for index in range(len(tiles))]
    candidates = in_threads(builds, num_threads=num_threads)
    rounds = interleaved(candidates, num_rounds=num_rounds, round_s=0.005, rest_s=SWEEP_REST_S)
    check = _difference(rows, untimed(lambda w: w.dequantize(jnp.bfloat16))(weights[0]))
    best = float("inf")
    for candidate in candidates:
        settings = asdict(tiles[int(candidate.name)])
        found = check(candidate.start(0))
        record = Record(
            op="widened_matmul",
            sizes=named(sizes),
            backend=OURS,
            rounds_us=rounds[candidate.name],
            flops=case.flops,
            bytes_moved=case.bytes_moved,
            total_error=found.total,
            row_error=found.row,
            settings=settings,
        )
        if found.total < MOST_ERROR and record.median_us < best:
            best = record.median_us
            table = table.with_entry("widened_matmul", key, settings=settings)
        yield record, table
