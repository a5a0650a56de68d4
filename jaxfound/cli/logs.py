"""`jaxfound logs`: what all processes of a run said, as one."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.resources.collect import LogLine

logs_app = typer.Typer(no_args_is_help=True, help="Read what the processes of a run said.")
# What a line shows before the fields.
SHOWN = ("time_s", "level", "logger", "event")
RUNS_HELP = "A run's folder, or one from each host where they share no disk."


@logs_app.command("collect")
def collect_command(
    runs: Annotated[list[Path], typer.Argument(help=RUNS_HELP, metavar="RUN...")],
    since: Annotated[
        str, typer.Option(help="90s, 10m, 2h, 1d ago, or Unix seconds.", metavar="TIME")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Print the logs of all processes of RUN in the order of process 0's clock."""
    from jaxfound.resources import collect

    try:
        since_s = collect.since(since, now_s=time.time()) if since else 0.0
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = collect.collect(runs, since_s=since_s)
    if not any(collect.files(runs)):
        raise typer.BadParameter(
            f"no logs/attempt-K/process-I.jsonl in {', '.join(map(str, runs))}: not a run's "
            "folder, or its logs are on another host's disk"
        )
    console = open_console()
    for line in found.lines:
        console.print(as_text(line, as_json=as_json), markup=False)
    for path, count in found.torn.items():
        typer.echo(f"{path}: {count} torn lines left out", err=True)


def as_text(line: "LogLine", *, as_json: bool) -> str:
    """Return a record as one line, for people or as JSON."""
    if as_json:
        place = {"at_s": line.at_s, "attempt": line.attempt, "process": line.process}
        return json.dumps({**place, **line.record}, ensure_ascii=False)
    at = datetime.fromtimestamp(line.at_s, UTC).strftime("%H:%M:%S.%f")[:-3]
    fields = " ".join(f"{k}={v}" for k, v in line.record.items() if k not in SHOWN)
    record = line.record
    words = (at, f"{line.attempt}/{line.process}", record.get("level"), record.get("event"), fields)
    return " ".join(str(word) for word in words if word).rstrip()
