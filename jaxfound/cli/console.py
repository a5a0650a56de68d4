"""The console that commands print to: rich on a terminal, plain lines of one width elsewhere."""

import sys
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


def open_console(*, wraps: bool = False) -> Console:
    """Return a console for standard output; `wraps` folds long lines, as tables want."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(highlight=False, soft_wrap=not wraps, width=width)
