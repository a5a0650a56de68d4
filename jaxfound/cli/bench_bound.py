"""`jaxfound bench bound`: a measured step in fp8 beside what its kernels alone would take."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.training.fp8_bound import Bound

TRAIN_HELP = "What `bench train` wrote; the bound joins the row of this run's name."
KERNELS_HELP = "What `bench kernels` wrote, of fp8_training, fp8_wgrad and quantize."
LEAST_HELP = "Exit with 1 if the bound is less than this share of the step."


def bound_command(
    config: ConfigPath,
    train: Annotated[Path, typer.Option(help=TRAIN_HELP, exists=True)],
    base: Annotated[str, typer.Option(help="Name of the row in bfloat16.")],
    kernels: Annotated[Path, typer.Option(help=KERNELS_HELP, exists=True)],
    overrides: Overrides = None,
    least: Annotated[float, typer.Option(help=LEAST_HELP, min=0, max=1)] = 0.0,
) -> None:
    """Set the step of CONFIG, all layers in fp8, beside a bound made of measurements.

    The bound is the bfloat16 step without its layers' products, and in their place products in 8
    bits and the rounding of their operands, each timed alone; rounding that was not timed counts
    as a copy of its bytes. Nothing is run.
    """
    from jaxfound.config.load import load
    from jaxfound.training.fp8_bound import bound_of, share_of

    cfg, record = load(config, overrides or ()), json.loads(train.read_text("utf-8"))
    missing = [name for name in (cfg.name, base) if name not in record["rows"]]
    if missing:
        raise typer.BadParameter(f"{train} has no row {missing}; it has {[*record['rows']]}")
    row = record["rows"][cfg.name]
    found = bound_of(cfg, record["rows"][base], json.loads(kernels.read_text("utf-8")))
    share = share_of(found, row)
    step_s = row["ours"]["step_s"]["median"]
    for line in lines(found, step_s=step_s, share=share):
        open_console().print(line, markup=False)
    row["bound"] = {**found._asdict(), "step_s": found.step_s, "share": share, "base": base}
    train.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    open_console().print(f"written to {train}", markup=False)
    if share < least:
        raise typer.Exit(1)


def lines(found: "Bound", *, step_s: float, share: float) -> list[str]:
    """Return the bound and its parts as a reader sees them."""
    parts = {
        "what bfloat16 has besides its layers' products": found.rest,
        "products in 8 bits": found.products,
        "rounding": found.rounding,
        "the bound": found.step_s,
        "the step": step_s,
    }
    width = max(map(len, parts))
    table = [f"{name:{width}}  {1e3 * seconds:8.1f} ms" for name, seconds in parts.items()]
    counted = [f"  counted as a copy of its bytes: {', '.join(found.by_bytes)}"]
    return [
        *table,
        f"{'bound / step':{width}}  {share:8.1%}",
        *(counted if found.by_bytes else []),
    ]
