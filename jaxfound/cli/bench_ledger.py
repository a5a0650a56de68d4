"""`jaxfound bench ledger`: the plan's memory beside XLA's, layout by layout."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, TABLE_WIDTH, commit_of
from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.training.ledger_record import LedgerRow

HEADER = ("layout", "devices", "plan GB", "XLA GB", "plan is off by", "cuDNN's besides, GB")
CASES_HELP = "Names with semicolons between; all without it."
RECORDED_HELP = "A record whose compiler's bytes are taken; nothing is compiled."


def ledger_command(
    cases: Annotated[str, typer.Option(help=CASES_HELP, metavar="A;B;...")] = "",
    recorded: Annotated[Path | None, typer.Option(help=RECORDED_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, written after every layout.")] = None,
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
) -> None:
    """Compile layouts for GPUs that are not here and compare their memory with the plan's.

    Needs the extra `aot`. Rows of --out that are not asked for stay as they are. Exits with 1 when
    a plan is off by more than it may be.
    """
    from jaxfound.training.ledger_record import CASES, compiled_in, rows_of

    before = None if recorded is None else json.loads(recorded.read_text("utf-8"))
    known = None if before is None else compiled_in(before)
    jaxlib = version("jaxlib") if before is None else str(before["jaxlib"])
    names = [name.strip() for name in cases.split(";") if name.strip()] or [*(known or CASES)]
    others = [] if out is None else rows_besides(names, out, jaxlib=jaxlib)
    rows: list[LedgerRow] = []
    for row in rows_of(names, recorded=known):
        rows.append(row)
        open_console().print(f"{row.name}: plan {row.error:+.1%}", markup=False)
        if out is not None:
            write(out, rows, others, commit=commit, jaxlib=jaxlib)
    print_table(rows)
    if out is not None:
        open_console().print(f"written to {out}", markup=False)
    if not all(row.is_right for row in rows):
        raise typer.Exit(1)


def rows_besides(names: Sequence[str], out: Path, *, jaxlib: str) -> list[dict[str, Any]]:
    """Return the rows of a file that are not to be made anew, each with the commit it is of.

    Raises:
        typer.BadParameter: another compiler made them: side by side they would compare nothing.
    """
    if not out.exists():
        return []
    record = json.loads(out.read_text("utf-8"))
    others = [row for row in record["rows"] if row["name"] not in names]
    if others and record["jaxlib"] != jaxlib:
        raise typer.BadParameter(
            f"{out} has {len(others)} more rows, of jaxlib {record['jaxlib']}, and these are of "
            f"{jaxlib}. Make all of them without --cases, or name another file",
            param_hint="--out",
        )
    return [{"commit": record["commit"], **row} for row in others]


def write(
    out: Path,
    rows: "Sequence[LedgerRow]",
    others: Sequence[dict[str, Any]],
    *,
    commit: str,
    jaxlib: str,
) -> None:
    """Write the JSON file with what is known so far, rows in the order of the table of cases."""
    from jaxfound.training.ledger_record import CASES, as_record

    made = {"commit": commit_of(commit), "jaxlib": jaxlib}
    record = as_record(rows, date=datetime.now(UTC).isoformat(timespec="seconds"), **made)
    order = {name: number for number, name in enumerate(CASES)}
    both = [*others, *({"commit": made["commit"], **row} for row in record["rows"])]
    record["rows"] = sorted(both, key=lambda row: order.get(row["name"], len(order)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def print_table(rows: "Sequence[LedgerRow]") -> None:
    """Print a line for each layout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEADER:
        left = name in ("layout", "devices")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    console = open_console(wraps=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(table)


def cells(row: "LedgerRow") -> list[str]:
    """Return a row as text."""
    return [
        row.name,
        row.case.topology,
        f"{row.planned / 1e9:.2f}",
        f"{row.compiled.total / 1e9:.2f}",
        f"{row.error:+.1%}" + ("" if row.is_right else " wrong"),
        f"{row.workspace / 1e9:.2f}",
    ]
