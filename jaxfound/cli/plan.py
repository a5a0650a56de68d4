"""`jaxfound plan`: what a run would need on a cluster that need not be there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.config.run import RunConfig
    from jaxfound.resources.topology import Topology

FORMAT_VERSION = 1
COMPILE_HELP = "Compile the step for the topology too, which need not be there."
TOPOLOGY_HELP = (
    "[HOSTSx]DEVICES:KIND[:[NICSx]NETWORK], e.g. 3x8:h200:ib400, or a YAML file; this machine."
)
THIS_MACHINE = (
    "Without --topology a plan is for this machine; name the cluster, e.g. "
    "--topology 3x8:h200:ib400"
)


def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    topology: Annotated[str | None, typer.Option(help=TOPOLOGY_HELP, metavar="TEXT")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank every mesh, ZeRO stage, remat, micro-batch.")
    ] = False,
    top: Annotated[int, typer.Option(help="With --search: how many to show of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    compiles: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    html: Annotated[
        Path | None, typer.Option(help="With --compile: write a page.", metavar="FILE")
    ] = None,
) -> None:
    """Check a layout, place it on the links, count its memory and its traffic.

    Exits with 1 when it (with --search: every layout) does not fit the memory of a device, with 2
    when it is not legal.
    """
    from jaxfound.config.load import load
    from jaxfound.parallelism.legal import PlanError

    if html is not None and not compiles:
        raise typer.BadParameter("--html writes what --compile finds; give both")
    if compiles and search:
        raise typer.BadParameter("--compile takes one layout and --search tries all; give one")
    cfg = load(config, overrides or ())
    try:
        if compiles:
            from jaxfound.cli.plan_compile import print_compiled

            print_compiled(cfg, topology, as_json=as_json, html=html)
        elif search:
            print_search(cfg, topology_of(topology), top=top, as_json=as_json)
        else:
            print_plan(cfg, topology_of(topology), as_json=as_json)
    except PlanError as error:
        if topology is not None:
            raise
        raise PlanError(f"{error}. {THIS_MACHINE}") from error


def topology_of(text: str | None) -> "Topology":
    """Return the topology of a text or a file, of this machine without one."""
    from jaxfound.resources.topology import Topology

    return Topology.discover() if text is None else Topology.parse(text)


def print_plan(cfg: "RunConfig", topology: "Topology", *, as_json: bool) -> None:
    """Print a plan; exit with 1 when it does not fit."""
    from jaxfound.face import make_plan

    plan = make_plan(cfg, topology)
    if as_json:
        typer.echo(json.dumps(plan.as_data(), indent=1))
    else:
        open_console().print(plan.explain(), markup=False)
    if plan.ledger.fits is False:
        raise typer.Exit(1)


def print_search(cfg: "RunConfig", topology: "Topology", *, top: int, as_json: bool) -> None:
    """Print the layouts of a config, ranked; exit with 1 when none fits."""
    from jaxfound.models import describe
    from jaxfound.parallelism.search import ranking_lines, search
    from jaxfound.training.optimizer import optimizer_slots

    table = describe(cfg.model)
    slots = optimizer_slots(cfg.optimizer, table)
    found = search(cfg, topology, params=table, slots=slots)
    if as_json:
        record = {"format_version": FORMAT_VERSION, "layouts": [asdict(one) for one in found]}
        typer.echo(json.dumps(record, indent=1))
    else:
        console = open_console()
        console.print(topology.text(), markup=False)
        for line in ranking_lines(found, top=top):
            console.print(line, markup=False)
    if not any(one.outcome == "ranked" for one in found):
        raise typer.Exit(1)
