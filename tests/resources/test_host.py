"""Topology, the choice of a backend, and signals."""

import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from jaxfound.resources import platform
from jaxfound.resources.signals import STOP_SIGNALS, GracefulStop
from jaxfound.resources.topology import Topology, host_memory_bytes, usable_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multidevice
def test_the_topology_of_eight_virtual_devices_is_one_host_that_shares_its_memory():
    found = Topology.discover()
    assert (found.hosts, found.devices_per_host, found.num_devices) == (1, 8, 8)
    assert found.device_kind == "cpu"
    assert found.memory_bytes == host_memory_bytes() // 8


def test_a_device_that_knows_its_limit_is_believed():
    assert usable_bytes({"bytes_limit": 5, "bytes_in_use": 1}, num_local=8) == 5


def test_a_cluster_that_is_not_here_is_written_down():
    topology = Topology(hosts=3, devices_per_host=8, device_kind="NVIDIA H200", memory_bytes=1)
    assert topology.num_devices == 24


DEFAULT_TO_CPU = """
import os, sys
from pathlib import Path
{before}
from jaxfound.resources.platform import default_to_cpu
chosen = default_to_cpu(devices=Path({devices!r}))
import jax
started = jax._src.xla_bridge._backends
sys.stdout.write(f"{{chosen}} {{os.environ.get('JAX_PLATFORMS')}} {{jax.config.jax_platforms}} "
                 f"{{bool(started)}}")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "True cpu cpu False"),
        ("import jax; jax.config.update('jax_platforms', 'cuda')", "False None cuda False"),
    ],
)
def test_the_cpu_is_chosen_where_nobody_chose_and_no_backend_starts(tmp_path, before, said):
    code = DEFAULT_TO_CPU.format(before=before, devices=str(tmp_path))
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    child = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert child.stdout == said


def test_a_choice_in_the_environment_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert platform.default_to_cpu(devices=tmp_path) is False
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"


def test_a_machine_with_an_accelerator_is_left_to_jax(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "nvidia0").touch()
    assert platform.default_to_cpu(devices=tmp_path) is False
    assert "JAX_PLATFORMS" not in os.environ


@pytest.mark.parametrize(
    ("file", "seen"),
    [
        ("nvidia0", True),
        ("nvidia-modeset", False),
        ("accel0", True),
        ("vfio/0", True),
        ("null", False),
    ],
)
def test_an_accelerator_is_seen_by_its_device_file(tmp_path, file, seen):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert platform.sees_accelerator(tmp_path) is seen


@pytest.mark.parametrize(("plugin", "seen"), [("xla_cuda13", False), ("npu", True)])
def test_a_plugin_for_another_kind_of_device_leaves_the_choice_to_jax(
    tmp_path, monkeypatch, plugin, seen
):
    found = [EntryPoint(name=plugin, value="some.module", group="jax_plugins")]
    monkeypatch.setattr(platform, "entry_points", lambda group: found)
    assert platform.sees_accelerator(tmp_path) is seen


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_asks_for_a_stop_and_the_old_handlers_come_back(number):
    before = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    with GracefulStop() as stop:
        assert not stop.requested
        assert stop.signal_name == ""
        signal.raise_signal(number)
        assert stop.requested
        assert stop.signal_name == number.name
    assert {s: signal.getsignal(s) for s in STOP_SIGNALS} == before


def test_a_second_interrupt_does_not_wait():
    with GracefulStop() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested


def test_a_repeated_or_mixed_signal_of_a_scheduler_still_waits():
    with GracefulStop() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal_name == "SIGTERM"


def test_the_old_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), GracefulStop():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_it_changes_nothing():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert seen == [False, before]


def test_virtual_devices_get_threads_enough_to_wait_for_each_other(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    chosen = {}
    monkeypatch.setattr("jax.config.update", chosen.__setitem__)
    platform.use_virtual_cpus(8)
    assert chosen == {"jax_num_cpu_devices": 8}
    assert int(os.environ["NPROC"]) == 8 * platform.THREADS_PER_VIRTUAL_DEVICE


@pytest.mark.parametrize(("chosen", "threads"), [("cpu", "7"), ("cuda", None)])
def test_on_the_cpu_alone_a_core_is_left_to_other_work(chosen, threads, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    platform.leave_a_core()
    assert os.environ.get("NPROC") == threads


def test_a_compile_cache_that_was_chosen_stays(tmp_path, monkeypatch):
    chosen = {}
    monkeypatch.setattr("jax.config.update", chosen.__setitem__)
    platform.use_compile_cache(tmp_path)
    # The tests have a cache of their own.
    assert chosen == {}


def test_the_source_commit_is_that_of_this_checkout_or_empty():
    commit = platform.source_commit().removesuffix("+")
    assert all(letter in "0123456789abcdef" for letter in commit)
