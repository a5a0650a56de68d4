"""`jaxfound bench pipeline`: pipeline schedules timed on the devices that are there."""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, TABLE_WIDTH, commit_of
from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config.run import RunConfig
    from jaxfound.training.pipeline_record import Row

HEADER = (
    *("layout", "step ms", "low-high", "tokens/s", "efficiency", "bound", "expected"),
    *("arguments", "by plan", "inside", "by plan", "compile s", "first losses"),
)
SCHEDULES_HELP = "Names with commas between; all without it."


def pipeline_command(
    config: Annotated[Path, typer.Option(help="A YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Differences.", metavar="[KEY=VALUE]...")
    ] = None,
    schedules: Annotated[str, typer.Option(help=SCHEDULES_HELP, metavar="A,B,...")] = "",
    rounds: Annotated[int, typer.Option(help="Timed steps of each.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file, written after every layout.")] = None,
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
) -> None:
    """Time a stage of CONFIG alone, each schedule, and fsdp in place of stages.

    Tokens are random: no data is read. Where JAX runs on the CPU, devices are virtual. Exits with
    1 when a layout failed to run.
    """
    from jaxfound.config.load import load
    from jaxfound.training.measure_pipeline import devices_text, measure_pipeline

    cfg = load(config, overrides or ())
    make_devices(cfg)
    names = [name.strip() for name in schedules.split(",") if name.strip()]
    rows: list[Row] = []
    for row in measure_pipeline(cfg, schedules=names, rounds=rounds):
        rows.append(row)
        open_console().print(progress(row), markup=False)
        if out is not None:
            write(out, cfg, rows, commit=commit)
    print_table(rows, title=f"{cfg.name} on {devices_text()}")
    if out is not None:
        open_console().print(f"written to {out}", markup=False)
    if any(row.note.startswith("failed") for row in rows):
        raise typer.Exit(1)


def make_devices(cfg: "RunConfig") -> None:
    """Make the CPU as many devices as the run's degrees multiply to, unless JAX has started.

    Accelerators are used as they are.
    """
    from jaxfound.cli.verify import degrees_of
    from jaxfound.resources.platform import use_virtual_cpus

    # Where there is an accelerator, its compiler keeps every thread of the host.
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    with suppress(RuntimeError):
        use_virtual_cpus(math.prod(degrees_of(cfg).values()))


def progress(row: "Row") -> str:
    """Return one line about a layout that is done."""
    if row.timed is None:
        return f"{row.candidate.name}: {row.note}"
    return (
        f"{row.candidate.name}: {row.timed.median_ms:.1f} ms a step, compiled in "
        f"{row.timed.compile_s:.1f} s"
    )


def write(out: Path, cfg: "RunConfig", rows: "Sequence[Row]", *, commit: str) -> None:
    """Write the JSON file with what is known so far."""
    from jaxfound.training.pipeline_record import as_record

    record = as_record(
        cfg,
        rows,
        commit=commit_of(commit),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def print_table(rows: "Sequence[Row]", *, title: str) -> None:
    """Print a line for each layout that was timed, and how its columns are worked out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from jaxfound.training.pipeline_record import EXPLAINED

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEADER:
        left = name in ("layout", "first losses")
        table.add_column(
            name if left else name.replace(" ", "\n"),
            justify="left" if left else "right",
            overflow="fold",
        )
    for row in rows:
        if row.timed is not None:
            table.add_row(*cells(row))
    console = open_console(wraps=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(table)
    for name in ("efficiency", "bound", "expected"):
        open_console().print(f"{name}: {EXPLAINED[name]}", markup=False)


def cells(row: "Row") -> list[str]:
    """Return a timed row as text."""
    from jaxfound.parallelism.explain import bytes_text

    timed = row.timed
    assert timed is not None
    arguments, inside, _ = timed.planned
    shares = (row.efficiency, row.bound, row.expected)
    return [
        row.candidate.name,
        f"{timed.median_ms:.1f}",
        f"{min(timed.rounds_ms):.1f}-{max(timed.rounds_ms):.1f}",
        f"{row.tokens_per_s:,.0f}",
        *("" if share is None else f"{share:.3f}" for share in shares),
        *(bytes_text(n) for each in (arguments, inside) for n in (each.compiled, each.planned)),
        f"{timed.compile_s:.1f}",
        " ".join(f"{loss:.4f}" for loss in timed.losses),
    ]
