"""Whatever file is damaged, wherever: never a silent wrong restore, and it is named."""

import shutil

import jax
import pytest

from jaxfound.resources.checkpoint import CheckpointManager, DamagedCheckpointError, Tiers
from tests.resources import probe
from tests.resources.hosts import TAMPERS, flip, largest, state_at, work, zero

pytestmark = pytest.mark.multidevice


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


def test_a_box_that_is_not_in_the_database_is_an_error_and_never_zeros(tmp_path):
    import numpy as np
    import tensorstore

    from jaxfound.resources.checkpoint import database
    from jaxfound.resources.checkpoint.shards import Piece

    half = Piece(((0, 4),), jax.numpy.ones(4), owned=True)
    database.write_boxes(tmp_path, {("x",): [half]}, shapes={("x",): (8,)})
    like = {("x",): jax.ShapeDtypeStruct((8,), np.float32, sharding=half.data.sharding)}
    with pytest.raises(ValueError, match="missing"):
        database.read_arrays([database.Source(tmp_path)], like)
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
    keys = tensorstore.KvStore.open(kvstore).result().list().result()
    assert sorted(keys) == [b"x/c/0", b"x/zarr.json"]


def test_what_orbax_cannot_read_is_passed_over_like_damage(tmp_path, caplog):
    state = {"w": jax.numpy.arange(4096.0)}
    with CheckpointManager(tmp_path, keep=0, mode="sync", tiers=Tiers(verify="size")) as manager:
        for step in (2, 4):
            manager.save(step, state, {})
        zero(largest(tmp_path / "4" / "state" / "ocdbt.process_0"))
        assert manager.restore_latest(like=probe.abstract(state)).step == 2
    assert "step" in " ".join(caplog.messages) or caplog.records
