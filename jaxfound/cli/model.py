"""`jaxfound model`: what a model is and costs, exactly, without allocating it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.config.model import ModelConfig
    from jaxfound.models.summary import Summary


def model_command(
    preset: Annotated[
        str | None, typer.Argument(help="A preset's name or a YAML file.", metavar="PRESET")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of the row the FLOPs are for.")] = 4096,
    params: Annotated[bool, typer.Option("--params", help="List every parameter.")] = False,
) -> None:
    """Print parameters by part, FLOPs and cache bytes of a token; without PRESET, the presets."""
    from jaxfound.config.presets import PRESETS

    console = open_console()
    if preset is None:
        console.print("presets: " + ", ".join(PRESETS))
        return
    from jaxfound.models.build import describe
    from jaxfound.models.summary import summarize

    cfg = model_of(preset)
    summary = summarize(cfg, seq_len=seq_len)
    console.print(table_of(summary))
    console.print(in_short(summary))
    if params:
        table = Table("path", "shape", "dims", "kind", box=None, pad_edge=False)
        for spec in describe(cfg):
            dims = " ".join(d or "·" for d in spec.dims)
            table.add_row(spec.path, str(spec.shape), dims, spec.kind)
        console.print(table)


def model_of(preset: str) -> "ModelConfig":
    """Return the model of a preset's name or of a config file.

    Raises:
        ConfigError: if it is neither.
    """
    from jaxfound.config.load import load
    from jaxfound.config.model import ModelConfig
    from jaxfound.config.presets import PRESETS
    from jaxfound.config.schema import ConfigError

    if preset in PRESETS:
        return ModelConfig.model_validate_json(json.dumps(PRESETS[preset]))
    if not Path(preset).exists():
        raise ConfigError(
            f"{preset!r} is neither a preset nor a file. Presets: {', '.join(PRESETS)}"
        )
    return load(Path(preset)).model


def in_short(summary: "Summary") -> str:
    """Return the counts to a hundredth of a million or billion, as publications give them."""
    line = f"in short: {_rounded(summary.total)}"
    if summary.active != summary.total:
        line += f", of which a token uses {_rounded(summary.active)}"
    ahead = f"; multi-token prediction {_rounded(summary.ahead)} apart" if summary.ahead else ""
    return line + ahead


def _rounded(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 10**9 else f"{count / 1e6:,.2f} M"


def table_of(summary: "Summary") -> Table:
    """Return the costs as a table."""
    table = Table("", "parameters", "a token uses", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in summary.parts:
        table.add_row(part.name, f"{part.total:,}", f"{part.active:,}")
    table.add_section()
    table.add_row("main model", f"{summary.total:,}", f"{summary.active:,}", style="bold")
    if summary.padding:
        table.add_row("vocabulary padding", f"{summary.padding:,}", "0")
    if summary.buffers:
        table.add_row("buffers (router biases)", f"{summary.buffers:,}", "")
    table.add_section()
    length = f"row of {summary.seq_len:,}"
    table.add_row(f"forward FLOPs a token, causal, {length}", "", f"{summary.flops_causal:,}")
    table.add_row(f"forward FLOPs a token, full, {length}", "", f"{summary.flops_full:,}")
    table.add_row(
        "training FLOPs a token = 3 x forward, causal", "", f"{3 * summary.flops_causal:,}"
    )
    table.add_row("cache bytes a token, bfloat16", "", f"{summary.cache_bytes:,}")
    return table
