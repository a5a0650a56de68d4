"""Agents as real processes: they lose a process, then a host, and meet again; they are stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxfound.config.load import save
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.ports import free_ports
from jaxfound.resources.metrics import read_metrics
from tests.end_to_end.launched import IMPORTS, OPTIONS, STEPS
from tests.training.tiny import of_kind, run, same, state_at, tiny

# Slow: many times two processes that start and compile.
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Hosts:
    """Two simulated hosts with an agent each."""

    def __init__(self, folder: Path):
        self.cfg = tiny(folder, *OPTIONS, "watch.hang_s=60")
        self.metrics = Path(self.cfg.runs_dir) / self.cfg.name / "metrics.jsonl"
        self.folder, self.port = folder, free_ports()
        save(self.cfg, folder / "tiny.yaml")

    def agent(self, rank: int, *, failures: str = "") -> subprocess.Popen:
        """The agent of one host."""
        place = ["--node-rank", str(rank), "--coordinator", f"127.0.0.1:{self.port}"]
        return self.started(*place, log=f"agent-{rank}.log", JAXFOUND_FAILPOINT=failures)

    def started(self, *place: str, log: str = "agent-0.log", **env: str) -> subprocess.Popen:
        """An agent; without a place it is that of both hosts."""
        command = [sys.executable, "-m", "jaxfound.cli.main", "launch", "--simulate-hosts", "2"]
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [*command, *place, "--", "train", str(self.folder / "tiny.yaml")],
                env={**os.environ, "PYTHONPATH": IMPORTS, **env},
                stdout=out,
                stderr=out,
            )

    def wait_for(self, agent: subprocess.Popen, kind: str, *, steps: int) -> None:
        """Wait until so many steps were made after the first event of a kind."""
        while True:
            assert agent.poll() is None, (self.folder / "agent-0.log").read_text()
            kinds = self.kinds()
            if kind in kinds and kinds[kinds.index(kind) :].count("train") >= steps:
                return
            time.sleep(0.2)

    def kinds(self) -> list:
        if not self.metrics.exists():
            return []
        return [record["event"] for record in read_metrics(self.metrics, superseded="mark")]


def test_agents_meet_again_after_a_lost_process_and_after_a_lost_host(tmp_path):
    hosts = Hosts(tmp_path)
    failures = "step:3:kill@1,data:3:hang@1"
    first, second = (hosts.agent(rank, failures=failures) for rank in range(2))
    try:
        hosts.wait_for(first, "resume", steps=2)
        # The host of process 1 goes, and comes back as one that knows nothing.
        second.kill()
        second.wait()
        second = hosts.agent(1)
        assert [agent.wait(300) for agent in (first, second)] == [0, 0]
    finally:
        for agent in (first, second):
            agent.kill()
            agent.wait()
    alone = tiny(tmp_path / "alone", *OPTIONS)
    events = run(alone, num_devices=2)
    losses = [r["loss"] for r in read_metrics(hosts.metrics) if r["event"] == "train"]
    assert losses == of_kind(events, "train", "loss")
    assert same(state_at(hosts.cfg, STEPS), state_at(alone, STEPS))
    assert hosts.kinds().count("resume") == 2


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def finish_and_compare(hosts: Hosts) -> None:
    """Let the job go on to its end, which is that of a run that nobody stopped."""
    agent = hosts.started()
    assert agent.wait(300) == 0
    alone = tiny(hosts.folder / "alone", *OPTIONS)
    losses = of_kind(run(alone, num_devices=2), "train", "loss")
    assert [r["loss"] for r in read_metrics(hosts.metrics) if r["event"] == "train"] == losses
    assert same(state_at(hosts.cfg, STEPS), state_at(alone, STEPS))


def test_two_notices_are_one_and_the_job_saves_and_leaves(hosts):
    agent = hosts.started()
    try:
        hosts.wait_for(agent, "train", steps=3)
        agent.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) == Exit.PREEMPTED
    finally:
        agent.kill()
    assert hosts.kinds().count("stopped") == 1
    finish_and_compare(hosts)
    assert hosts.kinds().count("resume") == 1


def test_a_notice_while_processes_compile_ends_the_job_at_once(hosts):
    # A cache of its own: with the one of other tests there is little to compile.
    agent = hosts.started(JAX_COMPILATION_CACHE_DIR=str(hosts.folder / "compiled"))
    try:
        while not hosts.metrics.with_name("config.yaml").exists():
            assert agent.poll() is None
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == Exit.PREEMPTED
    finally:
        agent.kill()
    assert hosts.kinds() == []
    finish_and_compare(hosts)
