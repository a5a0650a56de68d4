"""Checkpoints that earlier versions and this one wrote are restored, bit for bit."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxfound.resources.checkpoint import CheckpointManager, manifest
from tests.resources import probe

HERE = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
# Folder of tests/data/checkpoints: its format, and the processes that wrote it.
GOLDEN = {"format-1": (1, 0), "format-2": (2, 1), "format-2-of-two-hosts": (2, 2)}


def state():
    """What every golden checkpoint holds."""
    return {
        "params": {"w": jnp.arange(24.0).reshape(4, 6) / 7, "b": jnp.arange(4).astype("bfloat16")},
        "count": jnp.int32(3),
        "rng": jax.random.key(5),
        "none": jnp.zeros((0, 4), jnp.float16),
    }


def test_this_release_has_a_golden_checkpoint_of_its_format():
    formats = {version for version, _ in GOLDEN.values()}
    assert formats == set(manifest.ALGORITHMS)
    assert {p.name for p in HERE.iterdir()} == set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_is_restored(name):
    version, num_hosts = GOLDEN[name]
    with CheckpointManager(HERE / name, keep=0) as manager:
        found = manager.restore_latest(like=probe.abstract(state()))
        what = manager.manifest(3)
    assert (found.step, found.metadata) == (3, {"data_position": 3})
    probe.assert_equal(found.state, probe.numbers(state()))
    assert len(what.hosts) == num_hosts
    assert len(what.fingerprints) == (0 if version == 1 else 5)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_flipped_byte_in_a_golden_checkpoint_is_found(name, tmp_path):
    shutil.copytree(HERE / name, tmp_path, dirs_exist_ok=True)
    file = max((tmp_path / "3" / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(RuntimeError, match=f"{file.name} has checksum"),
    ):
        manager.restore_latest(like=probe.abstract(state()))


def test_a_run_of_an_earlier_format_goes_on(tmp_path):
    shutil.copytree(HERE / "format-1", tmp_path, dirs_exist_ok=True)
    with CheckpointManager(tmp_path, keep=2, mode="sync") as manager:
        manager.restore_latest(like=probe.abstract(state()))
        manager.save(4, state(), {})
        assert manager.steps() == (3, 4)
        assert manager.latest_good() == 4
