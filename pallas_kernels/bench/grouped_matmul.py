"""Time and tune the grouped products by rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware, tuning
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench import peers
from pallas_kernels.bench.measure import (
    Check,
    NotCarriedError,
    Part,
    Problem,
    Work,
    in_threads,
)
from pallas_kernels.bench.timing import (
    SWEEP_REST_S,
    Candidate,
    Record,
    compiled_candidate,
    interleaved,
    untimed,
)
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Quantized
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.cases import BENCH_SHAPES, GroupedCase, Precision
from pallas_kernels.grouped_matmul.layout import GroupLayout, align
from pallas_kernels.hopper_product import Tile
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table

# M, N, K, G.
Sizes = tuple[int, int, int, int]
SIZES: tuple[Sizes, ...] = (*BENCH_SHAPES, (8192, 7168, 2048, 32))
PRECISIONS: tuple[Precision, ...] = ("fp8", "bfloat16")
NUM_COMPILE_THREADS = 12
CHECKED_ROWS = 128
ROWWISE = "one scale a row: an easier problem"


class Operands(NamedTuple):
    """Rows and weights in both precisions; weights are [G, N, K]."""

    rows: jax.Array
    w: jax.Array
    rows8: Quantized
    w8: Quantized


def case_of(sizes: Sizes, precision: Precision) -> GroupedCase:
    """The case of one precision on the hardware that is here."""
    m, n, k, num_groups = sizes
    where = hardware.current()
    return GroupedCase(m=m, n=n, k=k, num_groups=num_groups, precision=precision, hardware=where)


def work_of(sizes: Sizes, precision: Precision) -> Work:
    """FLOPs, and bytes of rows, weights and result, scales apart."""
    m, n, k, num_groups = sizes
    width = 1 if precision == "fp8" else 2
    unit = "float8" if precision == "fp8" else "bfloat16"
    return Work(2 * m * n * k, width * (m + num_groups * n) * k + 2 * m * n, unit)


def operand_bytes(sizes: Sizes) -> int:
    """About what both precisions and torch's copies take."""
    m, n, k, num_groups = sizes
    return 8 * (m + num_groups * n) * k


def make_layout(sizes: Sizes) -> GroupLayout:
    """Even groups, each from a whole tile on."""
    m, _, _, num_groups = sizes
    group_sizes = jnp.full((num_groups,), m // num_groups, jnp.int32)
    return align(group_sizes, num_rows=m, tile_rows=BLOCK)


def make_operands(sizes: Sizes, num_rows: int) -> Operands:
    """Normal operands; the rows are aligned already."""
    _, n, k, num_groups = sizes

    @untimed
    def run(key: jax.Array) -> Operands:
        rows = jax.random.normal(key, (num_rows, k), jnp.bfloat16)
        w = jax.random.normal(jax.random.fold_in(key, 1), (num_groups, n, k), jnp.bfloat16)
        return Operands(rows, w, quantize(rows, format=ACTIVATION), quantize(w, format=WEIGHT))

    return jax.block_until_ready(run(jax.random.key(0)))


def ours(
    sizes: Sizes,
    precision: Precision,
    *,
    name: str,
    operands: Operands,
    layout: GroupLayout,
    table: Table | None = None,
) -> Candidate:
    """Our kernel by rows, on operands that are aligned and quantised already, groups even."""
    case = case_of(sizes, precision)

    def run(x: Any, w: Any, layout: GroupLayout) -> jax.Array:
        return mosaic_gpu.rows_product(x, w.mT, layout, case=case)

    if precision == "fp8":
        operand_set = operands.rows8, operands.w8, layout
    else:
        # [G, K, N] in memory, as the op takes it.
        w = untimed(lambda w: w.mT)(operands.w)
        operand_set = operands.rows, w, layout
        run = partial(_plain_rows, case=case)
    with tuning.override(table or Table(case.hardware.kind)):
        return compiled_candidate(name, run, [operand_set])


def _plain_rows(x: Any, w: Any, layout: GroupLayout, *, case: GroupedCase) -> jax.Array:
    return mosaic_gpu.rows_product(x, w, layout, case=case)


def torch_grouped(sizes: Sizes, precision: Precision) -> Candidate:
    """Torch's grouped product: bfloat16, or 8-bit with one scale a row (an easier problem).

    Raises:
        NotCarriedError: if torch is missing or too old.
    """
    module = peers.torch()
    name = "_grouped_mm" if precision == "bfloat16" else "_scaled_grouped_mm"
    if not hasattr(module, name):
        raise NotCarriedError(f"torch {module.__version__} has no {name}")
    m, n, k, num_groups = sizes
    make = partial(module.randn, device="cuda", dtype=module.bfloat16)
    x, w = make(m, k), make(num_groups, n, k)
    ends = module.arange(1, num_groups + 1, device="cuda", dtype=module.int32) * (m // num_groups)
    if precision == "bfloat16":
        return peers.torch_candidate(
            TORCH["bfloat16"],
            lambda index: module._grouped_mm(x, w.transpose(-2, -1), offs=ends),
            (x, w),
        )
    x8, w8 = x.to(module.float8_e4m3fn), w.to(module.float8_e4m3fn)
    x_scales = module.ones(m, device="cuda")
    w_scales = module.ones(num_groups, n, device="cuda")
    return peers.torch_candidate(
        TORCH["fp8"],
        lambda index: module._scaled_grouped_mm(
            x8, w8.transpose(-2, -1), x_scales, w_scales, offs=ends, out_dtype=module.bfloat16
        ),
        (x8, w8, x_scales, w_scales),
    )


OURS: dict[Precision, str] = {"fp8": "mosaic_gpu_fp8", "bfloat16": "mosaic_gpu_bfloat16"}
TORCH: dict[Precision, str] = {
    "fp8": "torch_scaled_grouped_mm_rowwise",
    "bfloat16": "torch_grouped_mm",
}


def _checker(operands: Operands, layout: GroupLayout) -> Check:
    """Compare rows, spread over the groups, with float32 products of the dequantised values."""
    source, group = np.asarray(layout.source), np.asarray(layout.tile_groups).repeat(BLOCK)
    real = np.flatnonzero((group >= 0) & (source < int(source.max())))
    picked = real[np.linspace(0, len(real) - 1, min(len(real), CHECKED_ROWS)).astype(np.int64)]

    @untimed
    def run(rows: jax.Array, w: jax.Array) -> jax.Array:
        def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            row, index = pair
            return jnp.matmul(w[index].astype(jnp.float32), row, precision="highest")

        chosen = rows[picked].astype(jnp.float32), jnp.asarray(group[picked])
        return jax.lax.map(one, chosen)

    plain = np.asarray(run(operands.rows, operands.w))
    scaled = np.asarray(run(*untimed(_dequantized)(operands.rows8, operands.w8)))
    expected = {OURS["fp8"]: scaled, OURS["bfloat16"]: plain}

    def check(name: str, result: Any) -> Difference | None:
        if name not in expected:
            return None
        return difference(np.asarray(result[picked].astype(jnp.float32)), expected[name])

    return check


def _dequantized(rows: Quantized, w: Quantized) -> tuple[jax.Array, jax.Array]:
    return rows.dequantize(), w.dequantize()


def problem(sizes: Sizes) -> Problem:
    """Both precisions, and torch's kernels."""
    layout = make_layout(sizes)
    operands = make_operands(sizes, layout.num_aligned)
    parts: list[Part] = []
    for precision in PRECISIONS:
        name, work = OURS[precision], work_of(sizes, precision)
        build = partial(ours, sizes, precision, name=name, operands=operands, layout=layout)
        parts.append(Part(name, work, build))
        note = ROWWISE if precision == "fp8" else ""
        build = partial(torch_grouped, sizes, precision)
        parts.append(Part(TORCH[precision], work, build, against=name, note=note))
    return Problem("grouped_matmul", named(sizes), parts, partial(_checker, operands, layout))


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("MNKG", sizes, strict=True))


def tiles_to_try(precision: Precision) -> Sequence[Tile]:
    """The tiles, 128 rows high, that a sweep compares."""
    widths = (192, 160) if precision == "fp8" else (256, 192)
    return [
        Tile(num_groups=2, columns=columns, num_stages=7, snake=snake, cluster=cluster)
        for columns in widths
        for snake in (2, 4, 8, 16)
        for cluster in (1, 2)
    ]


def tune(
    sizes: Sizes, table: Table, *, num_rounds: int = 3, num_threads: int = NUM_COMPILE_THREADS
) -> Iterator[tuple[Record, Table]]:
    """Yield a record for each tile at `sizes`, and the table with the fastest so far."""
    _, n, k, num_groups = sizes
    layout = make_layout(sizes)
    operands = make_operands(sizes, layout.num_aligned)
    for precision in PRECISIONS:
        op, key = f"grouped_{precision}", f"g{num_groups}_n{n}_k{k}"
        tiles = tiles_to_try(precision)

        builds = [
            partial(
                ours,
                sizes,
                precision,
                name=str(index),
                operands=operands,
                layout=layout,
                table=Table(table.device).with_entry(op, key, settings=asdict(tile)),
            )
            for index, tile in enumerate(tiles)
        ]
        candidates = in_threads(builds, num_threads=num_threads)
        rounds = interleaved(candidates, num_rounds=num_rounds, round_s=0.01, rest_s=SWEEP_REST_S)
        best = min(rounds, key=lambda name: sorted(rounds[name])[num_rounds // 2])
        table = table.with_entry(op, key, settings=asdict(tiles[int(best)]))
        for candidate in candidates:
            record = Record(
                op=op,
                sizes=named(sizes),
                backend="mosaic_gpu",
                rounds_us=rounds[candidate.name],
                flops=work_of(sizes, precision).flops,
                settings=asdict(tiles[int(candidate.name)]),
            )
            yield record, table
