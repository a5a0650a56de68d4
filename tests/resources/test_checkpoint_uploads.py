"""Uploads that are stopped, refused, slow or not wanted any more."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager, publish, uploader
from jaxfound.resources.checkpoint.manifest import Key
from tests.resources import probe
from tests.resources.hosts import Hosts, flip, largest, records, state_at, work

pytestmark = pytest.mark.multidevice

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_that_rots_before_it_is_copied_is_named_and_nothing_is_published(tmp_path):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2)
    rotten = largest(hosts.locals[0].root / "0" / "2" / "state")
    flip(rotten)
    assert hosts.upload() == [True, True], "no host waits for a save that one has refused"
    assert hosts.restored() is None
    said = [r for r in records(hosts, 0) if r["kind"] == "damaged"]
    assert rotten.name in said[0]["error"]
    hosts.save(4)
    hosts.upload()
    assert hosts.restored() == 4


def test_parts_that_are_not_of_one_state_are_not_joined(tmp_path):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2, processes=[0])
    other = Hosts(tmp_path, 2)
    other.job = lambda step, process: Hosts.job(other, 3, process)._replace(step=2)
    other.save(2, processes=[1])
    hosts.upload()
    assert hosts.restored() is None
    assert any("not of one state" in str(r.get("error")) for r in records(hosts, 1))


def test_parts_of_different_attempts_wait_for_their_own(tmp_path):
    Hosts(tmp_path, 2, attempt="first").save(2, processes=[0])
    second = Hosts(tmp_path, 2, attempt="second")
    second.save(2, processes=[1])
    second.upload()
    assert second.restored() is None
    second.save(2, processes=[0])
    second.upload()
    assert second.restored() == 2


def test_an_uploader_that_gives_up_says_whose_part_is_missing(tmp_path):
    hosts = Hosts(tmp_path, 3)
    hosts.save(2, processes=[0, 2])
    hosts.upload(processes=[0, 2])
    said = [r for r in records(hosts, 2) if r["kind"] == "failed"]
    assert said[0]["key"] == [2, hosts.attempt]
    assert "parts of processes [1]" in said[0]["error"]


def test_an_upload_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    hosts = Hosts(tmp_path, 1)
    hosts.save(2)
    copied = []

    class Stopped(Exception):
        pass

    def stop_at_third(place):
        if place == "save.upload":
            copied.append(place)
            if len(copied) == 3:
                raise Stopped

    monkeypatch.setattr(uploader, "reach", stop_at_third)
    with pytest.raises(Stopped):
        hosts.upload()
    there = [p for p in hosts.shared.root.rglob("*") if p.is_file() and p.suffix != ".part"]
    stamps = {p: p.stat().st_mtime_ns for p in there if "uploading" in str(p)}
    assert len(stamps) == 2
    final = {
        Path(str(p).replace(f"2.{hosts.attempt}.uploading", "2")): s for p, s in stamps.items()
    }
    assert hosts.upload() == [True]
    assert {p: p.stat().st_mtime_ns for p in final} == final, "finished files are not copied again"
    assert hosts.restored() == 2


def test_a_join_that_was_stopped_is_done_again_by_any_host(tmp_path, monkeypatch):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2)
    real = publish.manifests.write

    def stop(directory, manifest, *, name="manifest.json"):
        if name == "manifest.json":
            raise OSError(errno.EIO, "stopped")
        real(directory, manifest, name=name)

    monkeypatch.setattr(publish.manifests, "write", stop)
    assert hosts.upload() == [False, False]
    assert hosts.restored() is None
    monkeypatch.setattr(publish.manifests, "write", real)
    assert hosts.upload(processes=[0]) == [True]
    assert hosts.restored() == 2


def test_a_full_shared_disk_is_said_and_tried_again_and_older_steps_stay(hosts, monkeypatch):
    hosts.save(6)
    real = uploader.Uploader._copy
    full = OSError(errno.ENOSPC, "No space left on device", str(hosts.shared.root))
    monkeypatch.setattr(uploader.Uploader, "_copy", lambda *a: (_ for _ in ()).throw(full))
    assert hosts.upload() == [False, False]
    assert hosts.restored() == 4
    assert any("No space left" in str(r.get("error")) for r in records(hosts, 0))
    monkeypatch.setattr(uploader.Uploader, "_copy", real)
    assert hosts.upload() == [False, True]
    assert hosts.restored() == 6


def test_a_full_own_disk_fails_the_save_and_leaves_the_step_before(tmp_path, own_disk, mount):
    mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", at=tmp_path / "disk")
    small = {"w": jax.numpy.arange(256.0)}
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(2, small, {})
        slot = manager._transit.saver().directory
        with pytest.raises(CheckpointError, match=r"No space left.*\[2\] are intact"):
            manager.save(4, {"w": jax.numpy.arange(200_000.0)}, {})
        assert os.listdir(slot) == ["2"], "what the failed save wrote is freed"
        assert manager.restore_latest(like=probe.abstract(small)).step == 2
        work(manager)
        assert manager.steps() == (2,)


def test_a_read_only_shared_tier_is_said_and_the_local_step_is_restored(tmp_path, own_disk, mount):
    mount("-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", at=tmp_path / "ro")
    state = state_at(2, num_devices=4)
    with CheckpointManager(tmp_path / "ro" / "c", **own_disk) as manager:
        manager.save(2, state, {})
        assert not work(manager)
        assert [note.kind for note in manager.take_notes()] == ["upload_failed"]
        assert manager.restore_latest(like=probe.abstract(state)).step == 2


def test_a_real_full_shared_disk_leaves_the_committed_step(tmp_path, own_disk, mount):
    mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", at=tmp_path / "small")
    small = {"w": jax.numpy.arange(256.0)}
    with CheckpointManager(tmp_path / "small" / "c", **own_disk) as manager:
        manager.save(2, small, {})
        assert work(manager)
        manager.save(4, {"w": jax.numpy.arange(200_000.0)}, {})
        assert not work(manager)
        failed = [note for note in manager.take_notes() if note.kind == "upload_failed"]
        assert "No space left" in failed[0].values["error"]
        assert manager.steps() == (2,)


def test_the_rate_of_an_upload_is_limited(tmp_path):
    hosts = Hosts(tmp_path, 1)
    hosts.save(2)
    slept = []
    done = hosts.upload(rate_bps=1000, clock=lambda: 0.0, sleep=slept.append)
    assert done == [True]
    sizes = [f.num_bytes for n, f in next(hosts.locals[0].parts())[1].files.items()]
    assert sum(slept) == pytest.approx(sum(sizes) / 1000)


def test_one_uploader_runs_for_a_host_and_run(tmp_path):
    with uploader.only_one(tmp_path) as first, uploader.only_one(tmp_path) as second:
        assert first is not None
        assert second is None
    with uploader.only_one(tmp_path) as again:
        assert again is not None


@pytest.mark.multiprocess
def test_an_uploader_leaves_processor_and_disk_to_training_from_its_start(tmp_path):
    local = Hosts(tmp_path, 1).locals[0]
    options = uploader.options_of(local, tmp_path / "shared", mbps=0, keep=0, url="")
    child = uploader.start(options, root=local.root)
    assert child is not None
    try:
        session = Path(f"/proc/{child}/autogroup")
        shared_by_session = session.exists() and session.read_text().endswith("nice 10\n")
        assert shared_by_session or not Path("/proc/self/autogroup").exists()
        # The programs that ask for it take their moment.
        while os.getpriority(os.PRIO_PROCESS, child) < uploader.NICENESS:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_line_that_is_half_written_is_read_the_next_time(tmp_path):
    path = tmp_path / uploader.RECORD
    line = json.dumps({"kind": "done", "key": [2, "a"]})
    path.write_text(f"{line}\n{line[:5]}")
    first, position = uploader.read_records(tmp_path)
    path.write_text(f"{line}\n{line}\n")
    second, end = uploader.read_records(tmp_path, first_byte=position)
    assert first == second == [{"kind": "done", "key": [2, "a"]}]
    assert uploader.read_records(tmp_path, first_byte=end) == ([], end)


def test_uploads_that_a_newer_step_has_overtaken_are_cleared_away(tmp_path):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2)
    hosts.upload(processes=[0])
    assert hosts.shared.begun().keys() == {Key(2, hosts.attempt)}
    hosts.save(4)
    hosts.upload()
    hosts.upload()
    assert hosts.shared.begun() == {}
    assert hosts.restored() == 4


# Place, and whether saves go to an own disk first: the steps a new start may find.
KILLS = {
    "save.local": {2},
    "save.manifest": {2},
    "restore": {2},
    "save.local@disk": {2},
    "save.manifest@disk": {2},
    "save.upload@disk": {4},
    "save.merge@disk": {4},
    "restore@disk": {2},
}


@pytest.mark.multiprocess
def test_a_kill_at_any_place_leaves_what_was_committed_and_the_next_start_goes_on(tmp_path):
    command = [sys.executable, "-m", "tests.resources.checkpoint_kill", str(tmp_path), *KILLS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [entry["place"] for entry in told] == list(KILLS)
    for entry in told:
        assert entry["killed"], entry
        assert entry["code"] == 0, entry
        assert entry["after"]["restored"] in KILLS[entry["place"]], entry
        assert entry["after"]["steps"][-1] == 6, entry
