"""`jaxfound replay`: a step of a run once more, to find where its numbers go wrong."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxfound.cli.console import RunPath, open_console

if TYPE_CHECKING:
    from jaxfound.training.replay import Replay

SHOWN = 5


def replay_command(
    run: RunPath,
    step: Annotated[int, typer.Option(help="Which step, from 1, as records count.")],
    precision: Annotated[
        Literal["float32", "same"], typer.Option(help="Of the run beside it.")
    ] = "float32",
    device: Annotated[
        str, typer.Option(help="Platform of the run beside it, e.g. cpu; the same.")
    ] = "",
    bound: Annotated[
        float, typer.Option(help="Relative difference that is told; 0 = 32 units in the last place")
    ] = 0.0,
    max_steps: Annotated[
        int, typer.Option(help="Steps that may be run again to come to it.", min=0)
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run step STEP of RUN again, an operation at a time, as it was and in float32 beside it.

    Names the first operation that makes a NaN or an infinity, and the first that differs by more
    than the bound. Takes one device, whatever the layout was. Exits with 1 when the step's
    gradients are not finite, or when an operation differs.
    """
    from jaxfound.config.load import load
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.resources.topology import first_device
    from jaxfound.training.op_by_op import Versus
    from jaxfound.training.replay import replay

    there = RunDirectory(run)
    if not there.config.exists():
        raise typer.BadParameter(f"{run} has no {there.config.name}: it is not a run's folder")
    try:
        other = first_device(device) if device else None
    except RuntimeError as error:
        raise typer.BadParameter(f"--device {device}: {error}") from error
    versus = Versus(in_float32=precision == "float32", device=other)
    cfg = load(there.config)
    found = replay(cfg, there, step=step, versus=versus, bound=bound or None, max_steps=max_steps)
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=1))
    else:
        print_replay(found)
    if found.bad_results or found.trace.first_difference:
        raise typer.Exit(1)


def as_data(found: "Replay") -> dict[str, object]:
    """Return what was found as JSON data."""
    data = asdict(found)
    trace = data.pop("trace")
    ops = {k: v if v is None else v._asdict() for k, v in trace.items() if k.startswith("first")}
    return {
        **{"format_version": 1, **data},
        **{"num_ops": trace["num_ops"], "bound": trace["bound"], **ops},
    }


def print_replay(found: "Replay") -> None:
    """Print what was found, the most telling first."""
    trace, say = found.trace, open_console().print
    say(
        f"step {found.step} from step {found.from_step}, batch of {found.batch}: loss "
        f"{found.loss:.6g}, beside it {found.other_loss:.6g}; {trace.num_ops} operations",
        markup=False,
    )
    rows = (
        ("first operation that makes a NaN or an infinity", trace.first_bad),
        ("first beside it that does", trace.first_bad_other),
        (f"first operation that differs by more than {trace.bound:.3g}", trace.first_difference),
    )
    for title, op in rows:
        told = "none" if op is None else f"{op.text()}; difference {op.difference:.3g}"
        say(f"{title}: {told}", markup=False)
    names = (
        ("not finite before the step", found.bad_inputs),
        ("not finite after it", found.bad_results),
        ("not finite beside it", found.other_bad_results),
    )
    for title, bad in names:
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        say(f"{title}: {', '.join(bad[:SHOWN]) or 'nothing'}{more}", markup=False)
