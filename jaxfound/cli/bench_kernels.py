"""`jaxfound bench kernels` and `bench tune`: time the kernels, their peers, their tiles."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.cli.pages.kernel_grids import Grid
    from pallas_kernels.bench.measure import Finished, Options
    from pallas_kernels.bench.results import Recorder, Results

# The commit that is measured, where there is no git to ask.
COMMIT_VARIABLE = "JAXFOUND_COMMIT"
# Wide enough for the widest table; a narrower terminal folds the lines.
TABLE_WIDTH = 160

Ops = Annotated[list[str] | None, typer.Option("--op", help="An op; all if none is named.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--sizes", help="64x4096x7168, or one letter: M=64,128. All if none."),
]
Out = Annotated[Path | None, typer.Option(help="Append to this JSON file, after every size.")]
Compare = Annotated[
    Path | None, typer.Option(help="Exit with 1 if a kernel is slower than in this file.")
]
Rest = Annotated[int, typer.Option(help="Idle before each round, ms: it times a burst.", min=0)]
Settle = Annotated[
    int, typer.Option(help="Untimed before each round, ms: 200 for sustained speed.", min=0)
]
Without = Annotated[
    list[str] | None,
    typer.Option(help="Leave out candidates whose names begin so.", metavar="NAME"),
]
Roofline = Annotated[Path | None, typer.Option(help="PNG file to draw.")]
Show = Annotated[Path | None, typer.Option(help="Measure nothing; draw what this file holds.")]
WriteDocs = Annotated[
    bool, typer.Option("--write-docs", help="With --show: write the tables in documents.")
]
Threads = Annotated[int, typer.Option(help="Threads that compile.", min=1)]


def kernels_command(
    op: Ops = None,
    sizes: Sizes = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 9,
    round_ms: Annotated[int, typer.Option(help="Length of a round, ms.", min=1)] = 20,
    rest_ms: Rest = 100,
    settle_ms: Settle = 0,
    without: Without = None,
    out: Out = None,
    compare: Compare = None,
    roofline: Roofline = None,
    show: Show = None,
    write_docs: WriteDocs = False,
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
    cache: Annotated[Path | None, typer.Option(help="Keep compiled programs here.")] = None,
    threads: Threads = 16,
    power: Annotated[bool, typer.Option(help="Read the power: 0.15 s a candidate.")] = True,
) -> None:
    """Time every kernel beside its peers on this GPU, check it, and print tables.

    --show FILE draws a file that was measured elsewhere, on any machine.
    """
    from pallas_kernels.bench.machine import use_cache, why_not_here
    from pallas_kernels.bench.measure import Options
    from pallas_kernels.bench.results import Results, ResultsError, read
    from pallas_kernels.bench.suite import SizesError

    try:
        before = read(compare) if compare is not None else None
        if show is not None:
            _show(read(show), before, roofline=roofline, write_docs=write_docs)
            return
        reason = why_not_here()
        if reason is not None:
            _refuse(reason)
        if cache is not None:
            use_cache(cache)
        options = Options(
            num_rounds=rounds,
            round_s=round_ms / 1e3,
            rest_s=rest_ms / 1e3,
            settle_s=settle_ms / 1e3,
            without=tuple(without or ()),
            num_threads=threads,
        )
        recorder = _measure(
            op or (), sizes or (), options=options, out=out, commit=commit, power=power
        )
    except (ResultsError, SizesError) as error:
        _refuse(str(error))
    found = Results((recorder.call,))
    _draw(found, roofline=roofline)
    _compare(before, found)
    _stop_if_ours_failed(found)


def _show(
    found: "Results", before: "Results | None", *, roofline: Path | None, write_docs: bool
) -> None:
    _draw(found, roofline=roofline)
    if write_docs:
        _write_documents(found)
    _compare(before, found)


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(2)


def _measure(
    ops: Sequence[str],
    sizes: Sequence[str],
    *,
    options: "Options",
    out: Path | None,
    commit: str,
    power: bool,
) -> "Recorder":
    """Time everything that was asked for; the file is written after each size."""
    import time

    from pallas_kernels.bench import peers
    from pallas_kernels.bench.machine import ceilings, versions
    from pallas_kernels.bench.measure import measure
    from pallas_kernels.bench.results import Call, Recorder
    from pallas_kernels.bench.suite import plans

    start = time.perf_counter()
    console = open_console()
    asked = plans(ops, sizes)
    call = Call(
        commit=commit_of(commit),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        ceilings={},
        seconds=None,
    )
    recorder = Recorder(out, call)
    peers.load()
    options = _with_meter(options) if power else options
    found = ceilings(num_threads=options.num_threads)
    recorder.set_ceilings(found)
    console.print(
        f"ceilings: copy {found['copy_bps'] / 1e12:.2f} TB/s, bf16 "
        f"{found['bfloat16_flops'] / 1e12:.0f}, fp8 {found['float8_flops'] / 1e12:.0f} TFLOP/s; "
        f"{time.perf_counter() - start:.0f} s so far"
    )
    for finished in measure(asked, ceilings=found, options=options):
        seconds = time.perf_counter() - start
        recorder.add(finished.records, seconds=seconds)
        console.print(_progress(finished, seconds), markup=False)
    return recorder


def _with_meter(options: "Options") -> "Options":
    from dataclasses import replace

    from pallas_kernels.bench.power import NoPowerError, open_meter

    try:
        return replace(options, meter=open_meter())
    except NoPowerError as error:
        open_console().print(f"no power: {error}", markup=False)
        return options


def _progress(finished: "Finished", seconds: float) -> str:
    ours = [r for r in finished.records if r.rounds_us and not r.against]
    best = min(ours, key=lambda r: r.median_us, default=None)
    size = "x".join(str(size) for size in finished.sizes.values())
    figure = f"{best.backend} {best.median_us:.1f} µs" if best else "none of ours"
    failed = [r.backend for r in finished.records if r.note.startswith("failed")]
    return (
        f"{seconds:5.0f} s  {finished.op} {size}: {figure}; prepared in "
        f"{finished.prepare_s:.1f} s, measured in {finished.measure_s:.1f} s"
        + (f"; FAILED: {', '.join(failed)}" if failed else "")
    )


def commit_of(said: str) -> str:
    """Return the commit that a record names: as it was said, else as git says it."""
    from jaxfound.resources.platform import source_commit

    return said or os.environ.get(COMMIT_VARIABLE, "") or source_commit()


def _draw(found: "Results", *, roofline: Path | None) -> None:
    """Print the tables, the targets and what is missing; write the picture if it is wanted."""
    from jaxfound.cli.pages.kernel_grids import grids, missing_text, remarks, target_grid
    from jaxfound.cli.pages.roofline import write_roofline
    from jaxfound.config.schema import ConfigError

    console = open_console()
    for grid in (*grids(found, whole=False), target_grid(found)):
        _print_grid(grid)
    console.print("A peer's column: its time over ours, paired by round.", markup=False)
    for line in (*remarks(found), *missing_text(found)):
        console.print(f"  {line}", markup=False)
    if roofline is None:
        return
    try:
        write_roofline(found, roofline)
    except ConfigError as error:
        _refuse(str(error))
    console.print(f"drawn to {roofline}", markup=False)


def _print_grid(grid: "Grid") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(grid.header):
        words = index == 0 or name in grid.names
        table.add_column(
            name if words else name.replace(" ", "\n"),
            justify="left" if words else "right",
            overflow="fold",
        )
    above = ""
    for first, *others in grid.rows:
        table.add_row("" if first == above else first, *others)
        above = first
    console = open_console(wraps=True)
    if not console.is_terminal:
        # A file or a pipe folds nothing, so it gets whole lines.
        console.width = TABLE_WIDTH
    console.print(table)


def _write_documents(found: "Results") -> None:
    from jaxfound.cli.pages.kernel_docs import DocumentError, documents

    try:
        pages = documents(found, Path())
    except DocumentError as error:
        _refuse(str(error))
    for path, text in pages.items():
        path.write_text(text, "utf-8")
        open_console().print(f"wrote {path}", markup=False)


def _compare(before: "Results | None", now: "Results") -> None:
    """Print what became slower than both spreads explain, and leave with 1 if anything did."""
    from jaxfound.cli.pages.kernel_grids import size_text
    from pallas_kernels.bench.summary import regressions

    if before is None:
        return
    console, found = open_console(), regressions(before, now)
    for one in found:
        old, new = one.old_us, one.new_us
        console.print(
            f"slower: {one.key.op} {size_text(one.key)} {one.backend}: {old.median:.2f} "
            f"({old.low:.2f}-{old.high:.2f}) µs before, {new.median:.2f} "
            f"({new.low:.2f}-{new.high:.2f}) µs now: {new.median / old.median - 1:+.1%}",
            markup=False,
        )
    if found:
        raise typer.Exit(1)
    console.print("nothing is slower than before")


def _stop_if_ours_failed(found: "Results") -> None:
    (call,) = found.calls
    failed = [r for r in call.records if r.note.startswith("failed") and not r.against]
    for record in failed:
        size = "x".join(str(size) for size in record.sizes.values())
        typer.echo(f"error: {record.op} {size} {record.backend}: {record.note}", err=True)
    if failed:
        raise typer.Exit(1)


def tune_command(
    op: Annotated[
        str, typer.Option(help="fp8_matmul, fp8_wgrad, grouped_matmul or widened_matmul.")
    ],
    out: Annotated[Path, typer.Option(help="Tuning table to write.", metavar="FILE")],
    sizes: Sizes = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 3,
) -> None:
    """Compare the tiles of an op on this GPU and write the table of the fastest right ones.

    It starts from the table that ships with the package; FILE is written after every size.
    """
    from pallas_kernels.bench.machine import why_not_here
    from pallas_kernels.bench.suite import SWEEPS, SizesError, sweep

    reason = why_not_here()
    if reason is not None:
        _refuse(reason)
    if op not in SWEEPS:
        _refuse(f"op {op!r} has no tiles to compare. Use one of {[*SWEEPS]}.")
    console = open_console()
    try:
        for record in sweep(op, sizes or (), out=out, num_rounds=rounds):
            size = "x".join(str(size) for size in record.sizes.values())
            error = "" if record.row_error is None else f", row error {record.row_error:.1e}"
            console.print(
                f"{record.op} {size} {record.settings}: {record.median_us:.2f} µs{error}",
                markup=False,
            )
    except SizesError as error:
        _refuse(str(error))
    console.print(f"written to {out}", markup=False)
