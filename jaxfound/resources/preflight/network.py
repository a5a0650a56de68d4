"""Ways to other hosts: the NIC the system chooses, its speed, and what really goes through it."""

import fcntl
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, cast

from jaxfound.resources.preflight.check import Check, check, passed

GIGABIT = 1e9 / 8
# Management networks run at 1 Gb/s; a job's traffic on one is the usual reason for a slow start.
SLOW_NIC_BPS = GIGABIT
BLAST_S = 0.4
BLAST_BYTES = 64 * 2**20
PIECE = bytes(2**20)
# ioctl of Linux that gives the IPv4 address of an interface (linux/sockios.h).
SIOCGIFADDR = 0x8915
LOOPBACK = ("127.", "::1")


class Route(NamedTuple):
    """The way from this host to an address.

    Attributes:
        to: the name that was asked for.
        address: what it resolves to; empty when it does not.
        source: this host's address on that way.
        nic: interface that has it; empty when none is known to.
        nic_bps: the NIC's line rate in bytes/s; 0 = it does not tell.
        mtu: bytes of its largest packet; 0 = not known.
    """

    to: str
    address: str
    source: str
    nic: str
    nic_bps: float
    mtu: int

    @property
    def is_loopback(self) -> bool:
        """Whether nothing sent there leaves this host."""
        return self.address.startswith(LOOPBACK)


class Flow(NamedTuple):
    """What one TCP stream carried from one process to another, bytes/s."""

    source: int
    target: int
    bps: float


def route_to(host: str, *, port: int = 9) -> Route:
    """Return the way to a host; nothing is sent."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return Route(host, "", "", "", 0.0, 0)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(address)
        except OSError:
            return Route(host, str(address[0]), "", "", 0.0, 0)
        source = str(probe.getsockname()[0])
    nic = nic_of(source)
    return Route(host, str(address[0]), source, nic, nic_speed_bps(nic), _number(nic, "mtu"))


def nic_of(address: str) -> str:
    """Return the interface that has this address; empty when none is known to."""
    for line in _lines(Path("/proc/net/if_inet6")):
        digits, *_, name = line.split()
        if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) == address:
            return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def nic_speed_bps(nic: str) -> float:
    """Return a NIC's line rate in bytes/s; 0 where it does not tell, as many virtual ones."""
    return max(0, _number(nic, "speed")) * 1e6 / 8


class Sink:
    """A port that swallows what is sent to it and then says how much came."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port = cast(int, self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=swallow, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        # Wakes the thread that waits in accept; close alone would not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> "Sink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def swallow(connection: socket.socket) -> None:
    """Read a connection to its end, then answer with the number of bytes."""
    count, buffer = 0, bytearray(len(PIECE))
    with connection:
        try:
            while got := connection.recv_into(buffer):
                count += got
            connection.sendall(struct.pack("!Q", count))
        except OSError:
            return


def blast(address: str, port: int, *, seconds: float | int = BLAST_S) -> float:
    """Return the bytes/s of one TCP stream, from its first byte to the word that all came.

    Raises:
        OSError: if the way there is closed.
    """
    with socket.create_connection((address, port), timeout=20) as stream:
        began_s, sent = time.monotonic(), 0
        while sent < BLAST_BYTES and time.monotonic() - began_s < seconds:
            stream.sendall(PIECE)
            sent += len(PIECE)
        stream.shutdown(socket.SHUT_WR)
        answer = stream.recv(8)
        took_s = time.monotonic() - began_s
    came = struct.unpack("!Q", answer)[0] if len(answer) == 8 else 0
    return came / took_s


def check_route(route: Route, *, alone: bool) -> Check:
    """Say whether the way to a host is one for a job's traffic.

    Args:
        alone: whether all processes of the job are on this host, which loopback is fine for.
    """
    name, rule = f"route to {route.to}", "not loopback, and a NIC faster than 1 Gb/s"
    if not route.address:
        remedy = "write its address down (/etc/hosts), or ask for it by address"
        return check(name, "fail", "its name is not known here", threshold=rule, remedy=remedy)
    if not route.source:
        remedy = "ip route get shows why; look at the network's masks and the gateway"
        return check(name, "fail", f"no way to {route.address}", threshold=rule, remedy=remedy)
    value = f"{route.nic or 'no known NIC'} ({route.source}), {_speed(route.nic_bps)}"
    if route.is_loopback:
        remedy = "take a name or an address that peers can reach; look at /etc/hosts"
        return check(name, passed(alone), f"{value}, loopback", threshold=rule, remedy=remedy)
    return check(
        name,
        passed(alone or route.nic_bps == 0 or route.nic_bps > SLOW_NIC_BPS),
        value,
        threshold=rule,
        remedy="this is a management network: name the fast one, with an address of it as the "
        "coordinator's, and NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME set to its NIC",
    )


def check_flows(flows: Sequence[Flow], *, min_bps: float | int) -> tuple[Check, ...]:
    """Say for each pair of hosts whether data comes through as fast as it must.

    A host is named by itself when every stream that it sends, or every one it receives, is slow.
    """
    slow = [flow for flow in flows if flow.bps < min_bps]
    rule = f"at least {_speed(min_bps)} a stream"
    if not slow:
        rates = sorted(flow.bps for flow in flows)
        told = f"{_speed(rates[0])} to {_speed(rates[-1])} over {len(rates)} streams"
        return (check("bandwidth", "ok", told, threshold=rule, remedy=""),)
    return tuple(
        check(
            f"bandwidth {flow.source} -> {flow.target}",
            "fail",
            _speed(flow.bps),
            threshold=rule,
            remedy=_who(flow, flows, min_bps=min_bps),
        )
        for flow in slow
    )


def _who(flow: Flow, flows: Sequence[Flow], *, min_bps: float | int) -> str:
    """Return what to look at: a host whose every stream is slow, or the pair."""
    for process in (flow.source, flow.target):
        own = [f for f in flows if process in (f.source, f.target)]
        others = [f for f in flows if process not in (f.source, f.target)]
        if all(f.bps < min_bps for f in own) and any(f.bps >= min_bps for f in others):
            return f"every stream of process {process} is slow: look at its NIC, cable and port"
    return "look at both NICs, and at the switch between them"


def _speed(bps: float | int) -> str:
    return f"{bps / GIGABIT:.2f} Gb/s" if bps else "speed not told"


def _number(nic: str, name: str) -> int:
    lines = _lines(Path("/sys/class/net") / nic / name) if nic else []
    try:
        return int(lines[0]) if lines else 0
    except ValueError:
        return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []
