"""Which processes this agent starts: from flags, from the engine, or for simulated hosts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfound.config.schema import ConfigError
from jaxfound.resources.launch.detect import Task, check_reachable
from jaxfound.resources.launch.place import Place


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line.

    Attributes:
        nnodes: hosts of the job; 0 = as the engine says, or one.
        node_rank: which of them this is; -1 = as the engine says, or the first.
        coordinator: `HOST:PORT` of host 0; empty = as the engine says, or this machine alone.
        per_node: processes a host; 0 = one for each accelerator.
        simulate_hosts: hosts to act on this machine; 0 = none.
        devices_per_host: CPU devices of each.
    """

    nnodes: int = 0
    node_rank: int = -1
    coordinator: str = ""
    per_node: int = 1
    simulate_hosts: int = 0
    devices_per_host: int = 1


def places_of(
    asked: Asked, *, task: Task | None, accelerators: int, host: str, run_id: str, port: int
) -> tuple[Place, ...]:
    """Return the processes that an agent starts.

    Args:
        asked: flags; they win over the engine.
        task: what the engine says.
        accelerators: of this host.
        host: name of this host.
        run_id: the same on all hosts.
        port: a free one, for processes that are all started by this agent.

    Raises:
        ConfigError: if the flags contradict each other or an address cannot be right.
    """
    if asked.simulate_hosts:
        return _simulated(asked, run_id=run_id, port=port)
    nodes = asked.nnodes or (task.num_tasks if task else 1)
    rank = asked.node_rank if asked.node_rank >= 0 else (task.task if task else 0)
    if task is None and nodes > 1 and asked.node_rank < 0:
        raise ConfigError(f"--nnodes {nodes} needs --node-rank: 0 on the first host, then 1, 2 …")
    if rank >= nodes:
        raise ConfigError(f"--node-rank {rank} of --nnodes {nodes}: ranks go from 0 to {nodes - 1}")
    coordinator = asked.coordinator or (task.coordinator if task else "")
    if not coordinator and nodes > 1:
        raise ConfigError(
            f"{nodes} hosts need --coordinator HOST:PORT: host 0, as the others reach it"
        )
    coordinator = coordinator or f"127.0.0.1:{port}"
    local_tasks = task.local_tasks if task and not asked.nnodes else 1
    check_reachable(coordinator, num_hosts=nodes // local_tasks, is_first=rank == 0)
    per_node = asked.per_node or accelerators or 1
    if local_tasks > 1 and task is not None:
        # The engine started one task a process already.
        devices = _shares(accelerators, local_tasks)[task.local_task]
        return (Place(coordinator, nodes, rank, devices, run_id=run_id, host_id=host),)
    return tuple(
        Place(coordinator, nodes * per_node, rank * per_node + i, devices, 0, 0, run_id, host)
        for i, devices in enumerate(_shares(accelerators, per_node))
    )


def without_host(places: Sequence[Place], host_id: str) -> tuple[Place, ...]:
    """Return the processes of all hosts but one, numbered anew from 0."""
    left = [place for place in places if place.host_id != host_id]
    return tuple(replace(p, process=n, num_processes=len(left)) for n, p in enumerate(left))


def _simulated(asked: Asked, *, run_id: str, port: int) -> tuple[Place, ...]:
    hosts, each = asked.simulate_hosts, asked.per_node or 1
    if asked.nnodes not in (0, hosts):
        raise ConfigError(f"--nnodes {asked.nnodes} and --simulate-hosts {hosts}: give one of them")
    if asked.node_rank >= hosts or asked.devices_per_host % each:
        raise ConfigError(
            f"--simulate-hosts {hosts} has hosts 0 to {hosts - 1}, whose {asked.devices_per_host} "
            f"devices are cut into {each} equal parts: change --node-rank, --devices-per-host or "
            "--nproc-per-node"
        )
    if not asked.coordinator and asked.node_rank >= 0 and hosts > 1:
        raise ConfigError(
            "simulated hosts that are started one by one need the same --coordinator "
            "127.0.0.1:PORT, PORT being free"
        )
    coordinator = asked.coordinator or f"127.0.0.1:{port}"
    return tuple(
        Place(
            coordinator,
            hosts * each,
            process,
            virtual_devices=asked.devices_per_host // each,
            run_id=run_id,
            host_id=f"simulated-{process // each}",
        )
        for process in range(hosts * each)
        if asked.node_rank in (-1, process // each)
    )


def _shares(accelerators: int, processes: int) -> Sequence[tuple[int, ...]]:
    """Return the accelerators of each process; one process drives all there are."""
    if processes == 1 or not accelerators:
        return [()] * processes
    if accelerators % processes:
        raise ConfigError(
            f"{processes} processes cannot share {accelerators} accelerators equally: choose a "
            "divisor for --nproc-per-node"
        )
    each = accelerators // processes
    return [tuple(range(i * each, (i + 1) * each)) for i in range(processes)]
