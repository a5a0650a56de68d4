"""Saves of several hosts: parts on own disks, brought together, restored anywhere, or named."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.resources.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Tiers,
    fingerprint,
)
from jaxfound.resources.checkpoint.leaves import flatten, unwrap_abstract
from jaxfound.resources.checkpoint.manifest import Part
from jaxfound.resources.checkpoint.shards import boxes, needed, owners
from jaxfound.resources.checkpoint.tiers import HOST_ID, LocalTier
from tests.resources import probe
from tests.resources.hosts import Hosts, flip, largest, state_at, work

pytestmark = pytest.mark.multidevice


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
            assert tree.keys() == {"params", "moments", "zeros", "count", "key"}
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


def test_the_first_save_after_warming_compiles_no_fingerprints(tmp_path, own_disk):
    # A state that no other test has.
    state = {"w": jax.device_put(jnp.ones((5, 7, 3)), jax.devices()[1])}
    known = fingerprint._all._cache_size
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        cold = known()
        manager.warm(state)
        warm = known()
        assert manager.save(2, state, {}) == "saved"
    assert (warm, known()) == (cold + 1, cold + 1)


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


def test_what_processes_left_that_the_host_has_no_more_is_deleted(tmp_path, own_disk):
    with CheckpointManager(tmp_path / "c", **own_disk) as manager:
        manager.save(2, state_at(2, num_devices=4), {})
        root = manager._transit.local.root
        shutil.copytree(root / "0", root / "1")
        manager.save(4, state_at(4, num_devices=4), {})
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["0"]


def test_a_damaged_newest_step_is_replaced_and_never_the_reason_to_delete_good_ones(
    tmp_path, own_disk
):
    with CheckpointManager(tmp_path / "c", keep=0, **own_disk) as manager:
        for step in (2, 4):
            manager.save(step, state_at(step, num_devices=4), {})
            work(manager)
        shutil.rmtree(manager._transit.local.root / "0")
    flip(largest(tmp_path / "c" / "4"))
    with CheckpointManager(tmp_path / "c", keep=1, **own_disk) as manager:
        like = probe.abstract(state_at(0, num_devices=4))
        assert manager.restore_latest(like=like).step == 2
        manager.save(3, state_at(3, num_devices=4), {})
        work(manager)
        assert manager.steps() == (3,), "a damaged newest step does not hold up the uploads"
        assert (tmp_path / "c" / "4.damaged").is_dir(), "nor is it thrown away yet"
        manager.save(4, state_at(4, num_devices=4), {})
        work(manager)
        assert manager.steps() == (4,)
        assert manager.latest_good() == 4
    assert not (tmp_path / "c" / "4.damaged").exists()


def test_a_part_says_which_boxes_it_has():
    part = Part(0, 1, "h", owned={("a",): (((0, 2),),)}, copies={("b",): ((),)})
    assert part.has(("a",), ((0, 2),))
    assert part.has(("b",), ())
    assert not part.has(("a",), ((2, 4),))
