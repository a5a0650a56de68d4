"""Tables of what the kernels measured, as rows of text: one row a kernel of ours, peers beside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pallas_kernels.bench.results import Results
from pallas_kernels.bench.summary import Key, Line, summary, without_times
from pallas_kernels.bench.targets import Verdict, targets
from pallas_kernels.bench.timing import Ratio


class Peer(NamedTuple):
    """How a peer is named, and whether our time over its own is shown instead."""

    title: str
    inverse: bool = False


PEERS: dict[str, Peer] = {
    "torch_blockwise": Peer("torch block-wise"),
    "torch_rowwise": Peer("torch row-wise"),
    "torch_bfloat16": Peer("torch bf16"),
    "xla_bfloat16": Peer("XLA bf16"),
    "xla_float8": Peer("XLA fp8, unscaled"),
    "flashinfer_groupwise": Peer("FlashInfer"),
    "mosaic_gpu_aligned": Peer("odd / aligned", inverse=True),
    "torch_scaled_grouped_mm_rowwise": Peer("torch fp8 row-wise"),
    "torch_grouped_mm": Peer("torch bf16"),
    "torch_bmm": Peer("torch bmm, all room"),
    "xla_batched": Peer("XLA, all room"),
    "xla_contiguous": Peer("XLA, contiguous cache"),
    "flashinfer_mla": Peer("FlashInfer"),
    "cudnn_bare": Peer("bare cuDNN call"),
    "cudnn_unpacked": Peer("cuDNN, unpacked"),
    "cudnn_unpacked_widened": Peer("cuDNN, unpacked, wide V"),
    "jax_cudnn_unpacked": Peer("jax.nn, unpacked"),
    "torch_unpacked": Peer("torch, unpacked"),
}
TITLES: dict[str, str] = {
    "fp8_matmul": "fp8_matmul: A·Bᵀ with 1x128 and 128x128 scales, bf16 out",
    "fp8_odd": "fp8_matmul at odd sizes, beside the next multiple of 64, 8, 128",
    "grouped_matmul": "grouped_matmul: even groups, rows aligned and quantised already",
    "fp8_training": "fp8_matmul: products of layers in training, 16,384 tokens",
    "fp8_wgrad": "fp8_matmul: weights' gradients, both operands in tiles of 1x128",
    "grouped_masked": "masked_grouped_matmul: M tokens in each of G groups with room for 128",
    "mla_decode": "mla_decode: pages of 64 tokens, shuffled",
    "flash_attention": "flash_attention: causal, about eight documents a row",
    "quantize": "quantize: bf16 in; the error is the format's",
    "widened_matmul": "widened_matmul: M bf16 rows times E matrices in 8-bit squares",
}


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        names: of columns whose cells are words; the others hold numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = ("backend", "target")


def grids(results: Results, *, whole: bool) -> list[Grid]:
    """Return a table for each op that was timed.

    Args:
        whole: also intervals, rounds and memory, for a page that is wide enough.
    """
    lines = summary(results)
    ops = dict.fromkeys(line.key.op for line in lines)
    return [_grid(op, [x for x in lines if x.key.op == op], whole=whole) for op in ops]


def _grid(op: str, lines: Sequence[Line], *, whole: bool) -> Grid:
    ours = [line for line in lines if line.is_ours]
    # The phase of attention stands behind a slash, in the backend's own column.
    kinds = dict.fromkeys(line.backend.split("/")[0] for line in lines if not line.is_ours)
    beside = {(line.key, line.record.against, line.backend.split("/")[0]): line for line in lines}
    letters = " x ".join(letter for letter, _ in lines[0].key.sizes)
    rows = [
        (
            size_text(line.key),
            line.backend,
            *_figures(line, whole=whole),
            *(_ratio_cell(beside.get((line.key, line.backend, k)), k, whole=whole) for k in kinds),
        )
        for line in ours
    ]
    more = ("MiB", "W", "rounds") if whole else ("W",)
    header = (letters, "backend", "µs", "TFLOP/s", "GB/s", "of floor", "row error", *more)
    titles = (PEERS.get(kind, Peer(kind)).title for kind in kinds)
    return _without_empty(Grid(TITLES.get(op, op), (*header, *titles), tuple(rows)))


def _figures(line: Line, *, whole: bool) -> tuple[str, ...]:
    record, time = line.record, line.time_us
    us = number_text(time.median)
    if whole:
        us = f"{us} ({number_text(time.low)}-{number_text(time.high)})"
    memory = f"{record.memory_bytes / 2**20:,.0f}" if record.memory_bytes is not None else ""
    power = f"{record.power_w:.0f}" if record.power_w is not None else ""
    rounds = f"{line.num_calls} x {line.num_rounds // line.num_calls}"
    return (
        us,
        f"{line.tflops:.0f}" if record.flops else "",
        f"{line.gbps:.0f}" if record.bytes_moved else "",
        f"{line.floor_share:.0%}" if record.floor_us else "",
        f"{record.row_error:.1e}" if record.row_error is not None else "",
        *((memory, power, rounds) if whole else (power,)),
    )


def _ratio_cell(line: Line | None, kind: str, *, whole: bool) -> str:
    if line is None or line.ratio is None:
        return ""
    ratio = line.ratio
    if PEERS.get(kind, Peer(kind)).inverse:
        ratio = Ratio(1 / ratio.median, 1 / ratio.high, 1 / ratio.low)
    return ratio_text(ratio) if whole else f"{ratio.median:.2f}"


def _without_empty(grid: Grid) -> Grid:
    """`grid` without columns in which nothing stands, and without `backend` if it is one."""
    columns = list(zip(*grid.rows, strict=True))
    kept = [
        index
        for index, cells in enumerate(columns)
        if any(cells) and (grid.header[index] != "backend" or len(set(cells)) > 1)
    ]
    rows = tuple(tuple(row[index] for index in kept) for row in grid.rows)
    return Grid(grid.title, tuple(grid.header[index] for index in kept), rows)


def target_grid(results: Results) -> Grid:
    """Return the speeds aimed at, beside what was measured."""
    rows = tuple(_target_row(verdict) for verdict in targets(results))
    return Grid("Speeds aimed at", ("target", "wanted", "measured", "met", "calls"), rows)


def _target_row(verdict: Verdict) -> tuple[str, ...]:
    sense = {"at least": "≥", "at most": "≤"}[verdict.target.sense]
    found = verdict.measured
    value = "" if found.value is None else number_text(found.value)
    if found.value is not None and found.num_sizes < found.num_asked:
        value += f" ({found.num_sizes} of {found.num_asked} sizes)"
    calls = str(found.num_calls) if found.num_calls else ""
    wanted = f"{sense} {verdict.target.wanted:g}"
    return (verdict.text, wanted, value, verdict.met, calls)


def missing_text(results: Results) -> list[str]:
    """Return one line for each reason why backends have no times."""
    by_note: dict[str, list[str]] = {}
    for (op, backend), note in without_times(results).items():
        by_note.setdefault(note, []).append(f"{op} {backend}")
    return [f"{', '.join(named)}: {note}" for note, named in by_note.items()]


def remarks(results: Results) -> list[str]:
    """Return what is special about backends that were timed, each remark once."""
    found: dict[str, dict[str, None]] = {}
    for line in summary(results):
        kind = line.backend.split("/")[0]
        title = PEERS.get(kind, Peer(kind)).title
        for note in line.record.note.split("; "):
            # A time on the clock is another at every size.
            if note and not note.startswith("wall "):
                found.setdefault(note, {})[title] = None
    return [f"{', '.join(titles)}: {note}" for note, titles in found.items()]


def size_text(key: Key) -> str:
    """The size as its op writes it, e.g. `64 x 4096 x 7168`."""
    return " x ".join(str(size) for _, size in key.sizes)


def ratio_text(ratio: Ratio) -> str:
    """A ratio and its interval."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def number_text(value: float) -> str:
    """A figure with as many digits as it deserves."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# Op and sizes of the README's rows.
HEADLINES: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("fp8_matmul", {"M": 64, "N": 7168, "K": 16384}),
    ("fp8_matmul", {"M": 4096, "N": 4096, "K": 7168}),
    ("fp8_matmul", {"M": 8192, "N": 7168, "K": 16384}),
    ("grouped_matmul", {"M": 8192, "N": 4096, "K": 7168, "G": 8}),
    ("grouped_matmul", {"M": 8192, "N": 4096, "K": 7168, "G": 32}),
    ("mla_decode", {"B": 64, "S": 16384, "N": 128}),
    ("mla_decode", {"B": 128, "S": 4096, "N": 128}),
    ("flash_attention", {"B": 4, "T": 4096, "N": 16, "K": 16, "H": 192, "V": 128}),
)
# A peer that solves the same problem, for each op.
SAME_PROBLEM: dict[str, str] = {
    "fp8_matmul": "torch_blockwise",
    "grouped_matmul": "torch_grouped_mm",
    "mla_decode": "xla_contiguous",
    "flash_attention": "cudnn_unpacked",
}


def headline_grid(results: Results) -> Grid:
    """Return the few rows that a front page has room for, of sizes that were timed."""
    lines = summary(results)
    rows: list[tuple[str, ...]] = []
    for op, sizes in HEADLINES:
        key = Key(op, tuple(sizes.items()))
        peers = [x for x in lines if x.key == key and x.backend.split("/")[0] == SAME_PROBLEM[op]]
        against = {x.record.against: x for x in peers}
        letters = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
        for line in lines:
            if line.key != key or line.backend not in against:
                continue
            peer = against[line.backend]
            ratio = ratio_text(peer.ratio) if peer.ratio else ""
            figures = (number_text(line.time_us.median), f"{line.tflops:.0f}")
            title = PEERS[peer.backend.split("/")[0]].title
            phase = line.backend.partition("/")[2]
            name = f"`{op}` {phase}".rstrip()
            rows.append((name, letters, *figures, f"{line.floor_share:.0%}", title, ratio))
    header = ("op", "size", "µs", "TFLOP/s", "of floor", "peer", "times as fast")
    return Grid("", header, tuple(rows), names=("op", "size", "peer"))
