"""What there is to time: the sizes of each op, and how a size becomes a plan."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import hardware, tuning
from pallas_kernels.bench import (
    flash_attention,
    fp8_matmul,
    grouped_masked,
    grouped_matmul,
    mla_decode,
    quantize,
    widened_matmul,
)
from pallas_kernels.bench.measure import Plan
from pallas_kernels.bench.timing import Record
from pallas_kernels.formats import ACTIVATION
from pallas_kernels.fp8_matmul.cases import (
    BENCH_M,
    BENCH_NK,
    BENCH_ODD,
    TRAINING_SIZES,
    WGRAD_SIZES,
)
from pallas_kernels.tuning import Table


class SizesError(ValueError):
    """Sizes were asked for that cannot be read, or that nothing has."""


def _plans(module: Any, op: str) -> Iterator[Plan]:
    for sizes in module.SIZES:
        make = partial(module.problem, sizes)
        yield Plan(op, module.named(sizes), module.operand_bytes(sizes), make)


def _fp8_matmul() -> Iterator[Plan]:
    # Rows last: what is prepared together has all (N, K) of one M.
    for m in BENCH_M:
        for n, k in BENCH_NK:
            sizes = (m, n, k)
            make = partial(fp8_matmul.problem, sizes)
            yield Plan("fp8_matmul", fp8_matmul.named(sizes), fp8_matmul.operand_bytes(sizes), make)


def _fp8_training() -> Iterator[Plan]:
    for sizes in TRAINING_SIZES:
        make = partial(fp8_matmul.problem, sizes, op="fp8_training")
        num_bytes = fp8_matmul.operand_bytes(sizes)
        yield Plan("fp8_training", fp8_matmul.named(sizes), num_bytes, make)


def _fp8_wgrad() -> Iterator[Plan]:
    for sizes in WGRAD_SIZES:
        make = partial(fp8_matmul.wgrad_problem, sizes)
        num_bytes = fp8_matmul.operand_bytes(sizes)
        yield Plan("fp8_wgrad", fp8_matmul.named(sizes), num_bytes, make)


def _fp8_odd() -> Iterator[Plan]:
    for pair in BENCH_ODD:
        num_bytes = sum(fp8_matmul.operand_bytes(sizes) for sizes in pair)
        make = partial(fp8_matmul.odd_problem, pair)
        yield Plan("fp8_odd", fp8_matmul.named(pair[0]), num_bytes, make)


def _flash_attention() -> Iterator[Plan]:
    for sizes in flash_attention.SIZES:
        for phase in flash_attention.PHASES:
            make = partial(flash_attention.problem, sizes, phase)
            num_bytes = flash_attention.operand_bytes(sizes)
            yield Plan("flash_attention", flash_attention.named(sizes), num_bytes, make)


SUITE: dict[str, Callable[[], Iterator[Plan]]] = {
    "fp8_matmul": _fp8_matmul,
    "fp8_odd": _fp8_odd,
    "fp8_training": _fp8_training,
    "fp8_wgrad": _fp8_wgrad,
    "grouped_matmul": partial(_plans, grouped_matmul, "grouped_matmul"),
    "grouped_masked": partial(_plans, grouped_masked, "grouped_masked"),
    "mla_decode": partial(_plans, mla_decode, "mla_decode"),
    "flash_attention": _flash_attention,
    "quantize": partial(_plans, quantize, "quantize"),
    "widened_matmul": partial(_plans, widened_matmul, "widened_matmul"),
}


@dataclass(frozen=True)
class Sweep:
    """How the tiles of an op are compared.

    Attributes:
        tune: yields a record for each tile, and the table with the best so far.
    """

    sizes: Sequence[tuple[int, ...]]
    named: Callable[[Any], Mapping[str, int]]
    tune: Callable[..., Iterator[tuple[Record, Table]]]


SWEEPS: dict[str, Sweep] = {
    "fp8_matmul": Sweep(
        [*((m, n, k) for m in BENCH_M for n, k in BENCH_NK), *TRAINING_SIZES],
        fp8_matmul.named,
        fp8_matmul.tune,
    ),
    # A weight's gradient, which sums over tokens; its tiles join those of fp8_matmul.
    "fp8_wgrad": Sweep(
        WGRAD_SIZES, fp8_matmul.named, partial(fp8_matmul.tune, b_format=ACTIVATION)
    ),
    "grouped_matmul": Sweep(grouped_matmul.SIZES, grouped_matmul.named, grouped_matmul.tune),
    "widened_matmul": Sweep(widened_matmul.SIZES, widened_matmul.named, widened_matmul.tune),
}


def plans(ops: Sequence[str] = (), sizes: Sequence[str] = ()) -> list[Plan]:
    """Return the plans of `ops`, all if none is named, at `sizes`, all if none is given.

    Args:
        sizes: each `64x4096x7168`, all sizes in the op's order, or `M=64,128`, one of them.
    Raises:
        SizesError: if an op is unknown, a size cannot be read, or nothing is left.
    """
    unknown = [op for op in ops if op not in SUITE]
    if unknown:
        raise SizesError(f"op {unknown[0]!r} is not timed here. Use one of {[*SUITE]}.")
    picked = picker(sizes)
    found = [plan for op in ops or SUITE for plan in SUITE[op]() if picked(plan.sizes)]
    timed = {tuple(plan.sizes.values()) for plan in found}
    absent = ["x".join(map(str, one)) for one in whole_sizes(sizes) if one not in timed]
    if absent or not found:
        asked = ", ".join(absent or sizes)
        raise SizesError(f"no size of {', '.join(ops or SUITE)} is {asked}.")
    return found


def whole_sizes(sizes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return those of `sizes` in which all are named: 64x4096x7168."""
    whole = [text for text in sizes if re.fullmatch(r"\d+(x\d+)+", text)]
    return [tuple(int(part) for part in text.split("x")) for text in whole]


def picker(sizes: Sequence[str]) -> Callable[[Mapping[str, int]], bool]:
    """Return what says whether named sizes were asked for by `sizes`, as `plans` takes them.

    Raises:
        SizesError: if one cannot be read.
    """
    whole = set(whole_sizes(sizes))
    single: list[tuple[str, set[int]]] = []
    for text in sizes:
        if match := re.fullmatch(r"(\w+)=(\d+(?:,\d+)*)", text):
            single.append((match[1], {int(part) for part in match[2].split(",")}))
        elif not whole_sizes([text]):
            raise SizesError(f"sizes {text!r} are neither like 64x4096x7168 nor like M=64,128.")

    def picked(named: Mapping[str, int]) -> bool:
        if whole and tuple(named.values()) not in whole:
            return False
        return all(named.get(letter) in values for letter, values in single)

    return picked


def sweep(
    op: str, sizes: Sequence[str] = (), *, out: Path, num_rounds: int = 3
) -> Iterator[Record]:
    """Compare the tiles of `op`, yield each, and write the table to `out` after every size.

    Args:
        sizes: as `plans` takes them; those of a model of your own too, where all are named.
    Raises:
        SizesError: if a size cannot be read, or nothing is left.
    """
    chosen, picked = SWEEPS[op], picker(sizes)
    asked = [one for one in chosen.sizes if picked(chosen.named(one))]
    asked += [one for one in whole_sizes(sizes) if one not in asked]
    letters = chosen.named(chosen.sizes[0])
    wrong = ["x".join(map(str, one)) for one in asked if len(one) != len(letters)]
    if wrong or not asked:
        said = ", ".join(wrong or sizes)
        raise SizesError(
            f"no size of {op} is {said}: it has {len(letters)}, {' x '.join(letters)}."
        )
    device = hardware.current().kind
    table = Table(device, (("jax", jax.__version__),), tuning.shipped(device).entries)
    for one in asked:
        for record, found in chosen.tune(one, table, num_rounds=num_rounds):
            yield record
            table = found
        tuning.publish(table, out)
