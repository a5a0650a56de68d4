"""Saves of several hosts: parts on own disks, brought together, restored anywhere, or named."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.resources.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointError,
    Tiers,
    publish,
    uploader,
)
from jaxfound.resources.checkpoint.leaves import flatten, unwrap_abstract
from jaxfound.resources.checkpoint.manifest import Key, Part
from jaxfound.resources.checkpoint.shards import boxes, needed, owners
from jaxfound.resources.checkpoint.tiers import HOST_ID, LocalTier
from tests.resources import probe
from tests.resources.hosts import Hosts, state_at

pytestmark = pytest.mark.multidevice


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    """Two hosts that have saved steps 2 and 4; both are whole on the shared tier."""
    hosts = Hosts(tmp_path_factory.mktemp("two"), 2)
    for step in (2, 4):
        hosts.save(step)
        hosts.upload()
    return hosts


@pytest.fixture
def hosts(two_hosts, tmp_path):
    """A copy of `two_hosts` to break."""
    shutil.copytree(two_hosts.root, tmp_path, dirs_exist_ok=True)
    copy = Hosts(tmp_path, 2)
    for there, here in zip(two_hosts.locals, copy.locals, strict=True):
        shutil.rmtree(here.root, ignore_errors=True)
        shutil.copytree(there.root, here.root)
    return copy


def records(hosts, host):
    return uploader.read_records(hosts.locals[host].root)[0]


# What is saved, and by whom


@pytest.mark.parametrize("whose", [lambda d: d.id // 2, lambda d: d.id % 3, lambda d: 0])
def test_every_box_has_one_owner_among_those_who_hold_it(whose):
    for leaf in jax.tree.leaves(state_at(1, num_devices=6)):
        plain = unwrap_abstract(leaf)
        held = boxes(plain.sharding, plain.shape)
        for turn in range(3):
            owner = owners(held, whose=whose, first_turn=turn)
            assert owner.keys() == held.keys()
            assert all(owner[box] in set(map(whose, held[box])) for box in held)


def test_copies_that_all_hosts_hold_are_brought_by_all_in_turns():
    held = {((0, 4),): tuple(jax.devices()[:6])}
    turns = [owners(held, whose=lambda d: d.id // 2, first_turn=t)[(0, 4),] for t in range(6)]
    assert turns == [0, 1, 2, 0, 1, 2]


def test_a_host_has_all_that_it_holds_and_brings_each_box_once(two_hosts):
    parts = [next(local.parts())[1].part for local in two_hosts.locals]
    for path, leaf in flatten(two_hosts.state(2)).items():
        plain = unwrap_abstract(leaf)
        if not plain.size:
            continue
        owned = [part.owned.get(path, ()) for part in parts]
        held = boxes(plain.sharding, plain.shape)
        assert sorted([*owned[0], *owned[1]]) == sorted(held)
        for process, part in enumerate(parts):
            mine = {b for b, devices in held.items() if process in {d.id // 2 for d in devices}}
            assert all(part.has(path, box) for box in mine)


def test_stock_orbax_opens_what_two_hosts_saved_on_any_mesh(two_hosts):
    import orbax.checkpoint as ocp

    state = probe.numbers(two_hosts.state(4))
    folder = two_hosts.shared.root / "4" / "state"
    for num_devices in (1, 3):
        like = {
            key: leaf
            for key, leaf in state_at(0, num_devices=num_devices).items()
            if key not in ("key", "none")
        }
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.metadata(folder).item_metadata.tree
            assert tree.keys() == {"params", "moments", "count", "key"}
            args = ocp.args.PyTreeRestore(
                probe.abstract(like),
                restore_args=ocp.checkpoint_utils.construct_restore_args(probe.abstract(like)),
                partial_restore=True,
            )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(folder, args=args)
        for key in like:
            jax.tree.map(np.testing.assert_array_equal, probe.numbers(found[key]), state[key])


def test_the_manifest_of_the_whole_tells_where_it_came_from(two_hosts):
    with two_hosts.manager() as manager:
        manifest = manager.manifest(4)
    assert manifest.part is None
    assert manifest.layout == {"fsdp": 4}
    assert manifest.hosts == tuple(local.host for local in two_hosts.locals)
    assert manifest.fingerprints.keys() == {leaf.path for leaf in manifest.leaves}
    assert all(file.algorithm == "xxh3" for file in manifest.files.values())
    on_disk = {
        p.relative_to(two_hosts.shared.root / "4").as_posix()
        for p in (two_hosts.shared.root / "4").rglob("*")
        if p.is_file()
    }
    assert on_disk == {*manifest.files, "manifest.json"}, "every file has its sum"


# Any number of hosts


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6])
def test_what_two_hosts_saved_is_restored_on_any_number_of_devices(two_hosts, num_devices):
    assert two_hosts.restored(num_devices=num_devices) == 4


def test_three_hosts_then_two_then_one_then_three_go_on_from_each_other(tmp_path):
    for turn, count in enumerate((3, 2, 1, 3), start=1):
        hosts = Hosts(tmp_path, count, attempt=f"attempt-{turn}")
        assert hosts.restored(num_devices=2 * count) == (None if turn == 1 else turn - 1)
        hosts.save(turn)
        hosts.upload()
        assert hosts.restored() == turn


# Own disks


def local_keys(hosts, host, *, rank):
    """The saves of which `host` has on its disk all that the process `rank` needs."""
    table = flatten(probe.abstract(hosts.state(0)))
    asked = {
        path: needed(unwrap_abstract(leaf), process=rank, whose=lambda device: device.id // 2)
        for path, leaf in table.items()
    }
    return {
        manifest.key
        for _, manifest in hosts.locals[host].parts()
        if all(manifest.part.has(path, box) for path, found in asked.items() for box in found)
    }


def test_each_host_finds_its_own_part_and_not_that_of_another_rank(two_hosts):
    own = {two_hosts.key(2), two_hosts.key(4)}
    assert [local_keys(two_hosts, host, rank=host) for host in (0, 1)] == [own, own]
    assert [local_keys(two_hosts, host, rank=1 - host) for host in (0, 1)] == [set(), set()]


def test_a_disk_that_was_copied_from_another_host_offers_nothing(hosts):
    (hosts.root / "disk-0" / HOST_ID).write_text("another-disk")
    moved = LocalTier.open(hosts.root / "disk-0", shared=hosts.shared.root)
    assert list(moved.parts()) == []


def test_a_disk_keeps_its_identity(tmp_path):
    first = LocalTier.open(tmp_path / "disk", shared=tmp_path / "run" / "checkpoints")
    again = LocalTier.open(tmp_path / "disk", shared=tmp_path / "other" / "checkpoints")
    other = LocalTier.open(tmp_path / "disk-2", shared=tmp_path / "run" / "checkpoints")
    assert first.host == again.host != other.host
    assert first.root != again.root, "two runs do not mix"


def test_a_disk_that_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="local_dir="):
        CheckpointManager(tmp_path / "c", tiers=Tiers(local=tmp_path / "file"))


def test_one_local_step_is_refused_because_hosts_finish_at_different_times():
    with pytest.raises(ValueError, match="keep_local=1"):
        Tiers(keep_local=1)


# One host with its own disk: the manager from end to end, in one process


@pytest.fixture
def own_disk(tmp_path, monkeypatch):
    """Options of a manager with a local disk whose uploader does not start by itself."""
    monkeypatch.setattr(uploader, "start", lambda options, *, root: None)
    return {"tiers": Tiers(local=tmp_path / "disk"), "layout": {"fsdp": 4}, "mode": "sync"}


def work(manager):
    """Let the uploader of the manager's host work once."""
    transit = manager._transit
    return uploader.Uploader(
        transit.local, uploader.SharedTier(manager.directory), keep=transit.keep, patience_s=0
    ).run()


def test_a_step_is_restored_from_the_own_disk_before_it_is_shared(tmp_path, own_disk, caplog):
    caplog.set_level("INFO")
    state = state_at(2, num_devices=4)
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(2, state, {"data_position": 2})
        assert manager.steps() == ()
        assert manager.latest() == 2
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        found = manager.restore_latest(like=probe.abstract(state))
        assert (found.step, found.metadata) == (2, {"data_position": 2})
        probe.assert_equal(found.state, probe.numbers(state))
        assert manager.save(2, state, {}) == "exists"
        assert work(manager)
        assert manager.steps() == (2,)
    restored = [r for r in caplog.records if r.message == "checkpoint.restored"]
    assert [r.tier for r in restored] == ["local"]


def test_another_mesh_than_that_of_the_local_parts_reads_the_shared_tier(
    tmp_path, own_disk, caplog
):
    caplog.set_level("INFO")
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(2, state_at(2, num_devices=4), {})
        work(manager)
        manager.save(4, state_at(4, num_devices=4), {})
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        found = manager.restore_latest(like=probe.abstract(state_at(0, num_devices=3)))
    assert found.step == 2, "step 4 is on one disk only, in boxes of another mesh"
    probe.assert_equal(found.state, probe.numbers(state_at(2, num_devices=3)))


def test_uploads_are_told_once(tmp_path, own_disk):
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(2, state_at(2, num_devices=4), {})
        work(manager)
        assert [(note.kind, note.step) for note in manager.take_notes()] == [("uploaded", 2)]
        work(manager)
        assert manager.take_notes() == []


def test_the_local_disk_keeps_what_it_is_told_and_the_shared_tier_too(tmp_path, own_disk):
    with CheckpointManager(tmp_path / "c", keep=1, **own_disk) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_at(step, num_devices=4), {})
            work(manager)
            assert manager.steps() == (step,)
        slot = manager._transit.saver().directory
        assert sorted(os.listdir(slot)) == ["3", "4"]


def test_a_damaged_newest_step_is_replaced_and_never_the_reason_to_delete_good_ones(
    tmp_path, own_disk
):
    options = {**own_disk, "keep": 1}
    with CheckpointManager(tmp_path / "c", **options) as manager:
        manager.save(4, state_at(4, num_devices=4), {})
        work(manager)
        shutil.rmtree(manager._transit.local.root / "0")
    flip(largest(tmp_path / "c" / "4"))
    shutil.copytree(tmp_path / "c" / "4", tmp_path / "c" / "2")
    with CheckpointManager(tmp_path / "c", **options) as manager:
        with pytest.raises(DamagedCheckpointError, match="every checkpoint"):
            manager.restore_latest(like=probe.abstract(state_at(0, num_devices=4)))
        manager.save(3, state_at(3, num_devices=4), {})
        work(manager)
        assert manager.steps() == (3,), "a damaged newest step does not hold up the uploads"
        assert (tmp_path / "c" / "4.damaged").is_dir(), "nor is it thrown away yet"
        manager.save(4, state_at(4, num_devices=4), {})
        work(manager)
        assert manager.steps() == (4,)
        assert manager.latest_good() == 4
    assert not (tmp_path / "c" / "4.damaged").exists()


# Damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path):
    path.write_bytes(b"\0" * path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


TAMPERS = {"flip": flip, "zero": zero, "truncate": truncate, "delete": Path.unlink}


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def file_class(path):
    """What kind of file of a checkpoint this is, with the names that differ left out."""
    parts = ["#" if len(part) == 32 else part for part in path.parts]
    return "/".join(parts)


def one_of_each_class(folder):
    found = {file_class(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: p.relative_to(folder) for name, p in found.items()}


@pytest.mark.parametrize("name", TAMPERS)
def test_any_damaged_file_on_the_shared_tier_is_named_and_the_step_before_restored(
    hosts, name, caplog
):
    newest = hosts.shared.root / "4"
    classes = one_of_each_class(newest)
    assert len(classes) >= 9, classes
    whole = hosts.root / "whole"
    shutil.copytree(newest, whole)
    for file in classes.values():
        TAMPERS[name](newest / file)
        caplog.clear()
        with hosts.manager() as manager:
            assert manager.latest_good() == 2, file
        said = " ".join(str(vars(record)) for record in caplog.records)
        assert (str(file) if (newest / "manifest.json").exists() else "incomplete") in said
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    flip(largest(newest))
    assert hosts.restored(num_devices=4) == 2


@pytest.mark.parametrize("name", TAMPERS)
def test_any_damaged_file_on_the_own_disk_is_named_and_the_shared_copy_restored(
    tmp_path, own_disk, name, caplog
):
    caplog.set_level("INFO")
    state = state_at(4, num_devices=4)
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(4, state, {})
        work(manager)
        part = manager._transit.saver().directory / "4"
    whole = tmp_path / "whole"
    shutil.copytree(part, whole)
    for file in one_of_each_class(part).values():
        TAMPERS[name](part / file)
        caplog.clear()
        with CheckpointManager(tmp_path / "c", **own_disk) as manager:
            found = manager.restore_latest(like=probe.abstract(state))
        probe.assert_equal(found.state, probe.numbers(state))
        tiers = [r.tier for r in caplog.records if r.message == "checkpoint.restored"]
        assert tiers == ["shared"], file
        said = " ".join(str(vars(record)) for record in caplog.records)
        assert str(file) in said or file.name == "manifest.json"
        shutil.rmtree(part)
        shutil.copytree(whole, part)


def test_a_folder_that_was_renamed_is_not_the_step_of_its_name(hosts, caplog):
    (hosts.shared.root / "4").rename(hosts.shared.root / "9")
    assert hosts.restored() == 2
    assert "holds step 4" in " ".join(str(vars(record)) for record in caplog.records)


def test_numbers_in_the_wrong_place_are_found_after_reading_though_every_file_is_right(
    tmp_path, monkeypatch, caplog
):
    from jaxfound.resources.checkpoint.storage import OrbaxStorage

    class Mixed(OrbaxStorage):
        def read(self, directory, like):
            arrays = super().read(directory, like)
            if directory.parent.name == "4":
                arrays[("w",)] = arrays[("w",)][::-1]
            return arrays

    state = {"w": jax.numpy.arange(8.0)}
    with CheckpointManager(tmp_path, keep=0, mode="sync", storage=Mixed()) as manager:
        for step in (2, 4):
            manager.save(step, state, {})
        assert manager.restore_latest(like=probe.abstract(state)).step == 2
        with pytest.raises(DamagedCheckpointError, match="leaf w has fingerprint"):
            manager.restore(4, like=probe.abstract(state))
    assert "leaf w has fingerprint" in " ".join(str(vars(r)) for r in caplog.records)


def test_sizes_alone_are_checked_when_asked_for_and_fingerprints_all_the_same(tmp_path):
    state = {"w": jax.numpy.arange(4096.0)}
    with CheckpointManager(tmp_path, mode="sync", tiers=Tiers(verify="size")) as manager:
        manager.save(2, state, {})
        flip(largest(tmp_path / "2" / "state" / "ocdbt.process_0"))
        assert manager.latest_good() == 2
        with pytest.raises(DamagedCheckpointError, match=r"fingerprint|cannot be read"):
            manager.restore(2, like=probe.abstract(state))


# Uploads


def test_a_file_that_rots_before_it_is_copied_is_named_and_nothing_is_published(tmp_path):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2)
    rotten = largest(hosts.locals[0].root / "0" / "2" / "state")
    flip(rotten)
    hosts.upload()
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


@pytest.fixture
def mount(tmp_path):
    """Mounts a file system and takes it away again; needs root."""
    if os.geteuid():
        pytest.skip("needs root to mount a file system")
    mounted = []

    def do(*arguments, at):
        at.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
        mounted.append(at)

    yield do
    for at in reversed(mounted):
        subprocess.run(["umount", "-l", str(at)], check=True)


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


def test_a_part_says_which_boxes_it_has():
    part = Part(0, 1, "h", owned={("a",): (((0, 2),),)}, copies={("b",): ((),)})
    assert part.has(("a",), ((0, 2),))
    assert part.has(("b",), ())
    assert not part.has(("a",), ((2, 4),))
