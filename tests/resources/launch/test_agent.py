"""An agent and its processes: small programs that end, hang or are stopped, no JAX among them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxfound.resources.launch.agent import Agent, environment
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.place import Place
from jaxfound.resources.run_directory import RunDirectory

# What the programs begin with: who they are, and how they tell how far they are.
WHO = """
import os, signal, sys, time
from pathlib import Path
from jaxfound.resources.launch.place import Place
from jaxfound.resources.pulse import Beat, write_heartbeat
me = Place.from_env()
def beat(committed, number=1):
    write_heartbeat(me.heartbeat, Beat(number, 0, "wait", 0.0, committed), attempt=me.attempt)
"""


def agent_of(folder: Path, program: str, *, hosts=2, first=0, **options) -> Agent:
    places = [
        Place("127.0.0.1:1", hosts, p, run_id="run", host_id=f"simulated-{p}")
        for p in range(first, hosts)
    ]
    command = (sys.executable, "-c", WHO + program)
    return Agent(command, places, RunDirectory(folder), **{"silent_s": 0, **options})


def told(agent: Agent) -> tuple[list, int]:
    """Run an agent to its end: what it told, and its exit code."""
    events = list(agent.run())
    assert events[-1].kind == "over"
    return events, events[-1].values["code"]


def of_kind(events, kind):
    return [event.values for event in events if event.kind == kind]


def test_processes_that_are_done_are_not_started_again(tmp_path):
    events, code = told(agent_of(tmp_path, "print('hello', me.process)"))
    assert code == 0
    assert len(of_kind(events, "started")) == 1
    assert (tmp_path / "logs/attempt-0/process-1.log").read_text() == "hello 1\n"


def test_what_process_0_says_on_its_standard_error_is_passed_on(tmp_path):
    events, _ = told(agent_of(tmp_path, "print('word of', me.process, file=sys.stderr)"))
    assert [line["text"] for line in of_kind(events, "line")] == ["word of 0"]
    assert (tmp_path / "logs/attempt-0/process-1.log").read_text() == "word of 1\n"


def test_one_that_is_lost_ends_the_others_and_all_start_again(tmp_path):
    events, code = told(
        agent_of(
            tmp_path,
            "if me.attempt: sys.exit(0)\n"
            "if me.process: os.kill(os.getpid(), signal.SIGKILL)\n"
            "time.sleep(100)",
        )
    )
    assert code == 0
    assert [v["process"] for v in of_kind(events, "ended")] == [1, 0]
    assert of_kind(events, "ended")[0]["code"] == -signal.SIGKILL


def test_the_reason_is_told_with_the_end_of_its_log(tmp_path):
    program = "sys.exit(77 if not me.process else 'the disk is gone')"
    events, code = told(agent_of(tmp_path, program, max_restarts=0))
    (end,) = of_kind(events, "ended")
    assert (end["process"], end["code"], code) == (1, 1, 1)
    assert end["tail"] == "the disk is gone"


@pytest.mark.parametrize("code", [Exit.REFUSED, Exit.CHECKPOINT])
def test_what_cannot_be_done_is_not_tried_again(tmp_path, code):
    events, ended_with = told(agent_of(tmp_path, f"sys.exit({int(code)} if me.process else 77)"))
    assert ended_with == code
    assert len(of_kind(events, "started")) == 1


def test_restarts_that_commit_nothing_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.launch.policy.FIRST_WAIT_S", 0.01)
    program = "beat(min(me.attempt, 2)); sys.exit(3)"
    events, code = told(agent_of(tmp_path, program, hosts=1, max_restarts=2))
    # Attempts 0, 1 and 2 commit a step each, 3 and 4 do not: two restarts in vain, no third.
    assert code == 3
    assert [v["attempt"] for v in of_kind(events, "started")] == [0, 1, 2, 3, 4]


def test_a_process_that_is_silent_is_killed_as_hung(tmp_path):
    program = "if me.attempt: sys.exit(0)\nbeat(0); os.kill(os.getpid(), signal.SIGSTOP)"
    events, code = told(agent_of(tmp_path, program, hosts=1, silent_s=0.5))
    assert code == 0
    assert of_kind(events, "silent")[0]["process"] == 0
    assert of_kind(events, "ended")[0]["code"] == Exit.HANG


def test_the_silent_one_is_the_reason_and_not_those_that_lost_it(tmp_path):
    program = """
if me.attempt: sys.exit(0)
beat(0)
if me.process: os.kill(os.getpid(), signal.SIGSTOP)
for number in range(20):
    time.sleep(0.1)
    beat(0, number)
sys.exit(77)
"""
    events, code = told(agent_of(tmp_path, program, silent_s=1))
    assert code == 0
    first = of_kind(events, "ended")[0]
    assert (first["process"], first["code"]) == (1, Exit.HANG)


STOPPABLE = """
def leave(number, frame):
    sys.exit(76)
signal.signal(signal.SIGTERM, leave)
Path(os.environ["READY"], str(me.process)).touch()
while True: time.sleep(0.1)
"""
STUBBORN = STOPPABLE.replace("leave)", "signal.SIG_IGN)")


def stopped(agent: Agent, ready: Path) -> tuple[list, int]:
    """Run an agent and send this process, where it runs, SIGTERM when its processes are ready."""

    def stop():
        while len(list(ready.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    return told(agent)


def test_a_notice_to_stop_is_passed_on_and_ends_with_its_own_code(tmp_path, monkeypatch):
    (ready := tmp_path / "ready").mkdir()
    monkeypatch.setenv("READY", str(ready))
    events, code = stopped(agent_of(tmp_path, STOPPABLE), ready)
    assert code == Exit.PREEMPTED
    assert len(of_kind(events, "stopping")) == len(of_kind(events, "started")) == 1


def test_a_notice_before_training_ends_as_one_that_had_nothing_to_save(tmp_path, monkeypatch):
    (ready := tmp_path / "ready").mkdir()
    monkeypatch.setenv("READY", str(ready))
    early = STOPPABLE.replace("leave)", "signal.SIG_DFL)")
    assert stopped(agent_of(tmp_path, early), ready)[1] == Exit.PREEMPTED


def test_a_process_that_does_not_stop_is_killed_after_the_grace(tmp_path, monkeypatch):
    (ready := tmp_path / "ready").mkdir()
    monkeypatch.setenv("READY", str(ready))
    begin = time.monotonic()
    _, code = stopped(agent_of(tmp_path, STUBBORN, grace_s=0.5), ready)
    assert code == Exit.HANG
    assert time.monotonic() - begin < 30


def test_a_preempted_process_is_started_again_for_free(tmp_path):
    program = "sys.exit(0 if me.attempt == 5 else 76)"
    events, code = told(agent_of(tmp_path, program, hosts=1, max_restarts=0))
    assert (code, len(of_kind(events, "started"))) == (0, 6)


def test_a_host_without_process_0_waits_at_the_attempt_that_it_never_joined(tmp_path):
    # It fails twice before it joins, joins attempt 3 (the one that is open by then), loses it.
    program = """
tries = Path(os.environ["TRIES"]); tries.open("a").write(f"{me.attempt} ")
count = len(tries.read_text().split())
if count < 3: sys.exit(1)
if count == 3:
    from dataclasses import replace
    me = replace(me, attempt=3)
    beat(5); sys.exit(77)
"""
    os.environ["TRIES"] = str(tmp_path / "tries")
    _, code = told(agent_of(tmp_path, program, first=1))
    assert code == 0
    assert (tmp_path / "tries").read_text().split() == ["0", "0", "0", "4"]


def test_failures_that_are_asked_for_are_of_one_attempt_each():
    env = {
        "JAXFOUND_FAILPOINT": "step:1:kill,data:2:hang",
        "HTTPS_PROXY": "p:1",
        "no_grpc_proxy": "x",
    }
    found = [environment(env, attempt=n, coordinator="node01:1") for n in range(3)]
    assert [e.get("JAXFOUND_FAILPOINT") for e in found] == ["step:1:kill", "data:2:hang", None]
    assert {e["no_grpc_proxy"] for e in found} == {"x,node01"}
    assert {e["HTTPS_PROXY"] for e in found} == {"p:1"}
    assert "no_grpc_proxy" not in environment({}, attempt=0, coordinator="node01:1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_simulated_hosts_see_disks_of_their_own_at_one_path(tmp_path):
    (tmp_path / "nvme").mkdir()
    program = f"""
disk = Path({str(tmp_path / "nvme")!r}); (disk / str(me.process)).touch(); time.sleep(0.5)
print(sorted(p.name for p in disk.iterdir()), file=sys.stderr)
"""
    disks = tmp_path / "disks"
    can = ["unshare", "--mount", "true"]
    if subprocess.run(can, capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    told(agent_of(tmp_path, program, own_disk=tmp_path / "nvme", disks=disks))
    for process in range(2):
        said = (tmp_path / f"logs/attempt-0/process-{process}.log").read_text()
        assert said == f"['{process}']\n"
        assert (disks / f"simulated-{process}" / str(process)).exists()
    assert list((tmp_path / "nvme").iterdir()) == []


def test_nothing_is_left_when_an_agent_is_given_up(tmp_path):
    there = tmp_path / "pid"
    program = f"""
new = Path({str(tmp_path / "new")!r}); new.write_text(str(os.getpid())); new.rename({str(there)!r})
time.sleep(100)
"""
    running = agent_of(tmp_path, program, hosts=1).run()
    assert next(running).kind == "started"
    while not there.exists():
        time.sleep(0.05)
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)


@pytest.mark.slow
def test_a_host_that_fails_twice_in_a_row_is_left_out_if_enough_are_left(tmp_path):
    # The second host of three is broken; the one that was third is process 1 without it.
    program = """
if me.host_id == "simulated-1": sys.exit(3)
if me.num_processes == 3: time.sleep(100)
print(me.host_id, file=sys.stderr)
"""
    events, code = told(agent_of(tmp_path, program, hosts=3, min_hosts=2))
    assert code == 0
    assert of_kind(events, "dropped") == [{"host": "simulated-1", "processes": 2}]
    assert [v["processes"] for v in of_kind(events, "started")] == [[0, 1, 2]] * 2 + [[0, 1]]
    assert (tmp_path / "logs/attempt-2/process-1.log").read_text() == "simulated-2\n"


def test_no_host_is_left_out_when_all_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.launch.policy.FIRST_WAIT_S", 0.01)
    program = "sys.exit(3 if me.process else 77)"
    events, code = told(agent_of(tmp_path, program, min_hosts=2))
    assert (code, of_kind(events, "dropped")) == (3, [])


def test_an_agent_that_is_started_again_goes_on_counting(tmp_path):
    # Another host's log of a later attempt says nothing of this one's.
    program = "print(me.attempt, file=sys.stderr)"
    for attempt, process in ((0, 0), (1, 0), (7, 1)):
        log = tmp_path / f"logs/attempt-{attempt}/process-{process}.log"
        log.parent.mkdir(parents=True)
        log.touch()
    events, _ = told(agent_of(tmp_path, program, hosts=1))
    assert [v["attempt"] for v in of_kind(events, "started")] == [2]
    events, _ = told(agent_of(tmp_path, program, hosts=2, first=1))
    assert [v["attempt"] for v in of_kind(events, "started")] == [7]


@pytest.mark.parametrize(("first", "searches"), [(0, "False"), (1, "True")])
def test_a_host_without_process_0_looks_for_the_attempt(tmp_path, first, searches):
    told(agent_of(tmp_path, "print(me.searches, file=sys.stderr)", first=first))
    assert (tmp_path / "logs/attempt-0/process-1.log").read_text() == f"{searches}\n"
