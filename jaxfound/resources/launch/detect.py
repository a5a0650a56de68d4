"""Where the engine that started us says we are: SLURM, Kubernetes, Open MPI, torchrun.

Pure: environment variables in, a task out. An engine starts one task a host, which then is an agent
for all of the host's processes, or one a device, which then is an agent for one process.
"""

import re
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxfound.config.schema import ConfigError

# Ports that are not handed out to others on Linux, and enough of them that jobs seldom meet.
FIRST_PORT, NUM_PORTS = 15000, 15000
DEFAULT_PORT = 29500
Env = Mapping[str, str]


class Task(NamedTuple):
    """One of the tasks that an engine started.

    Attributes:
        engine: which engine.
        num_tasks: how many there are.
        task: which one this is, from 0.
        local_tasks: how many are on this host.
        local_task: which of those.
        coordinator: `HOST:PORT` of task 0; empty = the engine does not say.
    """

    engine: str
    num_tasks: int
    task: int
    local_tasks: int
    local_task: int
    coordinator: str


def from_torchrun(env: Env) -> Task | None:
    """Return the task of torchrun; beside the port that it uses itself there is room for ours."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    port = _int(env, "MASTER_PORT") + 1
    return Task(
        "torchrun",
        _int(env, "WORLD_SIZE"),
        _int(env, "RANK"),
        _int(env, "LOCAL_WORLD_SIZE"),
        _int(env, "LOCAL_RANK"),
        f"{_text(env, 'MASTER_ADDR')}:{port}",
    )


def from_open_mpi(env: Env) -> Task | None:
    """Return the task of Open MPI, which does not say on which host task 0 is."""
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    tasks, local = _int(env, "OMPI_COMM_WORLD_SIZE"), _int(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Task(
        "Open MPI",
        tasks,
        _int(env, "OMPI_COMM_WORLD_RANK"),
        local,
        _int(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        f"127.0.0.1:{DEFAULT_PORT}" if local == tasks else "",
    )


def from_slurm(env: Env) -> Task | None:
    """Return the task of a job step, which `srun` starts; a batch script alone is no step."""
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return None
    host = first_host(env["SLURM_STEP_NODELIST"])
    port = FIRST_PORT + _int(env, "SLURM_JOB_ID") % NUM_PORTS
    per_host = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Task(
        "SLURM",
        _int(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
        _int(env, "SLURM_PROCID"),
        int(per_host[0]) if per_host else 1,
        _int(env, "SLURM_LOCALID"),
        f"{host}:{port}",
    )


def from_jobset(env: Env) -> Task | None:
    """Return the pod of a JobSet whose manifest passes its names on, as ours does."""
    if "JOBSET_NAME" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    name, replicated = env["JOBSET_NAME"], _text(env, "REPLICATED_JOB_NAME")
    return Task(
        "JobSet",
        _int(env, "JOB_COMPLETIONS"),
        _int(env, "JOB_COMPLETION_INDEX"),
        1,
        0,
        f"{name}-{replicated}-0-0.{name}:{DEFAULT_PORT}",
    )


# The innermost first: mpirun and torchrun are started inside of jobs of SLURM and of pods.
ENGINES: tuple[Callable[[Env], Task | None], ...] = (
    from_torchrun,
    from_open_mpi,
    from_slurm,
    from_jobset,
)


def detect(env: Env) -> Task | None:
    """Return the task that the environment tells of, None when no engine started us.

    Raises:
        ConfigError: if an engine's variables are not what that engine sets; names the variable.
    """
    return next((task for engine in ENGINES if (task := engine(env)) is not None), None)


def first_host(nodelist: str) -> str:
    """Return the first host of a list as SLURM writes it, e.g. `gpu[07-09,12],login1`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    return f"{match[1]}{match[2] or ''}{match[3]}"


def check_reachable(
    coordinator: str, *, num_hosts: int, is_first: bool, resolve: Callable[[str], str] | None = None
) -> None:
    """Refuse an address that means another machine on every host.

    Args:
        coordinator: `HOST:PORT`.
        num_hosts: hosts of the job; alone, any address is fine.
        is_first: whether this is the host it names, on which its own name may be a loopback.
        resolve: name to address; the system's when None.

    Raises:
        ConfigError: if the address is the loopback.
    """
    if num_hosts == 1:
        return
    host = coordinator.rpartition(":")[0].strip("[]")
    address = host if is_first else (resolve or _resolve)(host)
    if address in ("localhost", "::1", "0.0.0.0") or address.startswith("127."):
        raise ConfigError(
            f"--coordinator {coordinator} is this very machine ({address}) on each of {num_hosts} "
            "hosts: they would never meet. Give the name or address of host 0 in the network that "
            "the hosts share"
        )


def _resolve(host: str) -> str:
    """Return an address of `host`; the name itself where it has none yet, as pods do at first."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return host


def _int(env: Env, name: str) -> int:
    text = _text(env, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)


def _text(env: Env, name: str) -> str:
    if not env.get(name):
        raise ConfigError(
            f"the environment is that of an engine that starts tasks, but {name} is not set. Give "
            "--nnodes, --node-rank and --coordinator instead"
        )
    return env[name]
