"""Training in several processes equals training in one, and goes on through what ends processes."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxfound.config.load import save
from jaxfound.resources.launch.agent import Agent
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.hosts import Asked, places_of
from jaxfound.resources.metrics import read_metrics
from jaxfound.resources.run_directory import RunDirectory
from tests.resources.ports import free_port
from tests.training.tiny import tiny

MEMBER = Path(__file__).with_name("member.py")
STEPS = 14
# Rows that two and three processes can share; a hang is one after some seconds.
OPTIONS = (
    f"train.steps={STEPS}", "train.batch_size=6", "optimizer.warmup_steps=2", "checkpoint.every=2",
    "train.eval_batches=1", "watch.hang_s=6", "watch.slow_s=120",
)  # fmt: skip

pytestmark = pytest.mark.multiprocess


class Ended(NamedTuple):
    """A run that is over: what the agent told, the run's numbers, and its last state."""

    events: list
    directory: RunDirectory
    records: list
    state: list

    @property
    def code(self):
        return self.events[-1].values["code"]

    def of_kind(self, kind):
        return [event.values for event in self.events if event.kind == kind]

    @property
    def losses(self):
        return {r["step"]: r["loss"] for r in self.records if r["event"] == "train"}


def launched(folder: Path, *, hosts: int, devices: int, failures: str = "") -> Ended:
    """Train on simulated hosts until the agent is done."""
    cfg = tiny(folder, *OPTIONS)
    save(cfg, folder / "tiny.yaml")
    directory = RunDirectory(Path(cfg.runs_dir) / cfg.name)
    asked = Asked(simulate_hosts=hosts, devices_per_host=devices)
    places = places_of(
        asked, task=None, accelerators=0, host="here", run_id="run", port=free_port()
    )
    command = (sys.executable, str(MEMBER), "train", str(folder / "tiny.yaml"), "--prompt", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFOUND_FAILPOINT", failures)
        patch.setenv("PYTHONPATH", os.pathsep.join([".", *sys.path]))
        events = list(Agent(command, places, directory).run())
    files = sorted(directory.checkpoints.glob("*.npz"), key=lambda p: int(p.stem))
    with np.load(files[-1]) as file:
        state = [file[str(i)] for i in range(len(file.files))]
    return Ended(events, directory, list(read_metrics(directory.metrics)), state)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), hosts=2, devices=1)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("one"), hosts=1, devices=2)


def test_two_processes_are_bit_equal_to_one_on_the_same_mesh(one_process, two_processes):
    assert (one_process.code, two_processes.code) == (0, 0)
    assert len(two_processes.losses) == STEPS
    assert two_processes.losses == one_process.losses
    for mine, other in zip(two_processes.state, one_process.state, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_each_step_is_recorded_once_by_one_process(two_processes):
    steps = [r["step"] for r in two_processes.records if r["event"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    log = two_processes.directory.logs(0) / "process-1.log"
    assert "step 1:" not in log.read_text()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Four attempts of two processes, each ended in another way, and a fifth."""
    failures = "step:1:term@1,step:3:raise@1,data:3:hang@1,step:2:kill@0"
    return launched(tmp_path_factory.mktemp("failing"), hosts=2, devices=1, failures=failures)


def test_a_run_that_was_interrupted_in_every_way_is_the_run_that_was_not(
    interrupted, two_processes
):
    assert interrupted.code == 0
    assert interrupted.losses == two_processes.losses
    for mine, other in zip(interrupted.state, two_processes.state, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_each_end_has_the_code_that_says_what_it_was(interrupted):
    codes = [v["code"] for v in interrupted.of_kind("ended")]
    assert codes == [Exit.PREEMPTED, Exit.CRASH, Exit.HANG, -9, 0]
    reasons = [v["process"] for v in interrupted.of_kind("ended")]
    assert (reasons[1], reasons[3]) == (1, 0)


def test_a_hang_names_who_holds_up_the_others_and_shows_the_line(interrupted):
    logs = interrupted.directory.logs(2)
    said = (logs / "process-0.log").read_text() + (logs / "process-1.log").read_text()
    assert "held up by process 1" in said
    assert (logs / "process-0.stacks.txt").exists()
    stacks = (logs / "process-1.stacks.txt").read_text()
    assert "failpoint.py" in stacks
    assert "in _hang" in stacks


def test_a_notice_to_one_process_stops_both_at_one_step(interrupted):
    stopped = [r for r in interrupted.records if r["event"] == "stopped"]
    assert [r["signal"] for r in stopped] == ["SIGTERM"]
    resumes = [r["step"] for r in interrupted.records if r["event"] == "resume"]
    assert resumes[0] == stopped[0]["step"]


@pytest.mark.slow
def test_three_processes_are_equal_to_one_up_to_the_order_of_sums(tmp_path):
    three = launched(tmp_path / "three", hosts=3, devices=1)
    one = launched(tmp_path / "one", hosts=1, devices=3)
    assert three.losses == pytest.approx(one.losses, rel=1e-5)
    for mine, other in zip(three.state, one.state, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
