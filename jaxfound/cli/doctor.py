"""`jaxfound doctor`: what is wrong with these hosts, before a job finds out."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jaxfound.cli.console import Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.resources.preflight.doctor import Report

MARKS = {"ok": "ok", "skip": "skip", "warn": "WARN", "fail": "FAIL"}
# Set by `jaxfound launch` for each process.
ADDRESS, COUNT, PROCESS = "JAXFOUND_COORDINATOR", "JAXFOUND_NUM_PROCESSES", "JAXFOUND_PROCESS"


def doctor_command(
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file that must be the same on all hosts.")
    ] = None,
    nnodes: Annotated[
        int, typer.Option(help="Hosts that run the doctor.", envvar=COUNT, min=1)
    ] = 1,
    node_rank: Annotated[int, typer.Option(help="This one, from 0.", envvar=PROCESS, min=0)] = 0,
    coordinator: Annotated[
        str, typer.Option(help="Host 0 and a free port of it.", envvar=ADDRESS, metavar="HOST:PORT")
    ] = "",
    hosts: Annotated[
        str, typer.Option(help="Names to look up the way to, with commas.", metavar="A,B,...")
    ] = "",
    local_dir: Annotated[Path, typer.Option(help="Must be on the host's own disk.")] = Path("runs"),
    shared_dir: Annotated[
        Path | None, typer.Option(help="Must be one folder for all hosts.")
    ] = None,
    limit_s: Annotated[float, typer.Option(help="Longest wait for other hosts.", min=0.1)] = 60,
    min_gbps: Annotated[float, typer.Option(help="Least Gb/s of a stream between hosts.")] = 1.0,
    write_mib: Annotated[int, typer.Option(help="Written to the shared folder.", min=1)] = 64,
    burn_in_s: Annotated[float, typer.Option(help="Seconds of arithmetic on devices.")] = 2.0,
    devices: Annotated[
        bool, typer.Option("--devices/--no-devices", help="Whether devices are started.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look for what will go wrong: software, network, clocks, disks, limits, GPUs, arithmetic.

    Start it on every host with its own --node-rank, or under `jaxfound launch`; alone, it looks at
    this host. Host 0 prints what was found on all. Exits with 1 when a check failed.
    """
    from jaxfound.resources.preflight.doctor import Asked, examine
    from jaxfound.resources.preflight.network import GIGABIT

    check_place(nnodes, node_rank, coordinator=coordinator)
    # The devices are only tried: most of their memory is left to whoever else is there.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    asked = Asked(
        process=node_rank if nnodes > 1 else 0,
        count=nnodes,
        coordinator=coordinator,
        hosts=tuple(name.strip() for name in hosts.split(",") if name.strip()),
        local_dir=local_dir,
        shared_dir=shared_dir,
        config=config_hash(config, overrides),
        limit_s=limit_s,
        min_bps=min_gbps * GIGABIT,
        write_bytes=write_mib * 2**20,
        burn_in_s=burn_in_s if devices else None,
    )
    report = examine(asked)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        print_report(report)
    if report.verdict == "fail":
        raise typer.Exit(1)


def check_place(nnodes: int, node_rank: int, *, coordinator: str) -> None:
    """Refuse a place among hosts that cannot be.

    Raises:
        typer.BadParameter: says which.
    """
    if nnodes > 1 and (":" not in coordinator or node_rank >= nnodes):
        raise typer.BadParameter(
            f"--nnodes {nnodes} needs --coordinator HOST:PORT and a --node-rank below {nnodes}; "
            f"here are {coordinator!r} and {node_rank}"
        )


def config_hash(config: Path | None, overrides: list[str] | None) -> str:
    """Return a hash of the effective config; empty without one."""
    import hashlib

    from jaxfound.config.load import load

    if config is None:
        return ""
    text = load(config, overrides or ()).model_dump_json()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def print_report(report: "Report") -> None:
    """Print a line for each verdict, and what to do about those that are not well.

    Other hosts than the first print only what the first cannot say for them.
    """
    console = open_console(wraps=True)
    silent = any(one.name == "peers" and one.verdict != "skip" for one in report.checks)
    if report.process and silent:
        console.print(f"process {report.process}: {report.verdict}; process 0 prints the rest")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("verdict", "check", "value", "must be"):
        table.add_column(title, overflow="fold")
    for one in report.checks:
        name = f"{one.name}\n{one.where}" if one.where else one.name
        table.add_row(MARKS[one.verdict], name, one.value, one.threshold)
    console.print(table, markup=False)
    for one in report.checks:
        if one.verdict in ("warn", "fail"):
            at = f" ({one.where})" if one.where else ""
            console.print(f"{MARKS[one.verdict]} {one.name}{at}: {one.remedy}", markup=False)
    counts = {mark: sum(one.verdict == mark for one in report.checks) for mark in MARKS}
    console.print(", ".join(f"{n} {mark}" for mark, n in counts.items()))
