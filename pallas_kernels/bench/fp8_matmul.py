"""Time and tune the block-scaled product."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.bench import peers
from pallas_kernels.bench.timing import Candidate, Record, interleaved
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Quantized
from pallas_kernels.fp8_matmul import mosaic_gpu, op, reference
from pallas_kernels.fp8_matmul.cases import FEW_ROWS, make_case
from pallas_kernels.fp8_matmul.mosaic_decode import DecodeTile
from pallas_kernels.hopper_product import Tile
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table

# Weights rotate through more memory than any L2 holds, so that they come from device memory.
ROTATION_BYTES = 200_000_000
MAX_SETS = 24
CHECKED_ROWS = 128
NUM_COMPILE_THREADS = 12

Sizes = tuple[int, int, int]
PEERS = {
    "torch_blockwise": peers.torch_blockwise,
    "torch_bfloat16": peers.torch_bfloat16,
    "xla_bfloat16": peers.xla_bfloat16,
}


def make_operands(sizes: Sizes) -> list[tuple[Quantized, Quantized]]:
    """Quantised operand sets that rotate; every scale block has another magnitude."""
    m, n, k = sizes
    num_sets = 2 if m > FEW_ROWS else min(MAX_SETS, -(-ROTATION_BYTES // (n * k)))

    @jax.jit
    def one(key: jax.Array) -> tuple[Quantized, Quantized]:
        keys = jax.random.split(key, 4)
        found = []
        for index, (rows, format) in enumerate(((m, ACTIVATION), (n, WEIGHT))):
            shape = (-(-rows // BLOCK), -(-k // BLOCK))
            powers = 2.0 ** jax.random.randint(keys[index], shape, -6, 7).astype(jnp.float32)
            spread = jnp.repeat(jnp.repeat(powers, BLOCK, 0), BLOCK, 1)[:rows, :k]
            values = jax.random.normal(keys[2 + index], (rows, k)) * spread
            found.append(quantize(values, format=format))
        return found[0], found[1]

    return [one(jax.random.key(seed)) for seed in range(max(2, num_sets))]


def ours(
    operands: Sequence[tuple[Quantized, Quantized]],
    *,
    name: str = "mosaic_gpu",
    table: Table | None = None,
) -> Candidate:
    """The Hopper kernel on operands that are quantised already.

    A's scales come in K first, as a quantiser in the same program leaves them.
    """

    def run(a_values: jax.Array, by_k: jax.Array, b: Quantized) -> jax.Array:
        a = replace(operands[0][0], values=a_values, scales=by_k.T)
        return op.fp8_matmul(a, b, backend="mosaic_gpu")

    sets = [(a.values, jnp.asarray(a.scales.T), b) for a, b in operands]
    with tuning.override(table or Table(hardware.current().kind)):
        compiled = jax.jit(run).lower(*sets[0]).compile()
    return Candidate(name, lambda i: compiled(*sets[i % len(sets)]))


class Expected(NamedTuple):
    """Rows of the right result, and which rows they are."""

    rows: np.ndarray
    values: np.ndarray


def expect(operands: Sequence[tuple[Quantized, Quantized]]) -> Expected:
    """The reference on up to 128 rows, spread over M, of the first operand set."""
    a, b = operands[0]
    rows = np.unique(np.linspace(0, a.rows - 1, min(a.rows, CHECKED_ROWS)).astype(np.int64))
    picked = replace(a, values=a.values[rows], scales=a.scales[rows], rows=len(rows))
    run = jax.jit(lambda a, b: reference.fp8_matmul(a, b, out_dtype=jnp.float32))
    return Expected(rows=rows, values=np.asarray(run(picked, b)))


def error_of(candidate: Candidate, expected: Expected) -> tuple[float, float]:
    """Total and worst-row difference of a candidate from the reference."""
    result = candidate.start(0)
    candidate.wait(result)
    rows = result[expected.rows]
    if isinstance(result, jax.Array):
        found = np.asarray(rows.astype(jnp.float32))
    else:
        found = rows.float().cpu().numpy()
    measured = difference(found, expected.values)
    return measured.total, measured.row


def bench(sizes: Sizes, *, ceilings: Mapping[str, float], num_rounds: int = 9) -> Iterator[Record]:
    """Yield one record for our kernel and one for each peer, interleaved in this process."""
    m, n, k = sizes
    case = make_case(m, n, k, hardware=hardware.current())
    floor_us = 1e6 * max(
        case.flops / ceilings["float8_flops"], case.bytes_moved / ceilings["copy_bps"]
    )
    names = {"M": m, "N": n, "K": k}
    operands = make_operands(sizes)
    candidates = [ours(operands)]
    for name, build in PEERS.items():
        try:
            candidates.append(build(operands))
        except peers.NotCarriedError as error:
            yield Record(op="fp8_matmul", sizes=names, backend=name, note=f"not carried: {error}")
    rounds = interleaved(candidates, num_rounds=num_rounds)
    expected = expect(operands)
    for candidate in candidates:
        total, row = error_of(candidate, expected)
        yield Record(
            op="fp8_matmul",
            sizes=names,
            backend=candidate.name,
            rounds_us=rounds[candidate.name],
            flops=case.flops,
            bytes_moved=case.bytes_moved,
            floor_us=floor_us,
            total_error=total,
            row_error=row,
        )


def tiles_to_try(sizes: Sizes) -> list[Tile | DecodeTile]:
    """The tiles that a sweep compares at `sizes`."""
    if sizes[0] <= FEW_ROWS:
        return [
            DecodeTile(num_groups=groups, num_splits=splits, num_stages=stages)
            for groups, stages in ((1, 8), (2, 6))
            for splits in (1, 2, 3, 4, 6, 8)
            if splits * 2 <= sizes[2] // BLOCK or splits == 1
        ]
    return [
        Tile(groups, columns, num_stages=7, snake=snake, cluster=cluster)
        for groups, columns in ((3, 128), (2, 192), (2, 160), (2, 128))
        for snake in (1, 8)
        for cluster in (1, 2)
    ]


def tune(sizes: Sizes, table: Table, *, num_rounds: int = 3) -> Iterator[tuple[Record, Table]]:
    """Yield a record for each tile at `sizes`, and the table with the fastest right one so far."""
    key = mosaic_gpu.tuning_key(*sizes)
    operands = make_operands(sizes)
    tiles = tiles_to_try(sizes)

    def build(index: int) -> Candidate:
        one = Table(table.device).with_entry("fp8_matmul", key, settings=asdict(tiles[index]))
        return ours(operands, name=str(index), table=one)

    with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
        candidates = list(pool.map(build, range(len(tiles))))
    rounds = interleaved(candidates, num_rounds=num_rounds, round_s=0.005)
    best = float("inf")
    case = make_case(*sizes, hardware=hardware.current())
    expected = expect(operands)
    for candidate in candidates:
        settings = asdict(tiles[int(candidate.name)])
        total, row = error_of(candidate, expected)
        record = Record(
            op="fp8_matmul",
            sizes=dict(zip("MNK", sizes, strict=True)),
            backend="mosaic_gpu",
            rounds_us=rounds[candidate.name],
            flops=case.flops,
            bytes_moved=case.bytes_moved,
            total_error=total,
            row_error=row,
            settings=settings,
        )
        if record.median_us < best and total < TOLERANCES["fp8_matmul", "bfloat16"].total:
            best = record.median_us
            table = table.with_entry("fp8_matmul", key, settings=settings)
        yield record, table
