"""A process joins its job, and leaves it: in order, or at once.

JAX's own exit waits for every other process, for minutes when one of them is lost; and a process
that waits to join never learns that process 0 has gone. Both are cut short here.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

import jax

from jaxfound.config.schema import ConfigError
from jaxfound.resources.checkpoint.errors import CheckpointError
from jaxfound.resources.control import ControlPlane, PeerError
from jaxfound.resources.ending import linger, tell_ending
from jaxfound.resources.launch.exits import Exit, meaning_of
from jaxfound.resources.launch.place import Place
from jaxfound.resources.platform import use_virtual_cpus

log = logging.getLogger(__name__)

# Hosts of a cold cluster come up unevenly: minutes apart are usual.
JOIN_TIMEOUT_S = 900
HEARTBEAT_TIMEOUT_S = 30
SHUTDOWN_TIMEOUT_S = 15
# Attempts take the ports from the coordinator's up in turn: the one of the attempt before may still
# be taken. A host that does not know which attempt is under way finds it among them.
NUM_PORTS = 16
PROBE_EVERY_S = 0.5
# Refusals in a row after which a service that was there is gone.
REFUSALS = 4

# What a collective says when a process at the other end is lost: gloo, NCCL, JAX's service.
LOST_PEER = (
    "Gloo", "gloo", "NCCL", "Connection reset", "Connection closed", "Socket closed",
    "coordination service", "CoordinationService", "another task died", "heartbeat",
)  # fmt: skip


def join(place: Place) -> Place:
    """Make this process one of its job's, before any backend starts; return where it stands.

    Alone in its job it meets nobody. The attempt in the result is the one that process 0 has
    opened, which a host that was away can be behind of.

    Raises:
        PeerError: if process 0 cannot be reached within JOIN_TIMEOUT_S.
    """
    if place.virtual_devices:
        use_virtual_cpus(place.virtual_devices, alone=True)
    if place.num_processes == 1:
        return place
    host, base = split_address(place.coordinator)
    attempt = place.attempt
    if place.process:
        attempt = open_attempt(
            host,
            base,
            first=place.attempt,
            among=NUM_PORTS if place.searches else 1,
            timeout_s=JOIN_TIMEOUT_S,
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with watched_door(host, port_of(base, attempt), watches=place.process > 0):
        jax.distributed.initialize(
            f"{host}:{port_of(base, attempt)}",
            place.num_processes,
            place.process,
            local_device_ids=place.local_devices or None,
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    log.info("job.joined", extra={"number": place.process, "attempt": attempt})
    return replace(place, attempt=attempt)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`.

    Raises:
        ConfigError: if it is no such text.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65536 - NUM_PORTS:
        raise ConfigError(
            f"coordinator {address!r} is not HOST:PORT, e.g. node01:29500, with the "
            f"{NUM_PORTS - 1} numbers above PORT being ports too"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def port_of(base: int, attempt: int) -> int:
    """Return the port at which process 0 keeps the keys of an attempt."""
    return base + attempt % NUM_PORTS


def open_attempt(host: str, base: int, *, first: int, among: int, timeout_s: float | int) -> int:
    """Return the lowest attempt from `first` up whose port process 0 listens at, once one does.

    Args:
        first: what the agent takes for the attempt that is under way.
        among: attempts that it may be; NUM_PORTS are all, for an agent that was started anew and
            does not know how many it has missed.

    Raises:
        PeerError: if none does within `timeout_s`.
    """
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        for attempt in range(first, first + among):
            if listens(host, port_of(base, attempt)):
                return attempt
        time.sleep(PROBE_EVERY_S)
    raise PeerError(
        f"process 0 did not listen at {host}:{base} to {base + NUM_PORTS - 1} "
        f"within {timeout_s:.0f} s. Is its agent started, is {host} the address that the "
        "hosts reach each other by, and does a firewall let these ports through?",
        missing=(0,),
    )


def listens(host: str, port: int) -> bool:
    """Say whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def watched_door(host: str, port: int, *, watches: bool) -> Iterator[None]:
    """End this process as one that lost a peer if process 0 stops to listen while it is joined.

    The joining call cannot be interrupted: it would wait for its whole limit, and then abort.
    """
    joined = threading.Event()

    def watch() -> None:
        refused = 0
        while refused < REFUSALS:
            if joined.wait(PROBE_EVERY_S):
                return
            refused = 0 if listens(host, port) else refused + 1
        if not joined.is_set():
            log.error("job.process_0_lost", extra={"while": "joining"})
            leave_now(Exit.PEER)

    if watches:
        threading.Thread(target=watch, name="jaxfound-door", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def leave() -> None:
    """Leave the job in order, when all have come to its end."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def leave_now(code: int) -> None:
    """End this process without waiting for anybody; what was printed and logged is out."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader has gone, or it was closed: nothing is left to save.
            continue
    os._exit(code)


def leave_because(error: BaseException, *, is_refusal: bool = False) -> None:
    """End this process at once because of `error`, having told the others; never returns.

    What would end the same way again ends all of them with the same code; of anything else they
    hear that they have lost a process, before JAX would notice.

    Args:
        is_refusal: whether it says that what was asked for cannot be done.
    """
    code = exit_code_of(error, is_refusal=is_refusal)
    is_final = not meaning_of(code).restarts
    try:
        plane = ControlPlane.of_job()
        tell_ending(plane, code=code if is_final else Exit.PEER, why=str(error))
        if is_final:
            linger(plane)
    except PeerError:
        log.debug("job.nobody_to_tell")
    leave_now(code)


def exit_code_of(error: BaseException, *, is_refusal: bool = False) -> int:
    """Return the code that says why `error` ended a process of a job."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if is_lost_peer(error):
        return Exit.PEER
    if isinstance(error, CheckpointError):
        return Exit.CHECKPOINT
    if is_refusal or isinstance(error, ConfigError):
        return Exit.REFUSED
    return 130 if isinstance(error, KeyboardInterrupt) else Exit.CRASH


def is_lost_peer(error: BaseException) -> bool:
    """Say whether the reason is that another process is gone.

    A device program that waited for it says so, or a wait for what it was to tell; or a save that
    either of them ended: then nothing is wrong with this process's disk.
    """
    if isinstance(error, PeerError):
        return True
    if isinstance(error, CheckpointError) and error.__cause__ is not None:
        return is_lost_peer(error.__cause__)
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    return any(word in str(error) for word in LOST_PEER)


def end_at_once_on_errors() -> None:
    """Let an error that nobody caught end this process at once, with the code that says why."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        leave_because(error)

    sys.excepthook = hook
