"""Faults planted in hosts made of network namespaces: each is named, and nothing else is.

This machine's own limits (open files, locked memory) may warn; they are the same on every host.
"""

import re
import subprocess
import sys

import pytest

from tests.resources.namespaces import PORT, Hosts, told, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made"),
]
# A tenth of what a job needs, which a busy machine still carries between namespaces, and a NIC that
# is slower than that.
MIN_BPS, SLOW = 0.1e9 / 8, "30mbit"
LISTEN = """
import socket, sys
held = socket.create_server(("", int(sys.argv[1])))
print("held", flush=True)
while True:
    held.accept()[0].sendall(b"SSH-2.0-planted\\r\\n")
"""


@pytest.fixture(scope="module")
def switch():
    with Hosts(3) as three:
        yield three


@pytest.fixture
def hosts(switch):
    yield switch
    switch.end()


def failed(checks) -> set[str]:
    return {name for verdict, name in checks if verdict == "fail"}


def test_hosts_that_are_well_pass_every_check(hosts, tmp_path):
    asked = {"shared_dir": str(tmp_path / "shared"), "write_bytes": 2**20, "min_bps": MIN_BPS}
    started = [hosts.start(i, tmp_path, **asked) for i in range(3)]
    first, *others = [told(process) for process in started]
    assert failed(first) == set()
    named = {"peers", "clocks", "bandwidth", "shared disk", "local disk", "routes to peers"}
    assert named <= {name for verdict, name in first if verdict == "ok"}
    assert "eth0 (10.77.0." in first["ok", "routes to peers"]["value"]
    assert [set(other) for other in others] == [set(first)] * 2, "all hosts tell the same"


def test_a_slow_nic_a_wrong_clock_and_an_old_package_are_each_named(hosts, tmp_path):
    old = tmp_path / "old" / "optax-0.2.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.2.1\n")
    hosts.slow_down(1, rate=SLOW)
    started = [
        hosts.start(0, tmp_path, min_bps=MIN_BPS),
        hosts.start(1, tmp_path, min_bps=MIN_BPS),
        hosts.start(2, tmp_path, min_bps=MIN_BPS, skew_s=30.0, path=str(old.parent)),
    ]
    checks = told(started[0])
    slow = {f"bandwidth {a} -> {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))}
    assert failed(checks) == {*slow, "clocks", "optax"}
    assert "every stream of process 1 is slow" in checks["fail", "bandwidth 0 -> 1"]["remedy"]
    value = checks["fail", "clocks"]["value"]
    off = re.fullmatch(r"process 2 is ([-+\d.,]+) ms off process 0", value)
    assert off, value
    assert float(off[1].replace(",", "")) == pytest.approx(30e3, abs=1e3)
    assert checks["fail", "optax"]["where"].startswith("process 2")
    assert ("ok", "peers") in checks
    assert all(failed(told(process)) == failed(checks) for process in started[1:])


def test_a_host_that_does_not_come_is_named_within_the_limit(hosts, tmp_path):
    # One of those that come names a shared folder and the other does not: nobody waits for it.
    shared = {"shared_dir": str(tmp_path / "shared")}
    started = [
        hosts.start(0, tmp_path, limit_s=6, min_bps=MIN_BPS),
        hosts.start(2, tmp_path, limit_s=6, min_bps=MIN_BPS, **shared),
    ]
    for process in started:
        checks = told(process)
        assert failed(checks) == {"peers", "shared disk"}
        assert "none on processes [0]" in checks["fail", "shared disk"]["value"]
        assert checks["fail", "peers"]["value"] == "process 1 is absent"


def test_a_port_that_another_program_holds_is_named_by_both_ends(hosts, tmp_path):
    command = ["ip", "netns", "exec", hosts.name(0), sys.executable, "-c", LISTEN, str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        started = [hosts.start(i, tmp_path, limit_s=6) for i in (0, 2)]
        try:
            first, other = [told(process) for process in started]
        finally:
            holder.kill()
    for checks in (first, other):
        assert failed(checks) == {"coordinator port"}
        assert ("skip", "peers") in checks
    assert (
        f"port {PORT} of this host: Address already in use"
        in (first["fail", "coordinator port"]["value"])
    )
    assert "is not `jaxfound doctor`" in other["fail", "coordinator port"]["value"]
