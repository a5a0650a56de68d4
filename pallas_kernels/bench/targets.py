"""The speeds that the kernels aim at on an H200, and which of them a results file reaches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pallas_kernels.bench.results import Results
from pallas_kernels.bench.summary import Key, Line, summary
from pallas_kernels.bench.timing import geometric_mean
from pallas_kernels.fp8_matmul.cases import BENCH_NK, BENCH_ODD

Lines = Mapping[tuple[Key, str], Line]
Met = Literal["yes", "no", "not measured"]


@dataclass(frozen=True)
class Measured:
    """A target's figure.

    Attributes:
        value: over the sizes that were measured; None if none was.
        num_sizes: sizes that were measured, of `num_asked`.
        num_calls: calls behind the size that has fewest.
        is_worst: True if it is that of the worst size, which more sizes can only make worse.
    """

    value: float | None
    num_sizes: int
    num_asked: int
    num_calls: int
    is_worst: bool


@dataclass(frozen=True)
class Target:
    """A figure to reach.

    Attributes:
        sense: "at least" or "at most" `wanted`.
        measure: finds the figure.
    """

    wanted: float
    sense: Literal["at least", "at most"]
    measure: Callable[[Lines], Measured]


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured."""

    text: str
    target: Target
    measured: Measured

    @property
    def met(self) -> Met:
        """Whether the figure reaches it; of some sizes only, it can miss but not reach it."""
        found = self.measured
        if found.value is None:
            return "not measured"
        at_least = self.target.sense == "at least"
        wanted = self.target.wanted
        reached = found.value >= wanted if at_least else found.value <= wanted
        if found.num_sizes == found.num_asked:
            return "yes" if reached else "no"
        return "not measured" if reached or not found.is_worst else "no"


def _collect(
    lines: Lines,
    places: Sequence[tuple[Key, str]],
    *,
    value_of: Callable[[Line], float | None],
    reduce: Callable[[Sequence[float]], float],
) -> Measured:
    found = [lines[place] for place in places if place in lines]
    pairs = [(line, value) for line in found if (value := value_of(line)) is not None]
    return Measured(
        value=reduce([value for _, value in pairs]) if pairs else None,
        num_sizes=len(pairs),
        num_asked=len(places),
        num_calls=min((line.num_calls for line, _ in pairs), default=0),
        is_worst=reduce in (min, max),
    )


def _ratio(line: Line) -> float | None:
    return line.ratio.median if line.ratio else None


def _inverse_ratio(line: Line) -> float | None:
    return 1 / line.ratio.median if line.ratio else None


def _tflops(line: Line) -> float | None:
    return line.tflops


_geometric_mean_of_ratios = partial(_collect, value_of=_ratio, reduce=geometric_mean)
_worst_ratio = partial(_collect, value_of=_ratio, reduce=min)
_worst_tflops = partial(_collect, value_of=_tflops, reduce=min)
_dearest_odd = partial(_collect, value_of=_inverse_ratio, reduce=max)


def _dense(backend: str, *rows: int) -> list[tuple[Key, str]]:
    return [
        (Key("fp8_matmul", (("M", m), ("N", n), ("K", k))), backend)
        for m in rows
        for n, k in BENCH_NK
    ]


def _odd(rows: int) -> list[tuple[Key, str]]:
    return [
        (Key("fp8_odd", tuple(zip("MNK", odd, strict=True))), "mosaic_gpu_aligned")
        for odd, aligned in BENCH_ODD
        if aligned[0] == rows
    ]


def _grouped(backend: str, *groups: int) -> list[tuple[Key, str]]:
    return [
        (Key("grouped_matmul", (("M", 8192), ("N", 4096), ("K", 7168), ("G", g))), backend)
        for g in groups
    ]


def _decode(backend: str, *shapes: tuple[int, int]) -> list[tuple[Key, str]]:
    return [(Key("mla_decode", (("B", b), ("S", s), ("N", 128))), backend) for b, s in shapes]


def _at_least(
    wanted: float, measure: Callable[..., Measured], places: list[tuple[Key, str]]
) -> Target:
    return Target(wanted, "at least", partial(measure, places=places))


def _at_most(
    wanted: float, measure: Callable[..., Measured], places: list[tuple[Key, str]]
) -> Target:
    return Target(wanted, "at most", partial(measure, places=places))


LONG = ((64, 4096), (128, 4096), (64, 16384), (128, 16384))
BLOCKWISE = "torch_blockwise"
TARGETS: dict[str, Target] = {
    "fp8_matmul, M = 4096 and 8192: geometric mean over torch block-wise": _at_least(
        1.05, _geometric_mean_of_ratios, _dense(BLOCKWISE, 4096, 8192)
    ),
    "fp8_matmul, M = 4096 and 8192: slowest shape over torch block-wise": _at_least(
        0.95, _worst_ratio, _dense(BLOCKWISE, 4096, 8192)
    ),
    "fp8_matmul, M = 4096 and 8192: geometric mean over XLA bf16": _at_least(
        1.5, _geometric_mean_of_ratios, _dense("xla_bfloat16", 4096, 8192)
    ),
    "fp8_matmul, M = 64 and 128: geometric mean over torch block-wise": _at_least(
        1.2, _geometric_mean_of_ratios, _dense(BLOCKWISE, 64, 128)
    ),
    "fp8_matmul, M = 64 and 128: slowest shape over torch block-wise": _at_least(
        1.0, _worst_ratio, _dense(BLOCKWISE, 64, 128)
    ),
    "fp8_matmul, M = 4096: an odd M, N or K over its next multiple, dearest": _at_most(
        1.25, _dearest_odd, _odd(4096)
    ),
    "fp8_matmul, M = 64: an odd M, N or K over its next multiple, dearest": _at_most(
        1.25, _dearest_odd, _odd(64)
    ),
    "grouped_matmul fp8, 8192 x 4096 x 7168, G = 8: TFLOP/s": _at_least(
        1050.0, _worst_tflops, _grouped("mosaic_gpu_fp8", 8)
    ),
    "grouped_matmul fp8, 8192 x 4096 x 7168, G = 32: TFLOP/s": _at_least(
        1050.0, _worst_tflops, _grouped("mosaic_gpu_fp8", 32)
    ),
    "grouped_matmul bf16, 8192 x 4096 x 7168, G = 8 and 32: slowest over torch": _at_least(
        1.0, _worst_ratio, _grouped("torch_grouped_mm", 8, 32)
    ),
    **{
        f"mla_decode, 128 heads, B = {b}, S = {s}: TFLOP/s, automatic split": _at_least(
            580.0, _worst_tflops, _decode("mosaic_gpu_auto", (b, s))
        )
        for b, s in LONG
    },
    "mla_decode, 128 heads, those four: slowest over XLA on a contiguous cache": _at_least(
        1.8, _worst_ratio, _decode("xla_contiguous", *LONG)
    ),
    "mla_decode, 128 heads, B = 16, S = 4096: TFLOP/s, automatic split": _at_least(
        450.0, _worst_tflops, _decode("mosaic_gpu_auto", (16, 4096))
    ),
}


def targets(results: Results) -> tuple[Verdict, ...]:
    """Return every target beside what the calls of `results` measured."""
    lines = {(line.key, line.backend): line for line in summary(results)}
    return tuple(Verdict(text, t, t.measure(lines)) for text, t in TARGETS.items())
