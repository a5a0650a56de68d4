"""`jaxfound launch`: start the processes of a run on this host, watch them, restart them."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from jaxfound.resources.launch.agent import Told
    from jaxfound.resources.launch.hosts import Asked

# The command beside `train` that all hosts of a job run.
PROBE = "probe"
# What follows the first word that is no option is the command's, dashes or not.
WORDS_LAST = {"allow_interspersed_args": False}

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND CONFIG [KEY=VALUE]...",
        help="train, probe = start here; slurm, jobset = write what that engine is given.",
    ),
]


def launch_command(
    words: Words,
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
    min_nodes: Annotated[
        int, typer.Option(help="Fewest hosts to go on with; 0 = all. slurm, or simulated hosts.")
    ] = 0,
    grace: Annotated[float, typer.Option(help="Seconds that a process has to save and leave.")] = (
        120.0
    ),
    simulate_hosts: Annotated[int, typer.Option(help="Act so many hosts on this machine.")] = 0,
    devices_per_host: Annotated[int, typer.Option(help="CPU devices of a simulated host.")] = 1,
    own_disk: Annotated[
        Path | None, typer.Option(help="A path that is another disk on each host; needs root.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="slurm, jobset: GPUs of a host; 0 = none.")] = (
        8
    ),
    minutes: Annotated[int, typer.Option(help="slurm, jobset: wall time.", min=1)] = 24 * 60,
    notice: Annotated[
        int, typer.Option(help="slurm, jobset: seconds from the notice to the end.", min=31)
    ] = 180,
    image: Annotated[str, typer.Option(help="jobset: container image.")] = "jaxfound",
) -> None:
    """Start the processes of a run on this host, watch them, and restart all when one is lost.

    For instance `jaxfound launch --nnodes 3 --node-rank 0 --coordinator node01:29500 -- train
    CONFIG` on the first of three hosts (`-- probe` measures their wires). Under SLURM, in a JobSet,
    under mpirun and torchrun the first three are found. `launch … slurm CONFIG` prints a script.
    """
    from jaxfound.config.load import load
    from jaxfound.resources.launch.hosts import Asked
    from jaxfound.resources.launch.scripts import SCRIPTS, Request

    command, *train = checked(words)
    each = processes_of(nproc_per_node)
    asked = Asked(nnodes, node_rank, coordinator, each, simulate_hosts, devices_per_host)
    patience = Patience(max_restarts, min_nodes, grace, own_disk)
    if command == PROBE:
        sys.exit(probe_here(words, asked=asked, patience=patience))
    # Read here too: what is refused, is refused before anything is started.
    cfg = load(Path(train[0]), [word for word in train[1:] if is_override(word)])
    if command in SCRIPTS:
        name = cfg.name.lower().replace("_", "-").replace(".", "-")
        request = Request(
            name, train, nnodes or 1, gpus_per_node, minutes, notice, max_restarts, image, min_nodes
        )
        typer.echo(SCRIPTS[command](request), nl=False)
        return
    patience = replace(patience, silent_s=2 * cfg.watch.hang_s)
    sys.exit(start_here(words, Path(cfg.runs_dir) / cfg.name, asked=asked, patience=patience))


def checked(words: list[str]) -> list[str]:
    """Return a command and its arguments.

    Raises:
        ConfigError: if it is none of ours, or names no config where it needs one.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.resources.launch.scripts import SCRIPTS

    if words[0] != PROBE and (words[0] not in ("train", *SCRIPTS) or len(words) == 1):
        raise ConfigError(
            f"`jaxfound launch … {' '.join(words)}`: what is launched is one of train CONFIG, "
            f"{', '.join(f'{engine} CONFIG' for engine in SCRIPTS)}, {PROBE}"
        )
    return words


def processes_of(nproc_per_node: str) -> int:
    """Return the number of processes of a host, 0 for one a GPU.

    Raises:
        ConfigError: if it is no number.
    """
    from jaxfound.config.schema import ConfigError

    if nproc_per_node == "gpus":
        return 0
    if not nproc_per_node.isdecimal() or not int(nproc_per_node):
        raise ConfigError(f"--nproc-per-node {nproc_per_node} is not a number from 1 up, or `gpus`")
    return int(nproc_per_node)


@dataclass(frozen=True)
class Patience:
    """How an agent treats its processes: see `Agent`."""

    max_restarts: int
    min_hosts: int
    grace_s: float
    own_disk: Path | None
    silent_s: float = 0


def probe_here(words: Sequence[str], *, asked: "Asked", patience: Patience) -> int:
    """Be the agent of this host while wires are measured, once; return the exit code."""
    # A probe that lost a host has no use for another try.
    once = replace(patience, max_restarts=0)
    return start_here(words, Path("runs") / PROBE, asked=asked, patience=once)


def start_here(words: Sequence[str], path: Path, *, asked: "Asked", patience: Patience) -> int:
    """Be the agent of this host until the command of `words` is over; return the exit code.

    Args:
        words: the command and its arguments.
        path: folder of its run, the same on all hosts.
        asked: which processes.
        patience: with them.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.resources.launch.agent import Agent
    from jaxfound.resources.launch.detect import detect
    from jaxfound.resources.launch.hosts import places_of
    from jaxfound.resources.launch.ports import free_ports
    from jaxfound.resources.platform import num_accelerators
    from jaxfound.resources.run_directory import RunDirectory

    if patience.min_hosts and not asked.simulate_hosts:
        raise ConfigError(
            f"--min-nodes {patience.min_hosts}: agents of several hosts do not agree on whom to "
            "leave out. The engine does: `jaxfound launch --min-nodes … slurm`; by hand, stop the "
            "agents and start them with another --nnodes"
        )
    places = places_of(
        asked,
        task=detect(os.environ),
        accelerators=num_accelerators(),
        host=socket.gethostname(),
        run_id=path.name,
        port=free_ports(),
    )
    directory = RunDirectory(path)
    agent = Agent(
        (sys.executable, "-m", "jaxfound.cli.main", *words),
        places,
        directory,
        max_restarts=patience.max_restarts,
        min_hosts=patience.min_hosts,
        grace_s=patience.grace_s,
        silent_s=patience.silent_s,
        own_disk=patience.own_disk,
        disks=directory.path / "disks",
    )
    return watch(agent.run(), console=open_console())


def is_override(word: str) -> bool:
    """Say whether an argument of `train` is a KEY=VALUE."""
    return "=" in word and not word.startswith("-")


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
    from jaxfound.resources.launch.exits import meaning_of

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
    "dropped": lambda v: f"launch: {v['host']} is left out, {v['processes']} processes go on",
    "over": lambda v: f"launch: over, exit code {v['code']}: {v['why']}",
}
