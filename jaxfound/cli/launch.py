"""`jaxfound launch`: start the processes of a run on this host, watch them, restart them."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from jaxfound.cli.console import ConfigPath, Overrides, open_console
from jaxfound.resources.launch.exits import meaning_of

if TYPE_CHECKING:
    from jaxfound.resources.launch.agent import Told
    from jaxfound.resources.launch.hosts import Asked
    from jaxfound.resources.launch.scripts import Request

# Every flag after `train` is train's own.
THEIRS = {"allow_extra_args": True, "ignore_unknown_options": True}

launch_app = typer.Typer(
    no_args_is_help=True,
    help="Start the processes of a run on this host, watch them, restart them.",
)


@dataclass(frozen=True)
class Options:
    """What was said before the command."""

    asked: "Asked"
    max_restarts: int
    grace_s: float
    own_disk: Path | None


@launch_app.callback()
def launch_options(
    context: typer.Context,
    nnodes: Annotated[int, typer.Option(help="Hosts; 0 = as the engine says, or 1.")] = 0,
    node_rank: Annotated[int, typer.Option(help="This host, from 0; -1 = as the engine says.")] = (
        -1
    ),
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of host 0.")] = "",
    nproc_per_node: Annotated[
        str, typer.Option(help="Processes a host; `gpus` = one for each GPU.")
    ] = "1",
    max_restarts: Annotated[
        int, typer.Option(help="Restarts in a row that may commit no new step.", min=0)
    ] = 3,
    grace: Annotated[float, typer.Option(help="Seconds that a process has to save and leave.")] = (
        120.0
    ),
    simulate_hosts: Annotated[int, typer.Option(help="Act so many hosts on this machine.")] = 0,
    devices_per_host: Annotated[int, typer.Option(help="CPU devices of a simulated host.")] = 1,
    own_disk: Annotated[
        Path | None, typer.Option(help="A path that is another disk on each host; needs root.")
    ] = None,
) -> None:
    """Start the processes of a run on this host, watch them, and restart all when one is lost.

    For instance `jaxfound launch --nnodes 3 --node-rank 0 --coordinator node01:29500 -- train
    CONFIG` on the first of three hosts. Under SLURM, in a JobSet, under mpirun and torchrun the
    first three are found.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.resources.launch.hosts import Asked

    if nproc_per_node != "gpus" and not (nproc_per_node.isdecimal() and int(nproc_per_node)):
        raise ConfigError(f"--nproc-per-node {nproc_per_node} is not a number from 1 up, or `gpus`")
    per_node = 0 if nproc_per_node == "gpus" else int(nproc_per_node)
    asked = Asked(nnodes, node_rank, coordinator, per_node, simulate_hosts, devices_per_host)
    context.obj = Options(asked, max_restarts, grace, own_disk)


@launch_app.command("train", context_settings=THEIRS)
def launch_train_command(
    context: typer.Context,
    config: ConfigPath,
) -> None:
    """Run `jaxfound train CONFIG …` in every process."""
    from jaxfound.config.load import load
    from jaxfound.resources.launch.agent import Agent
    from jaxfound.resources.launch.detect import detect
    from jaxfound.resources.launch.hosts import places_of
    from jaxfound.resources.platform import num_accelerators
    from jaxfound.resources.run_directory import RunDirectory

    options: Options = context.obj
    # Read here too: what is refused, is refused before anything is started.
    cfg = load(config, [arg for arg in context.args if is_override(arg)])
    host = socket.gethostname()
    places = places_of(
        options.asked,
        task=detect(os.environ),
        accelerators=num_accelerators(),
        host=host,
        run_id=cfg.name,
        port=free_port(),
    )
    directory = RunDirectory(Path(cfg.runs_dir) / cfg.name)
    agent = Agent(
        (sys.executable, "-m", "jaxfound.cli.main", "train", str(config), *context.args),
        places,
        directory,
        max_restarts=options.max_restarts,
        grace_s=options.grace_s,
        silent_s=2 * cfg.watch.hang_s,
        own_disk=options.own_disk,
        disks=directory.path / "disks",
    )
    sys.exit(watch(agent.run(), console=open_console()))


@launch_app.command("slurm")
def launch_slurm_command(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a host; 0 = none asked for.")] = 8,
    minutes: Annotated[int, typer.Option(help="Wall time.", min=1)] = 24 * 60,
    notice: Annotated[int, typer.Option(help="Seconds from the notice to the end.", min=31)] = 180,
    output: Annotated[Path | None, typer.Option(help="File; standard output by default.")] = None,
) -> None:
    """Write a batch script for SLURM: `jaxfound launch --nnodes 3 slurm CONFIG`."""
    request = request_of(context.obj, config, overrides or [])
    write_script(
        "slurm",
        replace(request, gpus_per_node=gpus_per_node, minutes=minutes, notice_s=notice),
        to=output,
    )


@launch_app.command("jobset")
def launch_jobset_command(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Container image.")] = "jaxfound",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a pod; 0 = none asked for.")] = 8,
    minutes: Annotated[int, typer.Option(help="Longest time that it may run.", min=1)] = 7
    * 24
    * 60,
    notice: Annotated[int, typer.Option(help="Seconds from the notice to the end.", min=31)] = 180,
    output: Annotated[Path | None, typer.Option(help="File; standard output by default.")] = None,
) -> None:
    """Write a JobSet for Kubernetes: `jaxfound launch --nnodes 3 jobset CONFIG`."""
    request = request_of(context.obj, config, overrides or [])
    write_script(
        "jobset",
        replace(
            request, image=image, gpus_per_node=gpus_per_node, minutes=minutes, notice_s=notice
        ),
        to=output,
    )


def request_of(options: Options, config: Path, overrides: list[str]) -> "Request":
    """Return a run as engines are asked for it; a config that cannot run is refused here."""
    from jaxfound.config.load import load
    from jaxfound.resources.launch.scripts import Request

    cfg = load(config, overrides)
    return Request(
        name=cfg.name.lower().replace("_", "-").replace(".", "-"),
        train=(str(config), *overrides),
        nodes=options.asked.nnodes or 1,
        gpus_per_node=0,
        max_restarts=options.max_restarts,
    )


def is_override(arg: str) -> bool:
    """Say whether an argument of `train` is a KEY=VALUE."""
    return "=" in arg and not arg.startswith("-")


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def watch(told: Iterator["Told"], *, console: Console) -> int:
    """Show what the agent tells and return its exit code."""
    code = 1
    for event in told:
        if event.kind == "line":
            # What process 0 wrote to its standard error.
            sys.stderr.write(f"{event.values['text']}\n")
        else:
            console.print(LINES[event.kind](event.values), markup=False)
        if event.kind == "over":
            code = cast(int, event.values["code"])
    return code


def _ended_line(values: Mapping[str, object]) -> str:
    code = cast(int, values["code"])
    tail = f"\n{values['tail']}" if values["tail"] else ""
    return (
        f"launch: process {values['process']} of attempt {values['attempt']} ended with {code} "
        f"({meaning_of(code).text}); log: {values['log']}{tail}"
    )


LINES: Mapping[str, Callable[[Mapping[str, object]], str]] = {
    "started": lambda v: f"launch: attempt {v['attempt']}, processes {v['processes']}",
    "silent": lambda v: (
        f"launch: process {v['process']} has been silent for {v['silent_s']:.0f} s, killed"
    ),
    "stopping": lambda v: (
        f"launch: {v['signal']} passed on; processes have {v['grace_s']:.0f} s to save and leave"
    ),
    "ended": _ended_line,
    "restart": lambda v: f"launch: attempt {v['attempt']} in {v['wait_s']:.0f} s: {v['why']}",
    "over": lambda v: f"launch: over, exit code {v['code']}: {v['why']}",
}


def write_script(engine: str, request: "Request", *, to: Path | None) -> None:
    """Write what `engine` is given, or show it."""
    from jaxfound.resources.launch.scripts import SCRIPTS

    text = SCRIPTS[engine](request)
    if to is None:
        typer.echo(text, nl=False)
        return
    to.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {to}")
