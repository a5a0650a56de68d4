"""`jaxfound schedule`: a pipeline schedule drawn, with its bubble, its memory and its lockstep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.parallelism.pipeline.schedule import Schedule
    from jaxfound.parallelism.pipeline.simulate import Costs, Simulation

PAIR_HELP = "Time of F beside B of another micro-batch; their sum without it."


def schedule_command(
    name: Annotated[
        str | None, typer.Argument(help="Which one; without it, all of them.", metavar="NAME")
    ] = None,
    stages: Annotated[int, typer.Option(help="Ranks: devices along the pipeline axis.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    chunks: Annotated[int, typer.Option(help="Chunks of layers on a rank: interleaved.")] = 2,
    forward: Annotated[float, typer.Option(help="Time of F.")] = 1,
    input_grad: Annotated[float, typer.Option(help="Time of I.")] = 1,
    weight_grad: Annotated[float, typer.Option(help="Time of W; B takes I and W.")] = 1,
    pair: Annotated[float | None, typer.Option(help=PAIR_HELP)] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw into an SVG file too.", metavar="FILE")
    ] = None,
    in_lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Draw ticks, as one program runs them.")
    ] = False,
) -> None:
    """Draw a pipeline schedule over time and count what it waits and keeps; or list them all.

    Exits with 2 when the schedule cannot take these numbers.
    """
    from jaxfound.parallelism.pipeline.builders import make_schedule
    from jaxfound.parallelism.pipeline.simulate import Costs, simulate
    from jaxfound.parallelism.pipeline.ticks import lockstep

    if name is None:
        print_kinds()
        return
    times = {"--forward": forward, "--input-grad": input_grad, "--weight-grad": weight_grad}
    for option, time in (times if pair is None else times | {"--pair": pair}).items():
        if not 0 < time < float("inf"):
            raise typer.BadParameter(f"{option}={time:g}: a pass takes time; give more than 0")
    schedule = make_schedule(
        name, num_ranks=stages, num_microbatches=microbatches, num_chunks=chunks
    )
    costs = Costs(forward, input_grad, weight_grad, pair)
    freely, together = simulate(schedule, costs), lockstep(schedule, costs)
    drawn = together if in_lockstep else freely
    print_schedule(schedule, costs, freely=freely, together=together, drawn=drawn)
    if svg is not None:
        write_svg(svg, schedule, costs, drawn)


def print_kinds() -> None:
    """Print what each schedule does, and which sizes it needs."""
    from jaxfound.parallelism.pipeline.builders import SCHEDULES

    width = max(map(len, SCHEDULES)) + 2
    for name, kind in SCHEDULES.items():
        _print(name.ljust(width) + kind.sentence)
        if kind.needs:
            _print(" " * width + f"needs {kind.needs}")


def print_schedule(
    schedule: "Schedule",
    costs: "Costs",
    *,
    freely: "Simulation",
    together: "Simulation",
    drawn: "Simulation",
) -> None:
    """Print a drawing and the counts of a schedule.

    Args:
        schedule: what it is.
        costs: what its passes take.
        freely: when each rank runs as soon as it can.
        together: when the slowest rank of a tick sets its length.
        drawn: which of the two is drawn.
    """
    from jaxfound.cli.pages.schedule_picture import text_drawing
    from jaxfound.parallelism.pipeline.builders import SCHEDULES
    from jaxfound.parallelism.pipeline.ticks import tick_table

    table = tick_table(schedule)
    _print(f"{schedule.name}: {SCHEDULES[schedule.name].sentence}")
    _print(f"{sizes_text(schedule)}; {costs_text(costs)}")
    _print("")
    for line in text_drawing(schedule, drawn):
        _print(line)
    _print("")
    _print(f"as soon as it can   {_waiting(freely)}")
    _print(f"in lockstep         {_waiting(together)}, {table.num_ticks} ticks")
    _print(f"bubble of a rank    {_ranks([f'{bubble:g}' for bubble in freely.bubbles])}")
    _print(f"in flight, at most  {_ranks([str(peak) for peak in freely.peaks])}")
    _print(
        f"slots in lockstep   {table.num_input_slots} stage inputs, {table.num_grad_slots} "
        f"gradients, {table.num_kept_slots} from I to W"
    )


def write_svg(path: Path, schedule: "Schedule", costs: "Costs", drawn: "Simulation") -> None:
    """Write the drawing to a file and say so."""
    from jaxfound.cli.pages.schedule_picture import svg_drawing

    note = f"{costs_text(costs)}: {_waiting(drawn)}"
    title = f"{schedule.name}, {sizes_text(schedule)}"
    path.write_text(svg_drawing(schedule, drawn, title=title, note=note), encoding="utf-8")
    _print(f"drawn in {path}")


def sizes_text(schedule: "Schedule") -> str:
    """Return ranks, micro-batches, stages and copies in words."""
    parts = [
        f"{schedule.num_ranks} ranks",
        f"{schedule.num_microbatches} micro-batches",
        f"{schedule.num_stages} stages",
    ]
    if schedule.num_copies > 1:
        parts.append(f"{schedule.num_copies} copies of the parameters")
    return ", ".join(parts)


def costs_text(costs: "Costs") -> str:
    """Return what the passes take in words."""
    pair = costs.forward + costs.backward if costs.pair is None else costs.pair
    return (
        f"F {costs.forward:g}, I {costs.input_grad:g}, W {costs.weight_grad:g}, "
        f"B {costs.backward:g}, F beside B {pair:g}"
    )


def _waiting(simulation: "Simulation") -> str:
    return (
        f"{simulation.makespan:g} long, {simulation.bubble_share:.1%} of it bubble, "
        f"efficiency {simulation.efficiency:.3f}"
    )


def _ranks(numbers: list[str]) -> str:
    """Return one number when all ranks have the same."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]} on every rank"
    return f"{' '.join(numbers)} by rank"


def _print(line: str) -> None:
    open_console().print(line, markup=False)
