"""`jaxfound config`: every key there is, or the config that a file and overrides come to."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config import Row

WIDTHS = {"key": 33, "takes": 21, "default": 9, "unit": 6}


def config_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="A YAML file; without one, every key is listed.", metavar="[CONFIG]"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Differences, e.g. train.steps=100", metavar="[KEY=VALUE]..."),
    ] = None,
) -> None:
    """List every config key, or print what CONFIG comes to and where each value is from."""
    from jaxfound.config import rows, to_yaml, trace

    if config is None:
        print_keys(rows(), console=open_console(wraps=True))
        return
    loaded = trace(config, overrides or ())
    typer.echo(to_yaml(loaded.config, notes=loaded.sources), nl=False)


def print_keys(found: "Sequence[Row]", *, console: Console) -> None:
    """Print a table of keys, with colour and lines on a terminal, plain elsewhere."""
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading, width in WIDTHS.items():
        table.add_column(heading, width=width, overflow="fold")
    table.add_column("meaning")
    for row in found:
        cells = (row.key, row.takes, row.default, row.unit, row.meaning)
        # Text, so that the brackets of a pattern are not read as markup.
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
