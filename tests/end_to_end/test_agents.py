"""An agent a host, as real processes: they lose a process, then a host, and meet again."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxfound.config.load import save
from jaxfound.resources.metrics import read_metrics
from tests.end_to_end.launched import IMPORTS, OPTIONS, STEPS
from tests.resources.ports import free_port
from tests.training.tiny import of_kind, run, same, state_at, tiny

# Slow: five times two processes that start and compile.
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Hosts:
    """Two simulated hosts with an agent each."""

    def __init__(self, folder: Path):
        self.cfg = tiny(folder, *OPTIONS, "watch.hang_s=60")
        self.metrics = Path(self.cfg.runs_dir) / self.cfg.name / "metrics.jsonl"
        self.folder, self.port = folder, free_port()
        save(self.cfg, folder / "tiny.yaml")

    def agent(self, rank: int, *, failures: str = "") -> subprocess.Popen:
        place = ["--simulate-hosts", "2", "--node-rank", str(rank)]
        place += ["--coordinator", f"127.0.0.1:{self.port}"]
        command = [sys.executable, "-m", "jaxfound.cli.main", "launch", *place]
        with (self.folder / f"agent-{rank}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--", "train", str(self.folder / "tiny.yaml")],
                env={**os.environ, "PYTHONPATH": IMPORTS, "JAXFOUND_FAILPOINT": failures},
                stdout=log,
                stderr=log,
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
