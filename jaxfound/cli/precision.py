"""`jaxfound precision`: what fp8 costs each layer of a run, and rules that keep the loss."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxfound.cli.console import Overrides, open_console
from jaxfound.cli.evaluate import config_of, write_json

if TYPE_CHECKING:
    from jaxfound.config.precision import PrecisionConfig
    from jaxfound.config.run import RunConfig
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.operand_numbers import OperandNumbers
    from jaxfound.training.precision import PrecisionReport, Trial

FORMAT_VERSION = 1
# Layers that are printed; the JSON has all.
SHOWN = 16


def precision_command(
    model: Annotated[
        Path, typer.Argument(help="A run's folder, or the config of one.", metavar="CONFIG|RUN")
    ],
    data: Annotated[str, typer.Option(help="Held-out text: .txt, .jsonl, a folder, pydocs.")],
    overrides: Overrides = None,
    tokens: Annotated[
        int | None, typer.Option(help="Read whole documents until they hold this many.", min=1)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Longest piece of a document; train.seq_len.", min=2)
    ] = None,
    max_drop: Annotated[
        float, typer.Option(help="Most that the rules may add to the loss, nats a token.", min=0)
    ] = 0.01,
    by: Annotated[
        Literal["layers", "operations"], typer.Option(help="What the rules name.")
    ] = "layers",
    detail: Annotated[
        int, typer.Option(help="Dearest layers that are tried an operation at a time.", min=0)
    ] = 1,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the newest.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="YAML file for the rules.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="JSON file for every number.", metavar="FILE")
    ] = None,
) -> None:
    """Compare fp8 with the compute format on a text, layer by layer, and write precision rules.

    The rules keep the dearest layers in the compute format and the rest in fp8, so that the 95 %
    interval of the rise in loss ends within --max-drop.
    """
    from jaxfound.training.precision import examine

    there, cfg = run_of(model, overrides or [], data=data, seq_len=seq_len)
    found = examine(
        cfg, there, max_drop=max_drop, by=by, detailed=detail, step=step, min_tokens=tokens
    )
    console = open_console()
    show(found, console=console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(yaml_of(found.rules, note=note_of(found, data)), "utf-8")
        console.print(f"rules written to {out}", markup=False)
    if as_json is not None:
        record = {"format_version": FORMAT_VERSION, "model": str(model), "data": data}
        write_json({**record, **asdict(found), "rules": found.rules.model_dump()}, as_json)
        console.print(f"numbers written to {as_json}", markup=False)


def run_of(
    model: Path, overrides: list[str], *, data: str, seq_len: int | None
) -> "tuple[RunDirectory, RunConfig]":
    """Return the folder that has the weights, and the config with another text and length.

    Args:
        model: a run's folder; or a config file, whose own run is meant or, before it has begun, the
            run of its train.init_from.

    Raises:
        CheckpointError: if there is no run.
        ConfigError: if a key is wrong.
    """
    from jaxfound.config.load import load
    from jaxfound.resources.checkpoint import CheckpointError
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.run import run_directory

    if not model.is_file():
        return config_of(model, overrides, data=data, seq_len=seq_len)
    asked = [] if seq_len is None else [f"train.seq_len={seq_len}"]
    cfg = load(model, [*overrides, *asked])
    own, start = run_directory(cfg), cfg.train.init_from
    there = own if own.config.exists() or not start else RunDirectory(Path(start))
    if not there.config.exists():
        raise CheckpointError(
            f"{model} has no weights yet: {there.path} is not a run. What fp8 costs is measured on "
            f"trained weights: `jaxfound train {model}` first, or name a run in train.init_from"
        )
    return there, cfg.model_copy(update={"data": cfg.data.model_copy(update={"source": data})})


def show(found: "PrecisionReport", *, console: Console) -> None:
    """Print the ranking and the rules."""
    everywhere = found.all_fp8.rise
    console.print(
        f"step {found.step}: {found.num_tokens:,} tokens in pieces of at most {found.seq_len:,}, "
        f"on {found.device}\n{found.compute}: {found.loss:.5f} nats a token; "
        f"all layers in fp8: {everywhere.loss_increase:+.2e}, 95 % interval "
        f"{everywhere.low:+.2e} to {everywhere.high:+.2e}",
        markup=False,
    )
    console.print(trial_table(found.layers[:SHOWN], found.operands))
    if len(found.layers) > SHOWN:
        console.print(f"… {len(found.layers) - SHOWN} more layers in the JSON", markup=False)
    console.print(trial_table(found.operations, found.operands))
    if found.products:
        console.print(trial_table(found.products[:SHOWN], found.operands))
    console.print(f"rules for at most {found.max_drop:+g}:", markup=False)
    for rule in found.rules.rules:
        console.print(f"  {rule.pattern}: {rule.format}", markup=False)
    rise = found.rise
    console.print(
        f"with them: {rise.loss_increase:+.2e} nats a token, 95 % interval {rise.low:+.2e} to "
        f"{rise.high:+.2e} (bootstrap over {rise.num_units:,} {rise.unit})",
        markup=False,
    )
    if not any(rule.format == "fp8" for rule in found.rules.rules):
        console.print("no layer can be in fp8 within the bound on this text", markup=False)


def trial_table(trials: "Sequence[Trial]", operands: "Sequence[OperandNumbers]") -> Table:
    """Return trials, and what stands out among the operands that were in fp8."""
    table = Table(box=None, pad_edge=False)
    table.add_column("only in fp8")
    for name in ("nats a token", "95 % interval", "most underflow", "channel / median"):
        table.add_column(name, justify="right")
    for trial in trials:
        own = [n for n in operands if trial.name in names_of(n)]
        underflow = outlier = "not counted"
        if own:
            lost = max(own, key=lambda n: n.underflow)
            widest = max(own, key=lambda n: n.outlier_ratio)
            underflow = f"{lost.underflow:.2%} {place_of(lost)}"
            outlier = f"{widest.outlier_ratio:,.0f} {place_of(widest)}"
        rise = trial.rise
        cells = (
            trial.name,
            f"{rise.loss_increase:+.1e}",
            f"{rise.low:+.1e} to {rise.high:+.1e}",
            underflow,
            outlier,
        )
        table.add_row(*map(Text, cells))
    return table


def names_of(numbers: "OperandNumbers") -> tuple[str, str, str]:
    """Return the names of the trials that an operand is part of."""
    stack, _, operation = numbers.path.partition(".")
    alone = f"{stack}.{numbers.layer}"
    return numbers.path, f"{alone}.*", f"{alone}.{operation}"


def place_of(numbers: "OperandNumbers") -> str:
    """Return which operand of which operation it is, in two words."""
    return f"{numbers.path.split('.')[-1]} {numbers.operand.removeprefix('output ')}"


def note_of(found: "PrecisionReport", data: str) -> str:
    """Return what was measured, a line each."""
    return (
        f"# {found.num_tokens:,} tokens of {data} at step {found.step}, on {found.device}\n"
        f"# {found.compute}: {found.loss:.5f} nats a token; all layers in fp8: "
        f"{found.all_fp8.rise.loss_increase:+.2e}; these rules: {found.rise.loss_increase:+.2e}\n"
    )


def yaml_of(rules: "PrecisionConfig", *, note: str = "") -> str:
    """Return the section `precision` of a config."""
    lines = [f"precision:\n  compute: {rules.compute}\n"]
    if rules.rules:
        lines.append("  rules:\n")
    for rule in rules.rules:
        # Quoted: a pattern may begin with an asterisk.
        lines.append(f"  - {{pattern: {json.dumps(rule.pattern)}, format: {rule.format}}}\n")
    return note + "".join(lines)
