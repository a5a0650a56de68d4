"""What wires carry is measured as stated, slow ones are named, and a plan can read the figures."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import Mesh

from jaxfound.cli.main import main
from jaxfound.cli.probe import meet_others, write_topology
from jaxfound.communication import probe
from jaxfound.communication.cost import COLLECTIVES
from jaxfound.communication.hlo import collectives
from jaxfound.communication.probe import Measured, Pair, Timed
from jaxfound.communication.probe_verdict import judge
from jaxfound.resources.launch.place import Place
from jaxfound.resources.links import NETWORKS
from jaxfound.resources.topology import Topology, all_devices

ROOT = Path(__file__).resolve().parents[2]
# Two hosts of two devices that are connected by 0.8 GB/s inside and 100 Gb/s a host across.
TWO = Topology(2, 2, "cpu", 10**9, network=NETWORKS["eth100"])


def pair(first, second, bps):
    return Pair(first, second, first // 2 != second // 2, 1e-5 * (second - first), bps)


def measured(*, near=0.8e9, far=12.5e9, slow=()):
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    found = tuple(
        pair(i, j, 1e6 if (i, j) in slow else near if i // 2 == j // 2 else far) for i, j in pairs
    )
    group = probe.group_of(TWO)
    seconds = COLLECTIVES["all_reduce"](2**20, group)
    sweep = (Timed("all_reduce", 2**20, seconds, bus_bps=1e9, expected_s=seconds),)
    return Measured(TWO, found, sweep, across_bps=6e9)


@pytest.mark.multidevice
@pytest.mark.parametrize("name", probe.BODIES)
def test_what_is_timed_is_the_collective_as_often_as_stated(name):
    mesh = Mesh(np.array(jax.devices()[:4]), (probe.AXIS,))
    run = probe.repeated(probe.BODIES[name], repeats=3, mesh=mesh)
    x = jnp.zeros(4 * 8, jnp.float32)
    assert {c.kind for c in collectives(run.lower(x).compile().as_text())} == {name}
    jaxpr = str(jax.make_jaxpr(run)(x))
    assert "length=3" in jaxpr


@pytest.mark.multidevice
def test_the_bodies_send_what_their_names_say():
    mesh = Mesh(np.array(jax.devices()[:4]), (probe.AXIS,))
    x = jnp.arange(16, dtype=jnp.float32)
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    once = {
        name: np.asarray(probe.repeated(body, repeats=1, mesh=mesh)(x)).reshape(4, 4)
        for name, body in probe.BODIES.items()
    }
    np.testing.assert_array_equal(once["permute"], np.roll(rows, 1, axis=0))
    np.testing.assert_array_equal(once["all_reduce"], np.tile(rows.sum(0), (4, 1)))
    np.testing.assert_array_equal(once["all_to_all"], rows.T)
    np.testing.assert_array_equal(once["all_gather"], np.tile(rows[:, 0], (4, 1)))
    np.testing.assert_array_equal(once["reduce_scatter"][:, 0], rows.sum(0))


@pytest.mark.multidevice
def test_every_pair_and_every_collective_is_measured():
    devices = all_devices()[:2]
    found = probe.measure(Topology.of(devices), devices=devices, sizes=(1000,), rounds=1, repeats=1)
    assert [(p.first, p.second, p.crosses_hosts) for p in found.pairs] == [(0, 1, False)]
    assert [t.collective for t in found.sweep] == list(probe.BUS_FACTORS)
    assert {t.num_bytes for t in found.sweep} == {1000}
    assert all(t.seconds > 0 and t.share for t in found.sweep)
    assert found.across_bps is None
    reduced = found.sweep[0]
    assert reduced.bus_bps == pytest.approx(1000 / reduced.seconds), "2(n-1)/n is 1 for two"


def test_one_device_is_refused():
    with pytest.raises(ValueError, match="no wires to measure"):
        probe.measure(TWO, devices=jax.devices()[:1])


def test_links_as_on_record_pass_and_one_slow_pair_is_named():
    assert [c.verdict for c in judge(measured(), min_share=0.6)] == ["ok", "ok", "ok"]
    near, far, *_ = judge(measured(slow=[(1, 2)]), min_share=0.6)
    assert near.ok
    assert (far.name, far.verdict) == ("pair 1 - 2", "fail")


def test_a_slow_collective_is_named():
    found = measured()
    slow = replace(found.sweep[0], seconds=2 * found.sweep[0].seconds)
    *_, last = judge(replace(found, sweep=(slow,)), min_share=0.6)
    assert (last.name, last.verdict) == ("all_reduce", "fail")
    assert "50% of what the links promise" in last.value


def test_a_network_that_is_not_known_is_not_judged():
    found = replace(measured(), topology=replace(TWO, network=None))
    unknown = replace(found.sweep[0], expected_s=None)
    checks = judge(replace(found, sweep=(unknown,)), min_share=0.6)
    assert [c.verdict for c in checks] == ["ok", "skip", "skip"]


def test_a_plan_reads_the_measured_links(tmp_path):
    write_topology(measured(slow=[(2, 3)]), tmp_path / "here.yaml")
    there = Topology.from_file(tmp_path / "here.yaml")
    assert (there.hosts, there.devices_per_host, there.device_kind) == (2, 2, "cpu")
    assert there.memory_bytes == 10**9
    assert there.inside_link is not None
    assert there.inside_link.bandwidth_bps == 1e6, "the slowest pair's"
    assert there.network is not None
    assert there.network.latency_s == pytest.approx(2e-5), "the median of 1, 2, 2, 3 times 10 us"
    assert there.network_bps == 6e9, "of a device while all send"


@pytest.mark.multidevice
def test_the_command_ends_with_1_when_the_wires_are_slower_than_asked(
    tmp_path, capsys, monkeypatch
):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    out, devices = tmp_path / "here.yaml", all_devices()[:2]
    monkeypatch.setattr("jaxfound.resources.topology.all_devices", lambda: devices)
    words = ["--max-mib", "0.001", "--rounds", "1", "--min-share", "1e6", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--json", *words])
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert {c["verdict"] for c in told["checks"]} == {"fail"}
    assert len(told["pairs"]) == 1
    assert Topology.from_file(out).num_devices == 2


@pytest.mark.multiprocess
def test_under_launch_the_wires_between_all_hosts_are_measured_and_one_process_tells(tmp_path):
    words = ["launch", "--simulate-hosts", "2", "--", "probe", "--json", "--max-mib", "0.001"]
    asked = [*words, "--rounds", "1", "--min-share", "0", "--network", "eth100", "--out", "it.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxfound.cli.main", *asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The agent's own lines are around what process 0 says.
    told = json.loads(done.stdout[done.stdout.index("{\n") : done.stdout.rindex("}") + 1])
    assert [(p["first"], p["second"], p["crosses_hosts"]) for p in told["pairs"]] == [(0, 1, True)]
    assert told["across_bps"] > 0
    assert Topology.from_file(tmp_path / "it.yaml").hosts == 2
    assert "pairs" not in (tmp_path / "runs/probe/logs/attempt-0/process-1.log").read_text()


def test_virtual_devices_are_refused_in_a_job(monkeypatch):
    monkeypatch.setattr("jaxfound.cli.train.join_job", lambda: Place("127.0.0.1:1", 2, 0))
    with pytest.raises(typer.BadParameter, match="--devices-per-host 4"):
        meet_others(4)
