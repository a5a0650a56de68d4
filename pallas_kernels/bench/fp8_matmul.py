"""Time and tune the block-scaled product."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import TOLERANCES, Difference, difference
from pallas_kernels.bench import dense_peers
from pallas_kernels.bench.dense_peers import Operands
from pallas_kernels.bench.measure import Check, Part, Problem, Work, in_threads
from pallas_kernels.bench.timing import (
    SWEEP_REST_S,
    Candidate,
    Record,
    compiled_candidate,
    interleaved,
    untimed,
)
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Format, Quantized
from pallas_kernels.fp8_matmul import op, reference
from pallas_kernels.fp8_matmul.cases import FEW_ROWS, make_case, tuning_key
from pallas_kernels.fp8_matmul.mosaic_decode import DecodeTile
from pallas_kernels.hopper_product import Tile
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table

# Weights rotate through more memory than any L2 holds, so that they come from device memory.
ROTATION_BYTES = 200_000_000
MAX_SETS = 24
CHECKED_ROWS = 128
NUM_COMPILE_THREADS = 12
OURS = "mosaic_gpu"

Sizes = tuple[int, int, int]
# Ends the names of the aligned twins of odd sizes.
ALIGNED = "_aligned"
UNSCALED = "no block scales: an easier problem"


def make_operands(sizes: Sizes, *, b_format: Format = WEIGHT) -> list[Operands]:
    """Operand sets that rotate; every scale block has another magnitude."""
    m, n, k = sizes

    @untimed
    def one(key: jax.Array) -> Operands:
        keys = jax.random.split(key, 4)
        found = []
        for index, (rows, format) in enumerate(((m, ACTIVATION), (n, b_format))):
            shape = (-(-rows // BLOCK), -(-k // BLOCK))
            powers = 2.0 ** jax.random.randint(keys[index], shape, -6, 7).astype(jnp.float32)
            spread = jnp.repeat(jnp.repeat(powers, BLOCK, 0), BLOCK, 1)[:rows, :k]
            values = jax.random.normal(keys[2 + index], (rows, k)) * spread
            found.append(quantize(values, format=format))
        a, b = found
        return Operands(a, b, a.dequantize(jnp.bfloat16), b.dequantize(jnp.bfloat16))

    return [jax.block_until_ready(one(jax.random.key(seed))) for seed in range(num_sets(sizes))]


def num_sets(sizes: Sizes) -> int:
    """How many operand sets rotate."""
    m, n, k = sizes
    return 2 if m > FEW_ROWS else max(2, min(MAX_SETS, -(-ROTATION_BYTES // (n * k))))


def operand_bytes(sizes: Sizes) -> int:
    """About what `make_operands` and the peers' copies take: one byte and two, copied once."""
    m, n, k = sizes
    return num_sets(sizes) * 4 * (m + n) * k + 2 * m * n


def ours(
    operands: Sequence[Operands],
    *,
    name: str = OURS,
    backend: str = OURS,
    table: Table | None = None,
) -> Candidate:
    """One of our kernels on operands that are quantised already.

    A's scales come in K first, as a quantiser in the same program leaves them.
    """

    def run(a_values: jax.Array, by_k: jax.Array, b: Quantized) -> jax.Array:
        a = replace(operands[0].a, values=a_values, scales=by_k.T)
        return op.fp8_matmul(a, b, backend=backend)

    sets = [(one.a.values, jnp.asarray(one.a.scales.T), one.b) for one in operands]
    with tuning.override(table or Table(hardware.current().kind)):
        return compiled_candidate(name, run, sets)


class Expected(NamedTuple):
    """Rows of the right result, and which rows they are."""

    rows: np.ndarray
    values: np.ndarray


def expect(operands: Sequence[Operands]) -> Expected:
    """The reference on up to 128 rows, spread over M, of the first operand set."""
    a, b, _, _ = operands[0]
    rows = np.unique(np.linspace(0, a.rows - 1, min(a.rows, CHECKED_ROWS)).astype(np.int64))

    @untimed
    def run(a: Quantized, b: Quantized) -> jax.Array:
        picked = replace(a, values=a.values[rows], scales=a.scales[rows], rows=len(rows))
        return reference.fp8_matmul(picked, b, out_dtype=jnp.float32)

    return Expected(rows=rows, values=np.asarray(run(a, b)))


def difference_of(result: Any, expected: Expected) -> Difference:
    """How far a candidate's result, of JAX or torch, is from the reference."""
    rows = result[expected.rows]
    if isinstance(result, jax.Array):
        return difference(np.asarray(rows.astype(jnp.float32)), expected.values)
    return difference(rows.float().cpu().numpy(), expected.values)


def checker(operands: Sequence[Operands]) -> Check:
    """Check every backend but those that leave the block scales out."""
    expected = expect(operands)

    def check(name: str, result: Any) -> Difference | None:
        return None if name in UNCHECKED else difference_of(result, expected)

    return check


Build = Callable[[Sequence[Operands]], Candidate]
PEERS: dict[str, Build] = {
    "torch_blockwise": dense_peers.torch_blockwise,
    "torch_rowwise": dense_peers.torch_rowwise,
    "torch_bfloat16": dense_peers.torch_bfloat16,
    "xla_bfloat16": dense_peers.xla_bfloat16,
    "xla_float8": dense_peers.xla_float8,
    "flashinfer_groupwise": dense_peers.flashinfer_groupwise,
}
# Those that multiply a weight's gradient too.
WGRAD_PEERS = ("torch_bfloat16", "xla_bfloat16")
# Peers without the block scales of the problem.
UNCHECKED = frozenset({"torch_rowwise", "xla_float8"})
# Autotuning an 8-bit product takes XLA up to 20 s a size: only where the matrix unit is the limit.
MANY_ROWS_ONLY = frozenset({"xla_float8"})


def backends(sizes: Sizes) -> list[str]:
    """Our special kernels that serve `sizes` here."""
    case = make_case(*sizes, hardware=hardware.current())
    named = (b for b in op.OP.all_backends if b.name != "xla")
    return [backend.name for backend in named if backend.refuses(case) is None]


def work_of(sizes: Sizes) -> Work:
    """FLOPs and bytes of the product at `sizes`."""
    case = make_case(*sizes, hardware=hardware.current())
    return Work(case.flops, case.bytes_moved, "float8")


def problem(sizes: Sizes, *, op: str = "fp8_matmul") -> Problem:
    """Our kernels and every peer at one size, as records of `op`."""
    operands = make_operands(sizes)
    work = work_of(sizes)
    parts = [
        Part(name, work, partial(ours, operands, name=name, backend=name))
        for name in backends(sizes)
    ]
    parts += [
        Part(
            name,
            work,
            partial(build, operands),
            against=OURS,
            note=UNSCALED if name in UNCHECKED else "",
        )
        for name, build in PEERS.items()
        if sizes[0] > FEW_ROWS or name not in MANY_ROWS_ONLY
    ]
    return Problem(op, named(sizes), parts, partial(checker, operands))


def wgrad_problem(sizes: Sizes) -> Problem:
    """Our kernels and products in bfloat16 at the size of a weight's gradient."""
    operands = make_operands(sizes, b_format=ACTIVATION)
    case = replace(make_case(*sizes, hardware=hardware.current()), b_block_rows=1)
    work = Work(case.flops, case.bytes_moved, "float8")
    parts = [
        Part(b.name, work, partial(ours, operands, name=b.name, backend=b.name))
        for b in op.OP.all_backends
        if b.name != "xla" and b.refuses(case) is None
    ]
    parts += [
        Part(name, work, partial(PEERS[name], operands), against=OURS) for name in WGRAD_PEERS
    ]
    return Problem("fp8_wgrad", named(sizes), parts, partial(checker, operands))


def odd_problem(pair: tuple[Sizes, Sizes]) -> Problem:
    """Our kernels at an odd size, and at the next multiple of 64, 8, 128 in the same rounds."""
    odd, aligned = pair
    operands, whole = make_operands(odd), make_operands(aligned)
    parts: list[Part] = []
    for name in backends(odd):
        against = f"{name}{ALIGNED}"
        build = partial(ours, operands, name=name, backend=name)
        parts.append(Part(name, work_of(odd), build))
        build = partial(ours, whole, name=against, backend=name)
        settings = named(aligned)
        parts.append(Part(against, work_of(aligned), build, against=name, settings=settings))

    def expect_both() -> Check:
        expected = {False: expect(operands), True: expect(whole)}

        def check(name: str, result: Any) -> Difference:
            return difference_of(result, expected[name.endswith(ALIGNED)])

        return check

    return Problem("fp8_odd", named(odd), parts, expect_both)


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("MNK", sizes, strict=True))


def tiles_to_try(sizes: Sizes) -> list[Tile | DecodeTile]:
    """The tiles that a sweep compares at `sizes`."""
    m, _, k = sizes
    few: list[Tile | DecodeTile] = [
        DecodeTile(num_groups=groups, num_splits=splits, num_stages=stages)
        for groups, stages in ((1, 8), (2, 6), (3, 6))
        for splits in (1, 2, 3, 4, 6, 8)
        if splits * 2 <= k // BLOCK or splits == 1
    ]
    if m <= FEW_ROWS // 2:
        return few
    if m <= FEW_ROWS:
        # Two warpgroups of rows: weights may as well take the columns.
        return [*few, *(Tile(2, columns, num_stages=8) for columns in (64, 96, 128, 160, 192))]
    return [
        Tile(groups, columns, 7, num_out_buffers=2, snake=snake, cluster=cluster)
        for groups, columns in ((3, 128), (3, 96), (2, 192))
        for snake in (1, 8)
        for cluster in (1, 2)
    ]


def tune(
    sizes: Sizes,
    table: Table,
    *,
    num_rounds: int = 3,
    num_threads: int = NUM_COMPILE_THREADS,
    b_format: Format = WEIGHT,
) -> Iterator[tuple[Record, Table]]:
    """Yield a record for each tile at `sizes`, and the table with the fastest right one so far.

    Args:
        b_format: of the second operand; tiles of 1x128 as of a weight's gradient.
    """
    key = tuning_key(*sizes)
    operands = make_operands(sizes, b_format=b_format)
    tiles = tiles_to_try(sizes)

    def build(index: int) -> Candidate:
        one = Table(table.device).with_entry("fp8_matmul", key, settings=asdict(tiles[index]))
        return ours(operands, name=str(index), table=one)

    builds = [partial(build, index) for index in range(len(tiles))]
    candidates = in_threads(builds, num_threads=num_threads)
    rounds = interleaved(candidates, num_rounds=num_rounds, round_s=0.005, rest_s=SWEEP_REST_S)
    best = float("inf")
    case = make_case(*sizes, hardware=hardware.current())
    check = checker(operands)
    for candidate in candidates:
        settings = asdict(tiles[int(candidate.name)])
        found = check(OURS, candidate.start(0))
        total, row = (found.total, found.row) if found else (None, None)
        record = Record(
            op="fp8_matmul",
            sizes=named(sizes),
            backend="mosaic_gpu",
            rounds_us=rounds[candidate.name],
            flops=case.flops,
            bytes_moved=case.bytes_moved,
            total_error=total,
            row_error=row,
            settings=settings,
        )
        right = total is not None and total < TOLERANCES["fp8_matmul", "bfloat16"].total
        if right and record.median_us < best:
            best = record.median_us
            table = table.with_entry("fp8_matmul", key, settings=settings)
        yield record, table
