"""Processes find each other, or are told who is missing."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxfound.resources.control import ControlPlane, LocalStore, PeerError

# Each of these processes tells what it saw, as one line of JSON.
MEMBER = """
import json, sys
import jax
from jaxfound.resources.control import ControlPlane, PeerError
port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(
    f"127.0.0.1:{port}", 3, process, cluster_detection_method="deactivate",
    shutdown_timeout_seconds=20,
)
plane = ControlPlane.of_job(timeout_s=60)
rounds = [plane.gather("turn", f"{process}-{turn}") for turn in range(4)]
word = plane.broadcast("word", f"from {process}")
plane.barrier("rounds are over")
left = sorted(plane.store.read("jaxfound/turn"))
missing = []
if process:
    try:
        plane.barrier("without 0", timeout_s=0.5)
    except PeerError as error:
        missing = list(error.missing)
plane.barrier("end")
print(json.dumps({"rounds": rounds, "word": word, "left": left, "missing": missing}))
"""


def planes(count: int) -> list[ControlPlane]:
    """Return the planes of a job whose processes are threads."""
    store = LocalStore()
    return [ControlPlane(process, count, store, timeout_s=20) for process in range(count)]


def test_a_lone_process_waits_for_nobody() -> None:
    plane = ControlPlane.of_job()
    assert (plane.process, plane.count) == (0, 1)
    assert plane.gather("name", "value") == ("value",)
    assert plane.broadcast("name", "other") == "other"
    plane.barrier("name")


def test_values_come_in_the_order_of_the_processes() -> None:
    members = planes(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda plane: plane.gather("x", f"of {plane.process}"), members))
    assert found == [("of 0", "of 1", "of 2")] * 3


def test_rounds_of_one_name_do_not_mix() -> None:
    members = planes(4)

    def talk(plane: ControlPlane) -> list[tuple[str, ...]]:
        return [plane.gather("x", str(10 * turn + plane.process)) for turn in range(50)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(talk, members))
    for turns in found:
        assert turns == [tuple(str(10 * t + p) for p in range(4)) for t in range(50)]
    # Old rounds are not kept: a long job would fill the service.
    assert len(members[0].store.read("jaxfound/x")) <= 2 * 4


def test_who_is_missing_is_named() -> None:
    first, second, _ = planes(3)
    second.store.put("jaxfound/save/0/1", "")
    with pytest.raises(PeerError, match=r"at 'save' for processes \[2\] of 3") as caught:
        first.barrier("save", timeout_s=0.05)
    assert caught.value.missing == (2,)


@pytest.mark.multiprocess
def test_the_coordination_service_keeps_the_same_promises() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, port, str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 3, [e for _, e in outputs]
    told = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    for process, saw in enumerate(told):
        assert saw["rounds"] == [[f"{p}-{turn}" for p in range(3)] for turn in range(4)]
        assert saw["word"] == "from 0"
        assert {name.split("/")[0] for name in saw["left"]} <= {"2", "3"}
        assert saw["missing"] == ([0] if process else [])
