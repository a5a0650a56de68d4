import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager
from jaxfound.resources.control import PeerError
from tests.resources import probe

STATE = {"w": jnp.arange(4.0)}
LIKE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}


def save_all(directory, numbers, *, keep=0):
    with CheckpointManager(directory, keep=keep, mode="sync") as manager:
        for step in numbers:
            manager.save(step, STATE, {"step": step})


@pytest.mark.multiprocess
def test_a_kill_in_the_middle_of_a_write_leaves_the_step_before_and_is_named(tmp_path, caplog):
    command = [sys.executable, "-m", "tests.resources.probe", str(tmp_path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=root) as child:
        assert child.stdout.readline() == "stuck\n"
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / "4.saving" / "state" / "half").exists()
    with CheckpointManager(tmp_path, keep=1) as manager:
        restored = manager.restore_latest(like=probe.abstract(probe.start()))
        assert restored.step == 2
        assert restored.metadata == {"data_position": 2}
        probe.assert_equal(restored.state, probe.numbers(probe.train_to(2)))
        named = [r for r in caplog.records if r.message == "checkpoint.incomplete"]
        assert [r.checkpoint for r in named] == ["4.saving"]
        manager.save(4, probe.train_to(4), {})
        manager.wait()
    assert os.listdir(tmp_path) == ["4"], "the torn save and what keep=1 does not cover are gone"


@pytest.mark.parametrize("torn", ["4.saving", "4"])
def test_a_whole_looking_save_without_its_commit_is_not_a_checkpoint(tmp_path, torn, caplog):
    save_all(tmp_path, [2, 4])
    os.rename(tmp_path / "4", tmp_path / torn)
    if torn == "4":
        (tmp_path / "4" / "manifest.json").unlink()
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() == 2
        assert manager.steps() == (2,)
        assert [r.checkpoint for r in caplog.records] == [torn], "named once, not at every call"


def test_a_failed_save_is_raised_by_the_next_call_and_older_steps_stay(tmp_path, caplog):
    save_all(tmp_path, [2], keep=1)
    manager = CheckpointManager(tmp_path, keep=1, storage=probe.FullDisk())
    manager.save(4, STATE, {})
    with pytest.raises(CheckpointError, match=r"step 4 .*No space left.*\[2\] are intact"):
        manager.save(6, STATE, {}, must=True)
    assert "checkpoint.failed" in caplog.messages
    manager.close()
    assert os.listdir(tmp_path) == ["2"], "what the failed save wrote is freed"
    with CheckpointManager(tmp_path) as reader:
        assert reader.restore(2, like=LIKE).step == 2


@pytest.mark.parametrize("finish", ["wait", "close", "take_reports"])
def test_every_way_to_finish_raises_a_failed_save(tmp_path, finish):
    manager = CheckpointManager(tmp_path, storage=probe.FullDisk())
    manager.save(4, STATE, {})
    while manager.is_saving():
        pass
    with pytest.raises(CheckpointError, match="No space left"):
        getattr(manager, finish)()
    manager.close()


def test_a_save_that_a_lost_process_ended_says_so_and_blames_no_disk(tmp_path):
    storage = probe.FullDisk()

    def lost(directory, arrays):
        raise PeerError("process 0 has ended")

    storage.write = lost
    manager = CheckpointManager(tmp_path, storage=storage)
    manager.save(4, STATE, {})
    with pytest.raises(PeerError, match="process 0 has ended"):
        manager.wait()
    manager.close()


def test_after_a_failed_save_the_same_step_can_be_saved_again(tmp_path):
    storage = probe.FullDisk()
    with CheckpointManager(tmp_path, storage=storage) as manager:
        manager.save(4, STATE, {})
        with pytest.raises(CheckpointError):
            manager.wait()
        storage.write = super(probe.FullDisk, storage).write
        assert manager.save(4, STATE, {})
        manager.wait()
        assert manager.latest() == 4


def test_the_newest_step_is_the_largest_number(tmp_path):
    save_all(tmp_path, [900, 1000, 9000, 10000])
    for name in ("notes", "010", "99999.txt", "-5", "²"):
        (tmp_path / name).mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == (900, 1000, 9000, 10000)
        assert manager.latest() == 10000


@pytest.mark.parametrize(
    ("keep", "left"), [(0, (1, 2, 9, 10, 11)), (1, (11,)), (2, (10, 11)), (9, (1, 2, 9, 10, 11))]
)
def test_keep_counts_the_newest_and_zero_keeps_all(tmp_path, keep, left):
    save_all(tmp_path, [1, 2, 9, 10, 11], keep=keep)
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == left


def test_a_negative_keep_is_refused_and_deletes_nothing(tmp_path):
    save_all(tmp_path, [1, 2])
    with pytest.raises(ValueError, match=r"keep=-1.*0 to keep every"):
        CheckpointManager(tmp_path, keep=-1)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_nothing_is_pruned_before_the_newer_step_is_committed(tmp_path):
    save_all(tmp_path, [2], keep=1)
    storage = probe.GatedStorage()
    with CheckpointManager(tmp_path, keep=1, storage=storage) as manager:
        manager.save(4, STATE, {})
        storage.entered.wait()
        assert manager.steps() == (2,)
        storage.gate.set()
        manager.wait()
        assert manager.steps() == (4,)


def test_the_last_step_is_saved_once(tmp_path):
    with CheckpointManager(tmp_path, keep=0) as manager:
        assert manager.save(4, STATE, {}) == "saved"
        assert manager.save(5, STATE, {}, must=True) == "saved"
        assert manager.save(5, STATE, {}) == "exists"
        assert [report.step for report in manager.take_reports()] == [4, 5]
        assert manager.take_reports() == []


def test_a_restored_step_is_not_saved_again(tmp_path):
    save_all(tmp_path, [5])
    before = (tmp_path / "5" / "manifest.json").stat().st_mtime_ns
    with CheckpointManager(tmp_path) as manager:
        manager.restore_latest(like=LIKE)
        assert manager.save(5, STATE, {}) == "exists"
    assert (tmp_path / "5" / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("step", [3, 5])
def test_a_save_below_a_step_of_another_run_is_refused_with_the_way_out(tmp_path, step):
    save_all(tmp_path, [2, 5])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"\[5\] are committed.*discard_after"):
            manager.save(step, STATE, {})
        manager.restore(2, like=LIKE)
        manager.discard_after(2)
        assert manager.save(step, STATE, {})
        manager.wait()
        assert manager.steps() == (2, step)


def test_a_reader_makes_no_directory(tmp_path):
    with CheckpointManager(tmp_path / "none") as manager:
        assert manager.latest() is None
        assert manager.latest_good() is None
        assert manager.restore_latest(like=LIKE) is None
        with pytest.raises(CheckpointError, match=r"no committed step 7.*\[\]"):
            manager.restore(7, like=LIKE)
    assert not Path(tmp_path / "none").exists()
