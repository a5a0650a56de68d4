import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointError,
)
from jaxfound.resources.checkpoint.leaves import LeafSpec
from jaxfound.resources.checkpoint.manifest import Manifest
from tests.resources import probe

STATE = {"params": {"w": jnp.arange(64.0).reshape(8, 8)}, "count": jnp.int32(3)}
LIKE = probe.abstract(STATE)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_steps")
    with CheckpointManager(directory, keep=0, mode="sync") as manager:
        manager.save(2, {**STATE, "count": jnp.int32(2)}, {"data_position": 2})
        manager.save(4, {**STATE, "count": jnp.int32(4)}, {"data_position": 4})
    return directory


def on_mesh(shape, spec):
    mesh = jax.make_mesh(shape, ("a", "b"))
    return lambda dims: NamedSharding(mesh, spec if len(dims) == 2 and dims[0] else P())


LAYOUTS = {
    "8x1": lambda: on_mesh((8, 1), P("a")),
    "4x2": lambda: on_mesh((4, 2), P("a", "b")),
    "2x4 over one dim": lambda: on_mesh((2, 4), P(("b", "a"))),
    "replicated": lambda: on_mesh((2, 4), P()),
    "one device": lambda: lambda _: SingleDeviceSharding(jax.devices()[5]),
}


@pytest.mark.multidevice
@pytest.mark.parametrize("saved_on", LAYOUTS)
def test_any_mesh_restores_onto_any_mesh(tmp_path, saved_on):
    expected = probe.numbers(probe.train_to(3))
    plain = probe.train_to(3)
    placed = jax.device_put(plain, jax.tree.map(lambda x: LAYOUTS[saved_on]()(x.shape), plain))
    with CheckpointManager(tmp_path, mode="sync") as manager:
        manager.save(3, placed, {})
        for layout in LAYOUTS.values():
            like = probe.abstract(plain, sharding=layout())
            restored = manager.restore(3, like=like).state
            probe.assert_equal(restored, expected)
            assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
                lambda x: x.sharding, like
            )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_keys_that_draw_the_same(tmp_path, impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    with CheckpointManager(tmp_path, mode="sync") as manager:
        manager.save(1, {"keys": keys}, {})
        restored = manager.restore(1, like=probe.abstract({"keys": keys})).state["keys"]
    assert restored.dtype == keys.dtype
    np.testing.assert_array_equal(
        jax.random.normal(restored[1], (4,)), jax.random.normal(keys[1], (4,))
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "bool"])
def test_every_format_keeps_its_bits(tmp_path, dtype):
    x = jnp.arange(-4, 4).astype(dtype)
    with CheckpointManager(tmp_path, mode="sync") as manager:
        manager.save(1, {"x": x}, {})
        restored = manager.restore(1, like={"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), np.asarray(x))


def test_a_leaf_without_sharding_goes_to_the_first_device(two_steps):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)
    with CheckpointManager(two_steps) as manager:
        state = manager.restore(4, like=like).state
    assert state["params"]["w"].sharding == SingleDeviceSharding(jax.local_devices()[0])


def test_a_mesh_without_devices_is_refused(two_steps):
    mesh = jax.sharding.AbstractMesh((2,), ("a",))
    sharding = NamedSharding(mesh, P())
    with (
        CheckpointManager(two_steps) as manager,
        pytest.raises(CheckpointError, match="mesh without devices"),
    ):
        manager.restore(4, like=probe.abstract(STATE, sharding=lambda _: sharding))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


MISFITS = {
    "missing": (
        {**LIKE, "params": {"w": struct(8, 8), "extra": {"k": struct(1)}}},
        r"missing from the checkpoint \(1\): params\.extra\.k",
    ),
    "left over": ({"params": LIKE["params"]}, r"only in the checkpoint \(1\): count"),
    "shape": (
        {**LIKE, "params": {"w": struct(8, 9)}},
        r"params\.w: float32\[8,8\] in the checkpoint, float32\[8,9\] asked",
    ),
    "dtype": (
        {**LIKE, "count": struct(dtype=jnp.float32)},
        r"count: int32\[\] in the checkpoint, float32\[\] asked",
    ),
    "many": (
        {**LIKE, "more": [struct(1) for _ in range(20)]},
        r"missing from the checkpoint \(20\): more\.0.* and 12 more",
    ),
}


class NeverRead:
    def write(self, directory, arrays):
        raise AssertionError("a misfit is found before anything is written")

    def read(self, directory, like):
        raise AssertionError("a misfit is found before anything is read")


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("how", ["restore", "restore_latest"])
def test_a_tree_that_does_not_fit_is_named_before_anything_is_read(two_steps, name, how):
    like, message = MISFITS[name]
    with CheckpointManager(two_steps, storage=NeverRead()) as manager:
        call = {
            "restore": lambda: manager.restore(4, like=like),
            "restore_latest": lambda: manager.restore_latest(like=like),
        }
        with pytest.raises(CheckpointError, match=message):
            call[how]()


def test_a_part_of_the_state_can_be_restored_when_asked_for(two_steps):
    with CheckpointManager(two_steps) as manager:
        restored = manager.restore(4, like={"params": LIKE["params"]}, unread="allow")
    assert restored.state.keys() == {"params"}
    np.testing.assert_array_equal(restored.state["params"]["w"], STATE["params"]["w"])


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero_block(path):
    size = path.stat().st_size
    path.write_bytes(b"\0" * size)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


TAMPERS = {
    "flip": flip_byte,
    "zero": zero_block,
    "truncate": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "delete": Path.unlink,
}


@pytest.mark.parametrize("name", TAMPERS)
def test_any_damaged_file_of_the_newest_step_falls_back_and_is_named(
    two_steps, tmp_path, name, caplog
):
    files = [p.relative_to(two_steps / "4") for p in (two_steps / "4").rglob("*") if p.is_file()]
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(two_steps, copy)
        TAMPERS[name](copy / "4" / file)
        caplog.clear()
        with CheckpointManager(copy, storage=NeverRead()) as manager:
            assert manager.latest_good() == 2, file
        said = " ".join(str(vars(record)) for record in caplog.records)
        named = "4" if (name, file.name) == ("delete", "manifest.json") else str(file)
        assert named in said


def test_the_older_state_is_restored_when_the_newest_is_damaged(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    damaged = max((tmp_path / "4" / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    flip_byte(damaged)
    with CheckpointManager(tmp_path, keep=1) as manager:
        with pytest.raises(DamagedCheckpointError, match=f"{damaged.name}.*checksum.*\\[2\\]"):
            manager.restore(4, like=LIKE)
        restored = manager.restore_latest(like=LIKE)
        assert (restored.step, restored.state["count"]) == (2, 2)
        manager.save(3, STATE, {})
        manager.wait()
        assert manager.latest_good() == 3
        assert manager.save(4, STATE, {}), "a damaged step is replaced when training is there again"
        manager.wait()
        assert manager.steps() == (4,)
        assert manager.restore(4, like=LIKE).state["count"] == 3


def test_a_run_with_damaged_checkpoints_only_does_not_start_from_nothing(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    for step in (2, 4):
        truncate(tmp_path / str(step) / "state" / "_METADATA")
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(DamagedCheckpointError, match=r"every checkpoint .*_METADATA.*start from"),
    ):
        manager.restore_latest(like=LIKE)


def test_a_checkpoint_of_a_later_format_is_refused_not_passed_over(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "4" / "manifest.json"
    from jaxfound.resources.checkpoint import manifest

    body = json.loads(path.read_text())
    del body["own_sum"]
    body["format_version"] = 99
    body["own_sum"] = manifest.sum_body(body)
    path.write_text(json.dumps(body))
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match="format_version=99") as caught:
            manager.restore_latest(like=LIKE)
        assert not isinstance(caught.value, DamagedCheckpointError)


def test_the_manifest_tells_what_is_inside(two_steps):
    with CheckpointManager(two_steps) as manager:
        manifest = manager.manifest(4)
        assert manager.metadata(4) == {"data_position": 4}
    assert manifest.step == 4
    assert [f"{leaf.name} {leaf}" for leaf in manifest.leaves] == [
        "count int32[]",
        "params.w float32[8,8]",
    ]
    size = sum(p.stat().st_size for p in (two_steps / "4" / "state").rglob("*") if p.is_file())
    assert manifest.num_bytes == size


def test_the_tree_hash_sees_names_shapes_and_dtypes():
    leaf = LeafSpec(("a", "b"), (2, 3), "float32")
    others = [
        leaf,
        leaf._replace(path=("a", "c")),
        leaf._replace(path=("a.b",)),
        leaf._replace(shape=(3, 2)),
        leaf._replace(dtype="bfloat16"),
    ]
    assert len({Manifest(0, {}, (leaf,), {}).tree_hash for leaf in others}) == len(others)


def test_plain_orbax_opens_the_state(two_steps):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(two_steps / "4" / "state", probe.abstract(STATE))
    np.testing.assert_array_equal(tree["params"]["w"], STATE["params"]["w"])
