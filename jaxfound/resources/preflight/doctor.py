"""The whole examination: each host looks at itself, all meet, and the same facts are judged."""

import platform
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxfound.resources.clock import Offset, measure_offset
from jaxfound.resources.control import PeerError, Store
from jaxfound.resources.platform import driver_version
from jaxfound.resources.preflight import agree, disk, gpu, host, libraries, network, numerics
from jaxfound.resources.preflight.board import Board, BoardStore, PortError
from jaxfound.resources.preflight.check import Check, Verdict, check, from_fields, worst
from jaxfound.resources.preflight.identity import boot_id, must_agree, should_agree
from jaxfound.resources.preflight.party import Party

GiB = 1024**3
# A pair of hosts is tried in both directions; beyond so many hosts only some of the pairs.
ALL_PAIRS = 9


@dataclass(frozen=True)
class Asked:
    """What the doctor is to look at.

    Attributes:
        process: number of this process, from 0.
        count: processes of the job.
        coordinator: `host:port` of process 0; empty for one process.
        hosts: further names to look up the way to.
        local_dir: folder that must be on the host's own disk.
        shared_dir: folder that all hosts must see; None = not looked at.
        config: hash of the run's effective config; empty = none.
        limit_s: how long one meeting may take.
        min_bps: bytes/s that a TCP stream between two hosts must carry.
        needed_bytes: that must be free in `local_dir`.
        write_bytes: that each process writes to `shared_dir` and removes again.
        burn_in_s: of arithmetic on every device; None = devices are not started.
    """

    process: int = 0
    count: int = 1
    coordinator: str = ""
    hosts: tuple[str, ...] = ()
    local_dir: Path = Path("runs")
    shared_dir: Path | None = None
    config: str = ""
    limit_s: float | int = 60
    min_bps: float | int = network.GIGABIT
    needed_bytes: int = GiB
    write_bytes: int = disk.MEASURE_BYTES
    burn_in_s: float | int | None = 2

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        name, _, port = self.coordinator.rpartition(":")
        return name.strip("[]"), int(port)


class Who(NamedTuple):
    """A process, as its peers need to know it.

    Attributes:
        host: name of its host.
        boot: what tells that host from others.
        address: by which it is reached.
        port: that swallows what is sent to it.
    """

    host: str
    boot: str
    address: str
    port: int

    def is_beside(self, other: "Who") -> bool:
        """Whether both are on one host."""
        return (self.host, self.boot) == (other.host, other.boot)


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        process: who tells it.
        count: processes of the job.
        checks: the verdicts.
    """

    process: int
    count: int
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the verdicts."""
        return worst([one.verdict for one in self.checks])

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON data."""
        checks = [one._asdict() for one in self.checks]
        data = {"process": self.process, "count": self.count, "verdict": self.verdict}
        return {"format_version": 1, **data, "checks": checks}


def examine(asked: Asked, *, clock: Callable[[], float] = time.time) -> Report:
    """Return the verdicts on this host and, with peers, on what they have in common.

    Args:
        asked: what to look at.
        clock: Unix time in seconds.
    """
    if asked.count == 1:
        return Report(0, 1, tuple(own_checks(asked)))
    with ExitStack() as opened:
        try:
            party = join(asked, opened)
        except PeerError as error:
            checks = (*coordinator_checks(asked, error), *own_checks(asked))
            return Report(asked.process, asked.count, checks)
        try:
            checks = tuple(joint_checks(asked, party, opened, clock=clock))
            party.leave()
        except PeerError as error:
            checks = (*coordinator_checks(asked, error), *own_checks(asked))
        return Report(asked.process, asked.count, checks)


def join(asked: Asked, opened: ExitStack) -> Party:
    """Return the party of the job's processes.

    Raises:
        PortError: if the coordinator's port is held by another program.
        PeerError: if process 0 cannot be reached.
    """
    name, port = asked.address
    if asked.process == 0:
        store: Store = opened.enter_context(Board(port)).store
    else:
        remote = BoardStore(name, port, limit_s=asked.limit_s)
        opened.callback(remote.close)
        store = remote
    party = Party(store, asked.process, asked.count, asked.limit_s)
    party.greet()
    return party


def coordinator_checks(asked: Asked, error: PeerError) -> tuple[Check, ...]:
    """Return the verdict on a meeting that did not come about, and on what it would have shown."""
    held = isinstance(error, PortError)
    remedy = (
        "end what listens there (ss -ltnp), or choose another port for the coordinator"
        if held
        else "start process 0 there; look whether the host is up and a firewall lets the port pass"
    )
    name = "coordinator port" if held else "coordinator"
    rule = f"{asked.coordinator} answers as process 0"
    return (
        check(name, "fail", str(error), threshold=rule, remedy=remedy),
        check("peers", "skip", "not compared", remedy="see the coordinator"),
    )


def own_checks(asked: Asked) -> list[Check]:
    """Return the verdicts on this host alone."""
    checks = list(host.check_host(asked.local_dir, needed_bytes=asked.needed_bytes))
    checks += host.check_limits()
    checks += [network.check_route(network.route_to(name), alone=False) for name in asked.hosts]
    if asked.count == 1:
        kind = disk.file_system(asked.local_dir, mounts=_mounts())
        checks.append(disk.check_local(str(asked.local_dir), kind, others_seen=()))
    checks += gpu_checks()
    if asked.burn_in_s is not None:
        checks += device_checks(asked.burn_in_s)
    there = libraries.library_paths(libraries.search_folders())
    loaded = libraries.loaded_libraries(Path("/proc/self/maps").read_text("utf-8", "replace"))
    checks += libraries.check_libraries(there, loaded)
    checks.append(libraries.check_plugins(must_agree(config="")))
    return checks


def gpu_checks() -> list[Check]:
    """Return the verdicts on this host's GPUs and their driver."""
    build = gpu.driver_build()
    driver = gpu.check_driver(
        library=driver_version(),
        module=build,
        kernel=platform.release(),
        built_for=gpu.module_kernels(build),
    )
    cards, why_not = gpu.read_gpus()
    if not cards:
        present = bool(build) or any(Path("/dev").glob("nvidia[0-9]*"))
        verdict: Verdict = "warn" if present else "skip"
        remedy = 'pip install "nvidia-ml-py>=12"' if present else "nothing to do without GPUs"
        return [driver, check("gpus", verdict, why_not or "none", remedy=remedy)]
    return [driver, *(one for card in cards for one in gpu.check_gpu(card))]


def device_checks(seconds: float | int) -> tuple[Check, ...]:
    """Return the verdicts on the arithmetic of this host's devices; starts the JAX backend."""
    try:
        return numerics.check_burned(numerics.burn_in(seconds=seconds))
    except RuntimeError as error:
        remedy = "nvidia-smi shows whether the driver sees the card; JAX_PLATFORMS=cpu does without"
        told = str(error).splitlines()[0]
        return (check("jax devices", "fail", told, threshold="they start", remedy=remedy),)


def joint_checks(
    asked: Asked, party: Party, opened: ExitStack, *, clock: Callable[[], float]
) -> list[Check]:
    """Return the verdicts of all hosts; what one tells is the same on each."""
    sink = opened.enter_context(network.Sink())
    came = list(party.present)
    names = party.gather("names", [platform.node(), boot_id(), own_address(asked, party)])
    ports = party.gather("ports", sink.port)
    hosts = {p: Who(*names[p], port=port) for p, port in ports.items()}
    me = hosts[asked.process]
    offset = measure_offset(
        party.store,
        process=asked.process,
        peers=[p for p in party.present if p],
        limit_s=asked.limit_s,
        clock=clock,
    )
    alone = all(who.is_beside(me) for who in hosts.values())
    checks = own_checks(asked) + route_checks(asked, hosts, alone=alone)
    disks = disk_checks(asked, party, hosts)
    flows = measured_flows(asked, party, hosts)
    burn_s = asked.burn_in_s or 0
    told = party.gather("checks", [list(one) for one in checks + disks], extra_s=burn_s)
    clocks = party.gather("clocks", None if offset is None else list(offset))
    must = party.gather("must", must_agree(config=asked.config))
    should = party.gather("should", should_agree())
    shared = shared_checks(asked, party)
    own = {p: [from_fields(one) for one in rows] for p, rows in told.items()}
    return [
        agree.check_peers(asked.count, present=came, lost=party.lost),
        *agree.check_equal(must, otherwise="fail", title="software and config"),
        *agree.check_equal(should, otherwise="warn", title="kernel and variables"),
        agree.check_clocks({p: None if o is None else Offset(*o) for p, o in clocks.items()}),
        *(network.check_flows(flows, min_bps=asked.min_bps) if flows else ()),
        *shared,
        *agree.merged(own, {p: who.host for p, who in hosts.items()}),
    ]


def own_address(asked: Asked, party: Party) -> str:
    """Return the address by which peers reach this process."""
    if isinstance(party.store, BoardStore):
        return party.store.local_address()
    return asked.address[0]


def route_checks(asked: Asked, hosts: Mapping[int, Who], *, alone: bool) -> list[Check]:
    """Return the verdict on the way to each peer, one for all that are fine."""
    routes = [network.route_to(who.address) for p, who in hosts.items() if p != asked.process]
    if asked.process:
        routes.append(network.route_to(asked.address[0]))
    checks = [network.check_route(route, alone=alone) for route in routes]
    bad = [one for one in checks if one.verdict != "ok"]
    if bad or not checks:
        return list(dict.fromkeys(bad))
    nics = ", ".join(sorted({one.value for one in checks}))
    return [check("routes to peers", "ok", nics, threshold=checks[0].threshold, remedy="")]


def measured_flows(
    asked: Asked, party: Party, hosts: Mapping[int, Who]
) -> tuple[network.Flow, ...]:
    """Return what streams between processes carried; in each round all send and all receive."""
    order = list(party.present)
    flows: list[network.Flow] = []
    for shift in shifts(len(order)):
        party.gather(f"ready {shift}", "")
        target = order[(order.index(asked.process) + shift) % len(order)]
        try:
            # The better of two: a busy processor makes one slow, a slow wire makes both.
            bps = max(network.blast(hosts[target].address, hosts[target].port) for _ in range(2))
        except OSError:
            bps = 0.0
        targets = party.gather(f"target {shift}", target, extra_s=20)
        found = party.gather(f"flow {shift}", bps)
        flows += [network.Flow(p, targets[p], bps) for p, bps in found.items()]
    return tuple(flows)


def shifts(count: int) -> tuple[int, ...]:
    """Return how far along the ring each round sends: to all, or by powers of two to some."""
    if count <= ALL_PAIRS:
        return tuple(range(1, count))
    return tuple(2**k for k in range(count.bit_length()) if 2**k < count)


def disk_checks(asked: Asked, party: Party, hosts: Mapping[int, Who]) -> list[Check]:
    """Return the verdict on this host's local folder: what others left must not be seen there."""
    token = party.gather("local token", uuid.uuid4().hex)[min(party.present)]
    folder = asked.local_dir
    problem = _problem(lambda: disk.leave_mark(folder, token=token, process=asked.process))
    party.gather("local marked", "")
    me = hosts[asked.process]
    there = () if problem else disk.marks(folder, token=token)
    seen = tuple(p for p in there if not hosts[p].is_beside(me))
    party.gather("local looked", "")
    disk.remove_mark(folder, token=token, process=asked.process)
    kind = disk.file_system(folder, mounts=_mounts())
    return [disk.check_local(str(folder), kind, others_seen=seen)]


def shared_checks(asked: Asked, party: Party) -> list[Check]:
    """Return the verdicts on the shared folder: seen by all, and fast when all write."""
    named = party.gather("shared dir", str(asked.shared_dir or ""))
    if len(set(named.values())) > 1:
        return list(
            agree.check_equal(
                {p: {"shared disk": name} for p, name in named.items()}, otherwise="fail", title=""
            )
        )
    folder = asked.shared_dir
    if folder is None:
        return []
    token = party.gather("shared token", uuid.uuid4().hex)[min(party.present)]
    problem = _problem(lambda: disk.leave_mark(folder, token=token, process=asked.process))
    problems = party.gather("shared marked", problem)
    if any(problems.values()):
        disk.remove_mark(folder, token=token, process=asked.process)
        told = "; ".join(f"process {p}: {why}" for p, why in problems.items() if why)
        remedy = "make the folder on every host, writable for this user"
        return [check("shared disk", "fail", f"{folder}: {told}", remedy=remedy)]
    seen = party.gather("shared seen", list(disk.marks(folder, token=token)))
    disk.remove_mark(folder, token=token, process=asked.process)
    speed = lambda: disk.write_speed(folder, process=asked.process, num_bytes=asked.write_bytes)
    alone_bps = speed() if asked.process == min(party.present) else 0.0
    party.gather("alone", "", extra_s=asked.limit_s)
    together_bps = speed()
    written = party.gather("together", [alone_bps, together_bps], extra_s=asked.limit_s)
    writes = {p: disk.Writes(*both) for p, both in written.items()}
    return [
        disk.check_shared(str(folder), {p: tuple(found) for p, found in seen.items()}),
        disk.check_writes(writes),
    ]


def _problem(action: Callable[[], None]) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _mounts() -> str:
    return Path("/proc/self/mounts").read_text("utf-8", "replace")
