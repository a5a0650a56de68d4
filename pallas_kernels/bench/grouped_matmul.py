"""Time and tune the grouped products."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import hardware, tuning
from pallas_kernels.bench import peers
from pallas_kernels.bench.timing import Candidate, Record, interleaved
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.cases import GroupedCase, Precision
from pallas_kernels.grouped_matmul.layout import align
from pallas_kernels.hopper_product import Tile
from pallas_kernels.quantize import quantize
from pallas_kernels.tuning import Table

# M, N, K, G.
Sizes = tuple[int, int, int, int]
PRECISIONS: tuple[Precision, ...] = ("fp8", "bfloat16")


def _case(sizes: Sizes, precision: Precision) -> GroupedCase:
    m, n, k, num_groups = sizes
    where = hardware.current()
    return GroupedCase(m=m, n=n, k=k, num_groups=num_groups, precision=precision, hardware=where)


def ours(sizes: Sizes, precision: Precision, *, name: str, table: Table | None = None) -> Candidate:
    """Our kernel by rows, on operands that are aligned and quantised already, groups even."""
    m, n, k, num_groups = sizes
    case = _case(sizes, precision)
    group_sizes = jnp.full((num_groups,), m // num_groups, jnp.int32)
    layout = align(group_sizes, num_rows=m, tile_rows=BLOCK)

    @jax.jit
    def operands(key: jax.Array) -> tuple[object, object]:
        rows = jax.random.normal(key, (len(layout.source), k), jnp.bfloat16)
        shape = (num_groups, n, k) if precision == "fp8" else (num_groups, k, n)
        w = jax.random.normal(jax.random.fold_in(key, 1), shape, jnp.bfloat16)
        if precision == "fp8":
            return quantize(rows, format=ACTIVATION), quantize(w, format=WEIGHT)
        return rows, w

    x, w = operands(jax.random.key(0))
    with tuning.override(table or Table(case.hardware.kind)):
        run = jax.jit(
            lambda x, w, layout: mosaic_gpu.rows_product(
                x, w.mT if precision == "fp8" else w, layout, case=case
            )
        )
        compiled = run.lower(x, w, layout).compile()
    return Candidate(name, lambda i: compiled(x, w, layout))


def torch_grouped(sizes: Sizes, precision: Precision) -> Candidate:
    """Torch's grouped product: bfloat16, or 8-bit with one scale a row (an easier problem).

    Raises:
        NotCarriedError: if torch is missing or too old.
    """
    module = peers.torch()
    name = "_grouped_mm" if precision == "bfloat16" else "_scaled_grouped_mm"
    if not hasattr(module, name):
        raise peers.NotCarriedError(f"torch {module.__version__} has no {name}")
    m, n, k, num_groups = sizes
    make = partial(module.randn, device="cuda", dtype=module.bfloat16)
    x, w = make(m, k), make(num_groups, n, k)
    ends = module.arange(1, num_groups + 1, device="cuda", dtype=module.int32) * (m // num_groups)
    if precision == "bfloat16":
        return Candidate(
            "torch_grouped_mm",
            lambda i: module._grouped_mm(x, w.transpose(-2, -1), offs=ends),
            lambda result: module.cuda.synchronize(),
        )
    x8, w8 = x.to(module.float8_e4m3fn), w.to(module.float8_e4m3fn)
    x_scales = module.ones(m, device="cuda")
    w_scales = module.ones(num_groups, n, device="cuda")
    return Candidate(
        "torch_scaled_grouped_mm_rowwise",
        lambda i: module._scaled_grouped_mm(
            x8, w8.transpose(-2, -1), x_scales, w_scales, offs=ends, out_dtype=module.bfloat16
        ),
        lambda result: module.cuda.synchronize(),
    )


def bench(sizes: Sizes, *, ceilings: Mapping[str, float], num_rounds: int = 9) -> Iterator[Record]:
    """Yield records of both precisions and of torch's kernels, interleaved."""
    names: dict[str, int] = dict(zip(("M", "N", "K", "G"), sizes, strict=True))
    candidates: list[Candidate] = []
    floors: dict[str, float] = {}
    for precision in PRECISIONS:
        name = f"mosaic_gpu_{precision}"
        candidates.append(ours(sizes, precision, name=name))
        peak = ceilings["float8_flops" if precision == "fp8" else "bfloat16_flops"]
        floors[name] = 1e6 * _case(sizes, precision).flops / peak
        try:
            candidates.append(torch_grouped(sizes, precision))
            floors[candidates[-1].name] = floors[name]
        except peers.NotCarriedError as error:
            note = f"not carried: {error}"
            yield Record(op="grouped_matmul", sizes=names, backend=f"torch_{precision}", note=note)
    rounds = interleaved(candidates, num_rounds=num_rounds)
    for candidate in candidates:
        yield Record(
            op="grouped_matmul",
            sizes=names,
            backend=candidate.name,
            rounds_us=rounds[candidate.name],
            flops=_case(sizes, "fp8").flops,
            floor_us=floors[candidate.name],
        )


def tiles_to_try(precision: Precision) -> Sequence[Tile]:
    """The tiles, 128 rows high, that a sweep compares."""
    widths = (192, 160, 128) if precision == "fp8" else (256, 192, 128)
    return [
        Tile(num_groups=2, columns=columns, num_stages=7, snake=snake)
        for columns in widths
        for snake in (1, 4, 8)
    ]


def tune(sizes: Sizes, table: Table, *, num_rounds: int = 3) -> Iterator[tuple[Record, Table]]:
    """Yield a record for each tile at `sizes`, and the table with the fastest so far."""
    _, n, k, num_groups = sizes
    for precision in PRECISIONS:
        op, key = f"grouped_{precision}", f"g{num_groups}_n{n}_k{k}"
        tiles = tiles_to_try(precision)
        candidates = []
        for index, tile in enumerate(tiles):
            one = Table(table.device).with_entry(op, key, settings=asdict(tile))
            candidates.append(ours(sizes, precision, name=str(index), table=one))
        rounds = interleaved(candidates, num_rounds=num_rounds, round_s=0.01)
        best = min(rounds, key=lambda name: sorted(rounds[name])[num_rounds // 2])
        table = table.with_entry(op, key, settings=asdict(tiles[int(best)]))
        for candidate in candidates:
            record = Record(
                op=op,
                sizes=dict(zip(("M", "N", "K", "G"), sizes, strict=True)),
                backend="mosaic_gpu",
                rounds_us=rounds[candidate.name],
                flops=_case(sizes, precision).flops,
                settings=asdict(tiles[int(candidate.name)]),
            )
            yield record, table
