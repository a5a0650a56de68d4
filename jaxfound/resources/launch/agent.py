"""Starts the processes of a host, watches them, and starts all of them again when one is lost.

There is an agent a host, and nothing between agents: when a process is lost, those of the other
hosts notice within seconds and end as such, and every agent restarts its own. They meet again at
the port that process 0 opens for its next attempt. It does no scheduling: an engine that does
(SLURM, Kubernetes) starts the agents.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from jaxfound.resources.failpoint import VARIABLE as FAILPOINT
from jaxfound.resources.launch.child import Child, on_own_disk
from jaxfound.resources.launch.exits import Exit, worst
from jaxfound.resources.launch.hosts import without_host
from jaxfound.resources.launch.place import Place
from jaxfound.resources.launch.policy import next_move
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.signals import GracefulStop

# What gRPC would go through, and its list of hosts that it goes to directly.
PROXIES = frozenset({"grpc_proxy", "https_proxy", "http_proxy"})
NO_PROXY = "no_grpc_proxy"
POLL_S = 0.1
# After the first end, until the others have ended by themselves: the reason is among them.
SETTLE_S = 3.0
# The same where they have something to do first: stacks, a save, the end of the run.
LONG_SETTLE_S = 60.0

Kind = Literal["started", "line", "silent", "stopping", "ended", "restart", "dropped", "over"]


class Told(NamedTuple):
    """What an agent tells.

    Attributes:
        kind: what happened.
        values: plain numbers and words; `over` has the agent's exit `code`.
    """

    kind: Kind
    values: Mapping[str, object]


class End(NamedTuple):
    """How an attempt ended.

    Attributes:
        code: of the process that is the reason.
        host: that the process was on.
        committed: newest step on disk that a process knew of; -1 = none.
        next_attempt: number of the next attempt.
    """

    code: int
    host: str
    committed: int
    next_attempt: int


@dataclass(frozen=True)
class Agent:
    """What an agent starts, and how patient it is.

    Attributes:
        command: what every process runs.
        places: one for each process of this host (or of every simulated host).
        directory: of the run; logs go there.
        max_restarts: restarts in a row that may bring no committed step.
        grace_s: from the notice to stop until a process is killed.
        silent_s: a process whose heartbeat is older is killed as hung; 0 = never.
        min_hosts: when one host fails twice in a row and nothing is committed between, go on
            without it while so many are left; 0 = never. For an agent that has all the hosts.
        own_disk: a path at which each host sees a disk of its own, None = none; needs root.
        disks: folder of those disks.
    """

    command: Sequence[str]
    places: Sequence[Place]
    directory: RunDirectory
    max_restarts: int = 3
    grace_s: float | int = 120
    silent_s: float | int = 600
    min_hosts: int = 0
    own_disk: Path | None = None
    disks: Path = Path("disks")

    def run(self) -> Iterator[Told]:
        """Start the processes, and again until they are done or it is no use; tell what happens.

        The signals SIGINT and SIGTERM are passed on as the notice to save and stop. Every process
        has ended when this is over or is closed.
        """
        attempt, fruitless, committed = self._first_attempt(), 0, -1
        places, failed = tuple(self.places), ""
        with ExitStack() as opened:
            asked = opened.enter_context(GracefulStop())
            beats = Path(tempfile.mkdtemp(prefix="jaxfound-"))
            opened.callback(shutil.rmtree, beats, ignore_errors=True)
            while True:
                end = yield from self._attempt(attempt, places, asked=asked, beats=beats)
                move = next_move(
                    end.code,
                    is_stopping=asked.requested,
                    progressed=end.committed > committed,
                    fruitless=fruitless,
                    max_restarts=self.max_restarts,
                )
                if move.restarts:
                    yield Told("restart", {"attempt": end.next_attempt, **move._asdict()})
                if not move.restarts or wait(move.wait_s, asked=asked):
                    yield Told("over", {"code": exit_code(end.code), "why": move.why})
                    return
                attempt, fruitless = end.next_attempt, move.fruitless
                committed = max(committed, end.committed)
                if fruitless > 1 and end.host == failed and self._can_spare(places, failed):
                    places, fruitless = without_host(places, failed), 0
                    yield Told("dropped", {"host": failed, "processes": len(places)})
                failed = end.host

    def _attempt(
        self, attempt: int, places: Sequence[Place], *, asked: GracefulStop, beats: Path
    ) -> Generator[Told, None, End]:
        """Start the processes, watch them to their end, and tell why it was."""
        children: dict[int, Child] = {}
        try:
            self._start(children, places, attempt=attempt, beats=beats)
            yield Told("started", {"attempt": attempt, "processes": [*children]})
            yield from self._watch(children, asked=asked)
        finally:
            for child in children.values():
                child.kill()
        process, code = reason(children)
        yield Told("ended", ended(children[process], code, attempt=attempt))
        newest = max(map(committed_by, children.values()))
        host = next(place.host_id for place in places if place.process == process)
        return End(code, host, newest, self._next_attempt(attempt, children))

    def _can_spare(self, places: Sequence[Place], host_id: str) -> bool:
        """Say whether enough hosts are left without one."""
        left = {place.host_id for place in places} - {host_id}
        return 0 < self.min_hosts <= len(left)

    def _start(
        self, children: dict[int, Child], places: Sequence[Place], *, attempt: int, beats: Path
    ) -> None:
        """Start every process and put it among `children`, so that none is lost if one fails."""
        logs = self.directory.logs(attempt)
        searches = all(place.process for place in places)
        for place in places:
            heartbeat = beats / f"process-{place.process}.json"
            here = replace(place, attempt=attempt, heartbeat=heartbeat, searches=searches)
            command = self.command
            around = environment(os.environ, attempt=attempt, coordinator=place.coordinator)
            if self.own_disk is not None:
                disk = self.disks / place.host_id
                command = on_own_disk(command, disk=disk, at=self.own_disk)
            children[place.process] = Child(
                place.process,
                command,
                env={**around, **here.to_env()},
                log=logs / f"process-{place.process}.log",
                heartbeat=heartbeat,
            )

    def _watch(self, children: Mapping[int, Child], *, asked: GracefulStop) -> Iterator[Told]:
        """Return when every process has ended, or those that are left must be killed."""
        ends_s: float | None = None
        is_told = False
        while any(child.code() is None for child in children.values()):
            now = time.monotonic()
            if ends_s is not None and now > ends_s:
                break
            if asked.requested and not is_told:
                is_told = True
                yield Told("stopping", {"signal": asked.signal_name, "grace_s": self.grace_s})
                for child in children.values():
                    child.send(signal.SIGTERM)
                ends_s = now + self.grace_s
            if ends_s is None:
                ends_s = settled_at(children, now=now)
            yield from self._hear(children)
            time.sleep(POLL_S)
        yield from self._hear(children)

    def _hear(self, children: Mapping[int, Child]) -> Iterator[Told]:
        """Tell what process 0 said, and kill what is silent."""
        if 0 in children:
            for line in children[0].new_lines():
                yield Told("line", {"text": line})
        for process, child in children.items():
            silent_s = child.silent_s()
            if self.silent_s and silent_s > self.silent_s and child.code() is None:
                yield Told("silent", {"process": process, "silent_s": silent_s})
                child.was_silent = True
                child.kill()

    def _first_attempt(self) -> int:
        """Return the number to begin at: an agent that is started again goes on counting.

        The host of process 0 begins a new attempt, others look for the one that is under way.
        """
        first = min(place.process for place in self.places)
        newest = self.directory.newest_attempt(first)
        return max(newest, 0) if first else newest + 1

    def _next_attempt(self, attempt: int, children: Mapping[int, Child]) -> int:
        """Return the number of the next attempt.

        The host of process 0 counts. Another goes on from what its processes have joined: if they
        never did, the attempt that they were started for may still be waiting for them.
        """
        if 0 in children:
            return attempt + 1
        joined = [beat.attempt for beat in (c.pulse() for c in children.values()) if beat]
        return max(joined) + 1 if joined else attempt


def environment(env: Mapping[str, str], *, attempt: int, coordinator: str) -> dict[str, str]:
    """Return the environment that processes get besides their places.

    A failure that was asked for is of one attempt: of several, parted by commas, each gets its own.
    A proxy is for the world outside: JAX's channels to `coordinator` go past it.
    """
    kept = dict(env)
    asked = [text for text in kept.pop(FAILPOINT, "").split(",") if text]
    if attempt < len(asked):
        kept[FAILPOINT] = asked[attempt]
    if any(name.lower() in PROXIES for name in env):
        direct = (env.get(NO_PROXY, ""), coordinator.rpartition(":")[0])
        kept[NO_PROXY] = ",".join(host for host in direct if host)
    return kept


def settled_at(children: Mapping[int, Child], *, now: float) -> float | None:
    """Return when processes that are left after a first end are killed, None before one."""
    codes = {p: code for p, c in children.items() if (code := c.code()) is not None}
    if not codes:
        return None
    unhurried = all(code in (Exit.DONE, Exit.PREEMPTED, Exit.HANG) for code in codes.values())
    return now + (LONG_SETTLE_S if unhurried else SETTLE_S)


def reason(children: Mapping[int, Child]) -> tuple[int, int]:
    """Return the process that is the reason for the end, and its code.

    One that was silent is; one that was killed because others had ended is not.
    """
    silent = [p for p, c in children.items() if c.was_silent]
    codes = {p: c.code() or 0 for p, c in children.items() if not c.was_killed}
    if not silent and any(codes.values()):
        return worst(codes)
    # What is left are those that did not end when the others had, or when they were asked to.
    killed = silent or [p for p, c in children.items() if c.was_killed]
    return (killed[0], Exit.HANG) if killed else worst(codes)


def committed_by(child: Child) -> int:
    """Return the newest committed step that a process knew of; -1 = none."""
    last = child.pulse()
    return last.beat.committed if last else -1


def ended(child: Child, code: int, *, attempt: int) -> dict[str, object]:
    """Return what is told of the end of an attempt, the log's last lines if it failed."""
    fine = code in (Exit.DONE, Exit.PREEMPTED)
    return {
        "attempt": attempt,
        "process": child.process,
        "code": code,
        "log": str(child.log),
        "tail": "" if fine else child.tail(),
    }


def exit_code(code: int) -> int:
    """Return the agent's own exit code: that of the process, or what shells make of its signal."""
    if code == -signal.SIGTERM:
        return Exit.PREEMPTED
    return code if code >= 0 else 128 - code


def wait(seconds: float, *, asked: GracefulStop) -> bool:
    """Wait, and say whether a stop was asked for before that was over."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s and not asked.requested:
        time.sleep(POLL_S)
    return asked.requested
