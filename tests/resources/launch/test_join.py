"""Processes find the attempt that is open, and learn when it closes before they are in."""

import socket
import subprocess
import sys
import threading
import time

import pytest
from jax.errors import JaxRuntimeError

from jaxfound.config.schema import ConfigError
from jaxfound.resources.checkpoint.errors import CheckpointError
from jaxfound.resources.control import PeerError
from jaxfound.resources.launch import join as joining
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.join import exit_code_of, open_attempt, port_of, split_address
from tests.resources.ports import free_port

# Joins a job of two whose process 0 listens, and then does not any more.
EARLY = """
import sys
from jaxfound.resources.launch import join as joining
from jaxfound.resources.launch.place import Place
joining.REFUSALS = 2
joining.join(Place("127.0.0.1:" + sys.argv[1], 2, 1, virtual_devices=1))
"""


@pytest.fixture
def ports(monkeypatch):
    """The lowest of a few ports that nobody else uses."""
    monkeypatch.setattr(joining, "NUM_PORTS", 3)
    monkeypatch.setattr(joining, "PROBE_EVERY_S", 0.01)
    while True:
        base = free_port()
        if base < 65000 and not any(joining.listens("127.0.0.1", base + n) for n in range(3)):
            return base


@pytest.mark.parametrize(
    ("is_open", "first", "found"), [(0, 0, 0), (2, 0, 2), (1, 2, 4), (2, 5, 5)]
)
def test_the_attempt_that_is_open_is_found_wherever_one_begins(ports, is_open, first, found):
    with socket.create_server(("127.0.0.1", port_of(ports, is_open))):
        assert open_attempt("127.0.0.1", ports, first=first, among=3, timeout_s=10) == found
        assert port_of(ports, found) == ports + is_open


def test_only_one_port_is_looked_at_where_the_attempt_is_known(ports):
    with (
        socket.create_server(("127.0.0.1", ports + 1)),
        pytest.raises(PeerError, match="did not listen"),
    ):
        open_attempt("127.0.0.1", ports, first=0, among=1, timeout_s=0.1)


def test_a_process_waits_until_process_0_is_there(ports):
    servers = []

    def later():
        time.sleep(0.2)
        servers.append(socket.create_server(("127.0.0.1", ports + 1)))

    threading.Thread(target=later).start()
    assert open_attempt("127.0.0.1", ports, first=0, among=3, timeout_s=20) == 1
    servers[0].close()


def test_a_process_0_that_never_comes_is_named(ports):
    with pytest.raises(PeerError, match=f"process 0 did not listen at 127.0.0.1:{ports}"):
        open_attempt("127.0.0.1", ports, first=0, among=3, timeout_s=0.05)


@pytest.mark.multiprocess
def test_a_process_that_joins_ends_when_process_0_goes():
    with socket.create_server(("127.0.0.1", 0)) as door:
        child = subprocess.Popen([sys.executable, "-c", EARLY, str(door.getsockname()[1])])
        # It found us, and now talks to us.
        door.accept()[0].close()
        door.accept()[0].close()
    assert child.wait(60) == Exit.PEER


@pytest.mark.parametrize(
    ("address", "parts"), [("node01:29500", ("node01", 29500)), ("[fe80::1]:1", ("fe80::1", 1))]
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["node01", "node01:", ":29500", "node01:http", "node01:65530"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        split_address(address)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 78),
        (CheckpointError("x"), 79),
        (caused(CheckpointError("x"), OSError(28, "No space left on device")), 79),
        (PeerError("x"), 77),
        (JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer"), 77),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 1),
        # A save that a lost process ended is tried again: nothing is wrong with this disk.
        (caused(CheckpointError("x"), PeerError("y")), 77),
        (caused(CheckpointError("x"), JaxRuntimeError("Gloo all-reduce failed")), 77),
        (KeyboardInterrupt(), 130),
        (SystemExit(5), 5),
        (SystemExit(None), 0),
        (ValueError("x"), 1),
    ],
)
def test_the_code_says_what_ended_a_process(error, code):
    assert exit_code_of(error) == code
    assert exit_code_of(ValueError("x"), is_refusal=True) == 78
