"""`jaxfound goodput`: where the wall clock of a run went."""

import json
from typing import Annotated

import typer
from rich.table import Table

from jaxfound.cli.console import RunPath, open_console


def goodput_command(
    run: RunPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print what the seconds of RUN went into over all its attempts; they sum to the wall clock."""
    from jaxfound.resources.metrics import read_metrics
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.goodput import account

    path = RunDirectory(run).goodput
    if not path.exists():
        raise typer.BadParameter(f"{run} has no {path.name}: it is not a run's folder, or older")
    try:
        found = account(read_metrics(path))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    table = Table("activity", "seconds", "share", box=None, pad_edge=False)
    rows = {**found.seconds, "not accounted for": found.unexplained_s, "wall clock": found.wall_s}
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:,.2f}", f"{seconds / (found.wall_s or 1):.1%}")
    console = open_console(wraps=True)
    console.print(table)
    console.print(
        f"goodput {found.share:.1%}: {found.steps} steps stayed, {found.lost_steps} were done "
        f"again, in {found.attempts} attempts"
    )
