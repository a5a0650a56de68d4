"""The console that commands print to: rich on a terminal, plain lines of one width elsewhere."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# What a reader who pipes the output into a file gets.
PLAIN_WIDTH = 100

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file.", metavar="CONFIG")]
RunPath = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/NAME.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Differences, e.g. train.steps=100.", metavar="[KEY=VALUE]..."),
]


def open_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output (or error)."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, soft_wrap=True, width=PLAIN_WIDTH)
    return console
