"""An object store as the farthest tier: complete or not there, verified on the way back."""

import shutil
import uuid

import jax.numpy as jnp
import pytest

from jaxfound.resources.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointError,
    Tiers,
    remote,
)
from tests.resources import probe
from tests.resources.hosts import Hosts, flip, largest

STATE = {"w": jnp.arange(64.0).reshape(8, 8), "count": jnp.int32(3)}
LIKE = probe.abstract(STATE)


@pytest.fixture(scope="module")
def s3_server():
    """The address of a real S3 server on this machine."""
    server = pytest.importorskip("moto.server", reason="needs moto[server], a local S3 server")
    pytest.importorskip("s3fs", reason="needs s3fs")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    _, port = running.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request, monkeypatch):
    """A folder of an object store: in memory, and in a server that speaks S3."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    address = request.getfixturevalue("s3_server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    bucket = uuid.uuid4().hex
    store = remote._open(f"s3://{bucket}")[0]
    store.mkdir(bucket)
    return f"s3://{bucket}/run"


def saved(directory, url, *steps):
    tiers = Tiers(remote=url)
    with CheckpointManager(directory, keep=0, mode="sync", tiers=tiers) as manager:
        for step in steps:
            manager.save(step, {**STATE, "count": jnp.int32(step)}, {"data_position": step})
        return manager.take_notes()


def test_committed_steps_go_there_and_come_back_where_the_folder_is_lost(tmp_path, url, caplog):
    caplog.set_level("INFO")
    told = saved(tmp_path / "c", url, 2, 4)
    assert [(note.kind, note.step) for note in told] == [("stored", 2), ("stored", 4)]
    assert sorted(key.step for key in remote.committed(url)) == [2, 4]
    shutil.rmtree(tmp_path / "c")
    with CheckpointManager(tmp_path / "c", keep=0, tiers=Tiers(remote=url)) as manager:
        assert manager.latest() == 4
        found = manager.restore_latest(like=LIKE)
        assert manager.steps() == (4,)
    assert (found.step, found.state["count"], found.metadata) == (4, 4, {"data_position": 4})


def test_a_step_without_its_commit_object_is_not_there(tmp_path, url):
    saved(tmp_path / "c", url, 2, 4)
    store, root = remote._open(url)
    store.rm_file(f"{root}/4/{remote.COMMIT}")
    assert [key.step for key in remote.committed(url)] == [2]
    with pytest.raises(CheckpointError, match=r"no committed step 4; it has \[2\]"):
        remote.pull(url, 4, into=tmp_path / "d")
    shutil.rmtree(tmp_path / "c")
    with CheckpointManager(tmp_path / "c", tiers=Tiers(remote=url)) as manager:
        assert manager.restore_latest(like=LIKE).step == 2


@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_damaged_object_is_named_and_the_step_before_is_fetched(tmp_path, url, how, caplog):
    saved(tmp_path / "c", url, 2, 4)
    name = largest(tmp_path / "c" / "4" / "state" / "ocdbt.process_0").name
    store, root = remote._open(url)
    place = f"{root}/4/state/ocdbt.process_0/d/{name}"
    data = bytearray(store.cat_file(place))
    data[3] ^= 1
    store.rm_file(place) if how == "delete" else store.pipe_file(place, bytes(data))
    assert name in remote.damage(url, 4)[0]
    assert remote.damage(url, 2) == []
    shutil.rmtree(tmp_path / "c")
    with CheckpointManager(tmp_path / "c", tiers=Tiers(remote=url)) as manager:
        assert manager.restore_latest(like=LIKE).step == 2
    assert name in " ".join(str(vars(record)) for record in caplog.records)


def test_what_is_damaged_here_is_not_sent_and_training_goes_on(tmp_path, url):
    saved(tmp_path / "c", "", 2)
    flip(largest(tmp_path / "c" / "2"))
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        remote.push(tmp_path / "c" / "2", url)
    assert remote.committed(url) == {}


def test_a_store_that_cannot_be_reached_is_told_and_the_step_stays_here(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("connection refused")

    monkeypatch.setattr(remote, "push", fail)
    told = saved(tmp_path / "c", "memory://nowhere", 2)
    assert [(note.kind, note.values) for note in told] == [
        ("upload_failed", {"error": "OSError: connection refused"})
    ]
    with CheckpointManager(tmp_path / "c") as manager:
        assert manager.latest_good() == 2


def test_a_step_that_is_sent_again_replaces_the_other(tmp_path, url):
    saved(tmp_path / "c", url, 2)
    saved(tmp_path / "d", url, 2)
    (key,) = remote.committed(url)
    with CheckpointManager(tmp_path / "d") as manager:
        assert key == manager.manifest(2).key
    assert remote.damage(url, 2) == []


def test_a_url_of_no_known_kind_is_refused_with_the_way_out():
    with pytest.raises(CheckpointError, match="s3fs"):
        remote.committed("abfs://container/run")


@pytest.mark.multidevice
def test_what_hosts_have_brought_together_goes_on_to_the_store(tmp_path, url):
    hosts = Hosts(tmp_path, 2)
    hosts.save(2)
    hosts.upload(url=url)
    hosts.upload(url=url)
    assert set(remote.committed(url)) == {hosts.key(2)}
    shutil.rmtree(hosts.shared.root)
    remote.pull(url, 2, into=hosts.shared.root)
    assert hosts.restored(num_devices=3) == 2
