"""`jaxfound plan --compile`: the real step, compiled for a cluster that need not be there."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from jaxfound.cli.console import open_console
from jaxfound.cli.pages.plan_page import plan_page
from jaxfound.config.run import RunConfig
from jaxfound.face import make_plan
from jaxfound.parallelism import ParallelPlan
from jaxfound.parallelism.explain import bytes_text, seconds_text
from jaxfound.resources.topology import Topology
from jaxfound.training.aot import compile_step, target_here, target_of
from jaxfound.training.compiled_step import CompiledStep, Traffic

# Lines of source code whose buffers are told on a terminal; a page tells all.
NUM_BUFFERS = 6


def print_compiled(
    cfg: RunConfig, topology: str | None, *, as_json: bool, html: Path | None
) -> None:
    """Compile a run's step and print the plan and what came of it; exit with 1 if it does not fit.

    Where the compiler's bytes are not those of the device, the plan's verdict is what counts.

    Args:
        cfg: the run.
        topology: what to compile for; None = the devices of this machine.
        as_json: print JSON instead of text.
        html: a page to write as well.
    """
    plan, step = compiled(cfg, topology)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(plan_page(cfg.name, plan, step), encoding="utf-8")
    if as_json:
        record = {**plan.as_data(), "compiled": step.as_data()}
        typer.echo(json.dumps(record, indent=1))
    else:
        console = open_console()
        console.print(plan.explain(), markup=False)
        for line in lines_of(step):
            console.print(line, markup=False)
        if html is not None:
            console.print(f"wrote {html}", markup=False)
    if (plan.ledger.fits if step.fits is None else step.fits) is False:
        raise typer.Exit(1)


def compiled(cfg: RunConfig, topology: str | None) -> tuple[ParallelPlan, CompiledStep]:
    """Return the plan of a run on a topology, and its step as it was compiled for that."""
    there = None if topology is None else Topology.parse(topology)
    # Before anything that may start a backend: virtual devices are made when it starts.
    target = target_here() if there is None else target_of(there)
    plan = make_plan(cfg, there)
    return plan, compile_step(cfg, plan, target=target)


def lines_of(step: CompiledStep) -> Iterator[str]:
    """Yield what the compiler made of a step, a line each."""
    yield ""
    took = step.took
    yield (
        f"compiled for {step.target}: traced in {seconds_text(took.trace_s)}, lowered in "
        f"{seconds_text(took.lower_s)}, compiled in {seconds_text(took.compile_s)}; "
        f"{seconds_text(took.cpu_s)} of CPU time"
    )
    if step.stand_in:
        yield step.stand_in
    yield "memory of one device, by the plan and by the compiler:"
    yield from memory_lines(step)
    yield "most of what lives inside the step, by the line that makes it:"
    for buffer in step.buffers[:NUM_BUFFERS]:
        arrays = "1 array" if buffer.count == 1 else f"{buffer.count} arrays"
        largest = buffer.type.partition("{")[0]
        yield f"  {bytes_text(buffer.num_bytes):>9}  {buffer.source}, {arrays}, largest {largest}"
    yield from traffic_lines(step)
    yield from step.notes
    yield verdict_text(step)


def memory_lines(step: CompiledStep) -> Iterator[str]:
    """Yield the plan's bytes beside the compiler's."""
    width = max(len(f"{n:,}") for row in step.planned for n in (row.planned, row.compiled))
    named = max(len(row.what) for row in step.planned)
    for row in step.planned:
        yield (
            f"  {row.what:<{named}}  {row.planned:>{width},} B  {row.compiled:>{width},} B  "
            f"{deviation_text(row.deviation, exact=row.planned == row.compiled)}"
        )
    if step.workspace_bytes and not step.stand_in:
        yield (
            f"  on the devices {bytes_text(step.workspace_bytes)} more, by the plan: the workspace "
            "of cuDNN, which no compiler asks for that has no device"
        )


def deviation_text(deviation: float, *, exact: bool) -> str:
    """Return by how much the plan is off."""
    return "exact" if exact else f"plan {deviation:+.1%}"


def traffic_lines(step: CompiledStep) -> Iterator[str]:
    """Yield what a device sends in a step and how much of it is covered, by axes and kind."""
    rows = step.traffic
    if not rows:
        yield "no collective leaves a device"
        return
    yield "collectives of one device in a step:"
    cells = [traffic_cells(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        padded = (cell.ljust(n) for cell, n in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()
    if step.work_s is not None and step.waited_s is not None:
        yield (
            f"at the published peaks: {seconds_text(step.work_s)} of work, "
            f"{seconds_text(step.waited_s)} waiting for collectives with nothing beside them"
        )


def traffic_cells(row: Traffic) -> Sequence[str]:
    """Return a row of traffic as text."""
    calls = "1 call" if row.calls == 1 else f"{row.calls:,} calls"
    cells = [
        " x ".join(row.axes),
        row.collective,
        row.link,
        f"{calls} at {row.places} {'place' if row.places == 1 else 'places'}",
        f"{row.in_background} in background",
        bytes_text(row.num_bytes),
    ]
    if row.seconds is None or row.covered is None:
        return cells
    return [*cells, seconds_text(row.seconds), f"{row.covered:.0%} covered"]


def verdict_text(step: CompiledStep) -> str:
    """Return whether the step fits by the compiler's bytes, and by how much."""
    if step.stand_in:
        return "verdict of the compiler: none, for these bytes are another's; the plan's stands"
    if step.fits is None:
        return "verdict of the compiler: not known, because the memory of a device is not"
    spare = f"beside the {bytes_text(step.margin_bytes)} that the plan leaves free"
    if step.workspace_bytes:
        spare += f" and cuDNN's {bytes_text(step.workspace_bytes)}"
    if step.fits:
        return f"verdict of the compiler: fits, {bytes_text(step.spare_bytes)} to spare {spare}"
    return (
        f"verdict of the compiler: does not fit, {bytes_text(-step.spare_bytes)} too much {spare}"
    )
