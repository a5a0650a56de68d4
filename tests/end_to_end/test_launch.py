"""Training in several processes equals training in one, and goes on through what ends processes."""

import numpy as np
import pytest

from jaxfound.resources.launch.exits import Exit
from tests.end_to_end.launched import OPTIONS, STEPS, launched, told
from tests.training.tiny import of_kind, run, same, state_at, tiny

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), hosts=2, devices=1)


def test_two_processes_are_bit_equal_to_one_on_the_same_mesh(tmp_path, two_processes):
    cfg = tiny(tmp_path, *OPTIONS)
    losses = of_kind(run(cfg, num_devices=2), "train", "loss")
    assert two_processes.code == 0
    assert list(two_processes.losses.values()) == losses
    assert same(two_processes.state, state_at(cfg, STEPS))


def test_each_step_is_recorded_once_by_one_process(two_processes):
    steps = [r["step"] for r in two_processes.records if r["event"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    log = two_processes.directory.logs(0) / "process-1.log"
    assert "step 1:" not in log.read_text()


def test_a_run_that_was_killed_in_a_save_is_the_run_that_was_not(tmp_path, two_processes):
    # The short form of test_kill_drill.py: arrays of step 4 are on disk, what commits them is not.
    killed = launched(tmp_path, hosts=2, devices=1, failures="save.manifest:2:kill@1")
    assert killed.code == 0
    assert [v["code"] for v in killed.of_kind("ended")] == [-9, 0]
    assert [r["step"] for r in killed.records if r["event"] == "resume"] == [2]
    assert [r["step"] for r in killed.records if r["event"] == "train"] == [*range(1, STEPS + 1)]
    assert killed.losses == two_processes.losses
    assert rates(killed) == rates(two_processes)
    assert same(killed.state, two_processes.state)


def rates(run):
    """Learning rates, step by step."""
    return [r["learning_rate"] for r in run.records if r["event"] == "train"]


def again(two_processes, *overrides):
    """Start the job of a finished run again; return what its agent tells, and what it touched."""
    there = two_processes.directory
    kept = [there.metrics, there.config, *there.checkpoints.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in kept}
    folder = there.path.parent.parent
    cfg = tiny(folder, *OPTIONS, *overrides)
    events = told(cfg, folder, hosts=2, devices=1)
    return events, [path for path, time in before.items() if path.stat().st_mtime_ns != time]


def test_a_finished_job_that_is_started_again_is_done_and_touches_no_file(two_processes):
    events, touched = again(two_processes)
    assert [e.kind for e in events if e.kind != "line"] == ["started", "ended", "over"]
    assert (events[-1].values["code"], touched) == (Exit.DONE, [])


def test_a_job_that_is_past_its_end_is_refused_by_all_and_not_tried_again(two_processes):
    events, touched = again(two_processes, "train.steps=3")
    assert [e.kind for e in events if e.kind != "line"] == ["started", "ended", "over"]
    assert (events[-1].values["code"], touched) == (Exit.REFUSED, [])
    assert "holds step 14, but train.steps=3" in events[-2].values["tail"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Four attempts of two processes, each ended in another way, and a fifth."""
    failures = "step:1:term@1,step:3:raise@1,data:3:hang@1,step:2:kill@0"
    return launched(tmp_path_factory.mktemp("failing"), hosts=2, devices=1, failures=failures)


@pytest.mark.slow
def test_a_run_that_was_interrupted_in_every_way_is_the_run_that_was_not(
    interrupted, two_processes
):
    assert interrupted.code == 0
    assert interrupted.losses == two_processes.losses
    assert same(interrupted.state, two_processes.state)


@pytest.mark.slow
def test_each_end_has_the_code_that_says_what_it_was(interrupted):
    codes = [v["code"] for v in interrupted.of_kind("ended")]
    assert codes == [Exit.PREEMPTED, Exit.CRASH, Exit.HANG, -9, 0]
    reasons = [v["process"] for v in interrupted.of_kind("ended")]
    assert (reasons[1], reasons[3]) == (1, 0)


@pytest.mark.slow
def test_a_hang_names_who_holds_up_the_others_and_shows_the_line(interrupted):
    logs = interrupted.directory.logs(2)
    said = (logs / "process-0.log").read_text() + (logs / "process-1.log").read_text()
    assert "held up by process 1" in said
    assert (logs / "process-0.stacks.txt").exists()
    stacks = (logs / "process-1.stacks.txt").read_text()
    assert "failpoint.py" in stacks
    assert "in _hang" in stacks


@pytest.mark.slow
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
    assert three.state.keys() == one.state.keys()
    for name, values in three.state.items():
        np.testing.assert_allclose(values, one.state[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_hosts(tmp_path, two_processes):
    cfg = tiny(tmp_path, *OPTIONS)
    lost = told(cfg, tmp_path, hosts=3, devices=1, failures="step:6:kill@1", max_restarts=0)
    assert lost[-1].values["code"] == 128 + 9
    fewer = launched(tmp_path, hosts=2, devices=1)
    assert fewer.code == 0
    assert [r["event"] for r in fewer.records].count("resume") == 1
    # Its first steps were summed over three devices, which is another order.
    assert fewer.losses == pytest.approx(two_processes.losses, rel=1e-5)
