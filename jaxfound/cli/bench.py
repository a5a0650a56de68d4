"""`jaxfound bench`: measurements, printed and written as JSON."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxfound.cli.bench_kernels import kernels_command, tune_command
from jaxfound.cli.bench_ledger import ledger_command
from jaxfound.cli.bench_pipeline import pipeline_command
from jaxfound.cli.console import open_console

bench_app = typer.Typer(no_args_is_help=True, help="Measure, and write what was measured.")


@bench_app.callback()
def bench() -> None:
    """Measure, and write what was measured."""


bench_app.command("kernels")(kernels_command)
bench_app.command("tune")(tune_command)
bench_app.command("pipeline")(pipeline_command)
bench_app.command("ledger")(ledger_command)


@bench_app.command("train")
def train_command(
    config: Annotated[Path, typer.Option(help="A YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Differences.", metavar="[KEY=VALUE]...")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each in one round.", min=3)] = 40,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are over them.", min=1)] = 7,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Train with CONFIG and print tokens/s and the share of time outside the compiled step.

    Each round times the loop (input, logging, checkpoints) and then the bare step.
    """
    from jaxfound.config.load import load
    from jaxfound.training.measure import measure_training

    cfg = load(config, overrides or ())
    console = open_console()
    found = measure_training(cfg, steps=steps, rounds=rounds)
    alone = ", ".join(f"{1e3 * s:.1f}" for s in found.step_alone_s)
    in_loop = ", ".join(f"{1e3 * s:.1f}" for s in found.step_in_loop_s)
    console.print(f"{found.config} on {found.num_devices} x {found.device}")
    console.print(f"tokens/s: {found.tokens_per_s:,.0f}")
    console.print(f"step in the loop, ms, by round: {in_loop}")
    console.print(f"step alone, ms, by round: {alone}")
    console.print(f"outside the compiled step: {found.outside_share:.2%} (median of {rounds})")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found.as_dict(), indent=1) + "\n", "utf-8")
        console.print(f"written to {out}")
