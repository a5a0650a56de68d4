import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager, snapshot
from jaxfound.resources.checkpoint.snapshot import has_room, one_replica, take
from tests.resources import probe


def test_a_slow_save_holds_the_state_of_its_own_step_while_training_donates_on(tmp_path):
    expected = probe.numbers(probe.train_to(2))
    storage = probe.GatedStorage()
    position = {"data_position": 2}
    state = probe.train_to(2)
    with CheckpointManager(tmp_path, keep=0, storage=storage) as manager:
        manager.save(2, state, position)
        position["data_position"] = 8
        given_away = state["params"]["w"]
        state = probe.train_to(8, state=state)
        assert given_away.is_deleted(), "without donation this test shows nothing"
        assert manager.is_saving()
        storage.gate.set()
        manager.wait()
        restored = manager.restore(2, like=probe.abstract(state))
    assert restored.step == 2
    assert restored.metadata == {"data_position": 2}
    assert restored.state["params"]["probe"] == -2
    assert restored.state["opt"][0].count == 2
    probe.assert_equal(restored.state, expected)


def test_a_save_that_must_be_waits_for_the_one_before_and_both_are_right(tmp_path):
    storage = probe.GatedStorage()
    with CheckpointManager(tmp_path, keep=0, storage=storage) as manager:
        state = probe.train_to(2)
        manager.save(2, state, {})
        state = probe.train_to(4, state=state)
        threading.Timer(0.2, storage.gate.set).start()
        manager.save(4, state, {}, must=True)
        assert manager.steps()[0] == 2, "the first is committed before the second is taken"
        state = probe.train_to(6, state=state)
        manager.wait()
        for step in (2, 4):
            restored = manager.restore(step, like=probe.abstract(state))
            probe.assert_equal(restored.state, probe.numbers(probe.train_to(step)))


def test_a_save_that_comes_too_early_is_skipped_and_counted(tmp_path, caplog):
    storage = probe.GatedStorage()
    state = probe.train_to(2)
    with CheckpointManager(tmp_path, keep=0, storage=storage) as manager:
        assert manager.save(2, state, {}) == "saved"
        assert [manager.save(step, state, {}) for step in (3, 4)] == ["skipped", "skipped"]
        storage.gate.set()
        manager.wait()
        assert manager.save(5, state, {}) == "saved"
        manager.wait()
        assert manager.steps() == (2, 5)
        told = manager.take_notes()
    assert [(note.kind, note.step) for note in told] == [("save_skipped", 3), ("save_skipped", 4)]
    assert told[-1].values == {"num_skipped": 2}
    assert caplog.messages.count("checkpoint.skipped") == 2


def test_the_copy_shares_no_buffer_with_the_state():
    x = jnp.arange(64.0)
    copy = take({("x",): x})[("x",)]
    assert copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


GB = 10**9
USED = {"bytes_limit": 100 * GB, "peak_bytes_in_use": 60 * GB}


@pytest.mark.parametrize(
    ("stats", "num_bytes", "fitted", "fits"),
    [
        (USED, 30 * GB, 0, True),
        (USED, 31 * GB, 0, False),
        # The peak has an earlier copy in it.
        (USED, 31 * GB, 31 * GB, True),
        (USED, 32 * GB, 31 * GB, False),
        ({}, 1, 0, False),
        ({"bytes_limit": 100 * GB}, 1, 0, False),
    ],
)
def test_a_copy_beside_the_state_needs_room_beside_the_most_in_use(stats, num_bytes, fitted, fits):
    assert has_room(stats, num_bytes=num_bytes, fitted=fitted) is fits


@pytest.mark.parametrize("room", [True, False])
def test_from_the_second_save_on_a_copy_on_the_device_is_taken_where_there_is_room(
    room, tmp_path, monkeypatch
):
    made = []
    copies = snapshot.Stage.copies
    monkeypatch.setattr(snapshot, "has_room", lambda stats, **_: room)
    monkeypatch.setattr(
        snapshot.Stage, "copies", lambda *args: made.append(copies(*args)) or made[-1]
    )
    with CheckpointManager(tmp_path, keep=0) as manager:
        state = probe.train_to(2)
        for step in (2, 4, 6):
            manager.save(step, state, {}, must=True)
            state = probe.train_to(step + 2, state=state)
        manager.wait()
        for step in (2, 4, 6):
            restored = manager.restore(step, like=probe.abstract(state))
            probe.assert_equal(restored.state, probe.numbers(probe.train_to(step)))
    assert [copy is not None for copy in made] == [room, room]


@pytest.mark.multidevice
def test_a_copy_on_the_devices_lies_as_the_state_does():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    cut = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("a")))
    arrays = [cut, jnp.arange(3.0), cut.addressable_shards[5].data]
    for copy, array in zip(snapshot._copies(arrays), arrays, strict=True):
        assert copy.sharding == array.sharding
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(array))


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("spec", "num_devices"),
    [(P(), 1), (P("a"), 4), (P(None, "b"), 2), (P("b", "a"), 8), (P(("a", "b")), 8)],
)
def test_one_replica_holds_the_same_numbers_on_the_fewest_devices(spec, num_devices):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = jax.device_put(jnp.arange(128.0).reshape(8, 16), NamedSharding(mesh, spec))
    small = one_replica(x)
    assert len(small.sharding.device_set) == num_devices
    np.testing.assert_array_equal(np.asarray(small), np.arange(128.0).reshape(8, 16))


@pytest.mark.multidevice
def test_a_replica_on_permuted_devices_keeps_its_pieces_in_place():
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("b")))
    np.testing.assert_array_equal(np.asarray(one_replica(x)), np.arange(16.0))


@pytest.mark.parametrize("leaf", [3, 0.5, np.ones(3)])
def test_a_leaf_that_is_no_jax_array_is_refused_by_name(tmp_path, leaf):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"'a\.0'.*metadata"),
    ):
        manager.save(1, {"a": [leaf]}, {})


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path, value):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="metadata"),
    ):
        manager.save(1, {"a": jnp.ones(2)}, {"value": value})


@pytest.mark.skipif(sys.platform != "linux", reason="only there threads have priorities")
def test_what_is_written_beside_training_comes_last_for_the_processor(tmp_path):
    class Notes(probe.OrbaxStorage):
        def write(self, directory, arrays):
            self.niceness = nice_of(threading.get_native_id())
            super().write(directory, arrays)

    storage, before = Notes(), nice_of(threading.get_native_id())
    with CheckpointManager(tmp_path, storage=storage) as manager:
        manager.save(2, {"w": jnp.ones(3)}, {})
        manager.wait()
    assert storage.niceness == max(before, 10)
    assert nice_of(threading.get_native_id()) == before


def nice_of(thread):
    return os.getpriority(os.PRIO_PROCESS, thread)
