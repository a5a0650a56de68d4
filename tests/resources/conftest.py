"""Hosts, disks and mounts for the tests of checkpoints; loggers for those of logs."""

import logging
import os
import shutil
import subprocess

import pytest

from jaxfound.resources.checkpoint import Tiers, uploader
from tests.resources.hosts import Hosts


@pytest.fixture(scope="session")
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


@pytest.fixture
def own_disk(tmp_path, monkeypatch):
    """Options of a manager with a local disk whose uploader does not start by itself."""
    monkeypatch.setattr(uploader, "start", lambda options, *, root: None)
    return {"tiers": Tiers(local=tmp_path / "disk"), "layout": {"fsdp": 4}, "mode": "sync"}


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


@pytest.fixture
def handlers_as_before():
    """The root logger's handlers are what they were when the test is over."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
