"""`jaxfound probe`: latency and bandwidth between devices, and of each collective over all."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.communication.probe import Measured
    from jaxfound.resources.control import ControlPlane
    from jaxfound.resources.preflight import Check

FORMAT_VERSION = 1
NETWORK_HELP = "Link between hosts to compare with, e.g. ib400."
OUT_HELP = "Write a topology with the measured links, for plan --topology."


def probe_command(
    network: Annotated[str, typer.Option(help=NETWORK_HELP, metavar="NAME")] = "",
    min_share: Annotated[
        float, typer.Option(help="Share of a link's bandwidth that must come through.", min=0)
    ] = 0.6,
    rounds: Annotated[int, typer.Option(help="Calls of which the median is taken.", min=1)] = 5,
    max_mib: Annotated[float, typer.Option(help="Largest message, MiB; 0 = by platform.")] = 0,
    virtual: Annotated[int, typer.Option(help="Split the CPU into so many devices.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP, metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Measure what goes between devices, and compare it with the links on record.

    `jaxfound launch … -- probe` measures over all hosts of a job; the first process prints. Exits
    with 1 when a pair or a collective is below --min-share of its link.
    """
    from dataclasses import replace

    from jaxfound.communication.probe import measure
    from jaxfound.communication.probe_verdict import judge
    from jaxfound.resources.links import NETWORKS
    from jaxfound.resources.topology import Topology, all_devices

    if network and network not in NETWORKS:
        raise typer.BadParameter(f"no network is called {network!r}: {', '.join(NETWORKS)}")
    plane = meet_others(virtual)
    devices = all_devices()
    topology = replace(Topology.of(devices), network=NETWORKS.get(network))
    try:
        found = measure(topology, devices=devices, sizes=sizes_to(max_mib), rounds=rounds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    checks = judge(found, min_share=min_share)
    if plane.is_first:
        if out is not None:
            write_topology(found, out)
        if as_json:
            typer.echo(json.dumps(as_data(found, checks), indent=1))
        else:
            print_probe(found, checks)
    # Each has its own clock: the first one's figures are those that count.
    verdict = plane.broadcast("probe", "" if all(one.ok for one in checks) else "slow")
    if plane.count > 1:
        from jaxfound.resources.launch.join import leave

        leave()
    if verdict:
        raise typer.Exit(1)


def meet_others(virtual: int) -> "ControlPlane":
    """Join the job that an agent started this process for, or split the CPU of this one.

    Args:
        virtual: CPU devices to make where there is no job; 0 = the devices that are there.
    """
    from jaxfound.cli.train import join_job
    from jaxfound.resources.control import ControlPlane
    from jaxfound.resources.platform import use_virtual_cpus
    from jaxfound.training.job import meet

    place = join_job()
    if place is not None and virtual:
        raise typer.BadParameter(
            f"--virtual {virtual} is for one process alone. In a job give `jaxfound launch` "
            f"--devices-per-host {virtual}"
        )
    if virtual:
        use_virtual_cpus(virtual, alone=True)
    plane = ControlPlane.of_job()
    meet(plane)
    return plane


def sizes_to(max_mib: float) -> tuple[int, ...] | None:
    """Return sizes in bytes, 16 times larger each, up to so many MiB; None when it is 0."""
    if not max_mib:
        return None
    largest = int(max_mib * 2**20)
    return tuple(sorted({max(1024, largest // 16**k) for k in range(4)}))


def write_topology(found: "Measured", path: Path) -> None:
    """Write the topology file with the measured links."""
    from jaxfound.communication.probe_verdict import as_topology

    lines = []
    for key, value in as_topology(found).items():
        # JSON's words for text and numbers are YAML's as well.
        text = json.dumps(value) if not isinstance(value, dict) else _flow(value)
        lines.append(f"{key}: {text}\n")
    path.write_text("".join(lines), encoding="utf-8")


def _flow(values: dict) -> str:
    return "".join(f"\n  {key}: {json.dumps(value)}" for key, value in values.items())


def as_data(found: "Measured", checks: "tuple[Check, ...]") -> dict[str, object]:
    """Return everything as JSON data."""
    return {
        "format_version": FORMAT_VERSION,
        "devices": found.topology.text(),
        "pairs": [asdict(pair) for pair in found.pairs],
        "collectives": [{**asdict(one), "share": one.share} for one in found.sweep],
        "across_bps": found.across_bps,
        "checks": [one._asdict() for one in checks],
    }


def print_probe(found: "Measured", checks: "tuple[Check, ...]") -> None:
    """Print the matrix of pairs, the collectives and the verdicts."""
    console = open_console(wraps=True)
    console.print(found.topology.text(), markup=False)
    console.print("\nGB/s each way (microseconds of a tiny message) between two devices")
    console.print(matrix(found), markup=False)
    console.print("\ncollectives over all; bus bandwidth is that of each device's link")
    table = Table(box=None, pad_edge=False)
    for title in ("collective", "KiB", "us", "bus GB/s", "of promised"):
        table.add_column(title, justify="left" if title == "collective" else "right")
    for one in found.sweep:
        share = "?" if one.share is None else f"{one.share:.0%}"
        row = (one.num_bytes / 1024, one.seconds * 1e6, one.bus_bps / 1e9)
        table.add_row(one.collective, *(f"{value:,.4g}" for value in row), share)
    console.print(table)
    for one in checks:
        console.print(f"{one.verdict.upper()} {one.text()}", markup=False)


def matrix(found: "Measured") -> Table:
    """Return the pairs as a table of devices by devices."""
    there = {(pair.first, pair.second): pair for pair in found.pairs}
    n = found.topology.num_devices
    table = Table("", *map(str, range(n)), box=None, pad_edge=False)
    for i in range(n):
        cells = [there.get((min(i, j), max(i, j))) for j in range(n)]
        words = [f"{c.bps / 1e9:.3g} ({c.latency_s * 1e6:.3g})" if c else "-" for c in cells]
        table.add_row(str(i), *words)
    return table
