"""The step compiled for devices that are not here: exact arguments, real collectives, a verdict."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxfound.communication.cost import Group, Lane, all_reduce
from jaxfound.communication.hlo import Collective
from jaxfound.config.load import load
from jaxfound.face import make_plan
from jaxfound.parallelism.memory import Entry, Ledger
from jaxfound.parallelism.mesh import build_mesh
from jaxfound.resources.topology import Topology
from jaxfound.training import TrainingError
from jaxfound.training.aot import Target, compile_step, compiled_text, target_of
from jaxfound.training.buffers import source_line, temporaries, widest
from jaxfound.training.compiled_step import Memory, Sent, compared
from jaxfound.training.compiled_traffic import Traced, link_of, notes_of, span_of, wire_seconds
from pallas_kernels import deviceless
from tests.training.tiny import DENSE, tiny

ROOT = Path(__file__).resolve().parent.parent.parent
REASON = deviceless.missing()
needs_plugin = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# Two hosts of two: tensor runs over neighbours, so fsdp crosses the network.
TOPOLOGY = Topology.parse("2x2:h200:ib400")
LAYOUT = ("parallel.data=1", "parallel.fsdp=2", "parallel.tensor=2")


def planned(folder):
    cfg = tiny(folder, *LAYOUT, model={**DENSE, "vocab_multiple": 2})
    return cfg, make_plan(cfg, TOPOLOGY)


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory):
    """The step of a tiny model as it is compiled where nothing can compile for a GPU."""
    cfg, plan = planned(tmp_path_factory.mktemp("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deviceless, "missing", lambda: "there is no plugin")
        return plan, compile_step(cfg, plan)


@pytest.fixture(scope="module")
def on_h200s(tmp_path_factory):
    """The same for four H200s that are not there."""
    if REASON is not None:
        pytest.skip(REASON)
    cfg, plan = planned(tmp_path_factory.mktemp("gpu"))
    return plan, compile_step(cfg, plan)


@pytest.fixture(params=["on_cpus", "on_h200s"])
def step(request):
    return request.getfixturevalue(request.param)


@pytest.mark.multidevice
def test_the_plans_arguments_are_the_compilers_to_the_byte(step):
    plan, step = step
    assert step.memory.arguments == plan.ledger.argument_bytes
    assert step.planned[0].deviation == 0.0
    # State takes the place of state: what is new are the numbers of the step.
    assert 0 < step.memory.outputs - step.memory.aliased < 2048


@pytest.mark.multidevice
def test_collectives_are_told_with_the_axes_and_the_link_that_they_take(step):
    _, step = step
    links = {(row.axes, row.link) for row in step.traffic}
    assert (("tensor",), "inside a host") in links
    assert (("fsdp",), "across hosts") in links
    gathers = [s for s in step.sent if s.collective == "all_gather" and s.axes == ("fsdp",)]
    # Weights of two layers, gathered one layer at a time.
    assert any(s.calls == 2 for s in gathers)
    assert {s.group_size for s in gathers} == {2}


@pytest.mark.multidevice
def test_buffers_are_told_by_the_line_that_makes_them(step):
    _, step = step
    assert 0 < sum(b.num_bytes for b in step.buffers) <= step.memory.temporaries
    assert any(b.source.startswith("jaxfound/models/") for b in step.buffers)
    assert [b.num_bytes for b in step.buffers] == sorted(
        (b.num_bytes for b in step.buffers), reverse=True
    )


@pytest.mark.multidevice
def test_the_record_is_plain_data(step):
    _, step = step
    data = json.loads(json.dumps(step.as_data()))
    assert data["memory"]["total"] == step.memory.total
    assert data["planned"][-1]["compiled"] == step.memory.total
    assert len(data["sent"]) == len(step.sent)
    assert data["fits"] is (None if step.stand_in else True)


@pytest.mark.multidevice
def test_a_step_fits_when_the_compilers_bytes_and_the_margin_do(on_cpus):
    _, stand_in = on_cpus
    assert stand_in.fits is None
    step = replace(stand_in, stand_in="")
    needed = step.memory.total + step.margin_bytes
    assert replace(step, capacity_bytes=needed).fits is True
    assert replace(step, capacity_bytes=needed - 1).fits is False
    assert replace(step, capacity_bytes=0).fits is None


@pytest.mark.multidevice
def test_cpu_devices_that_stand_in_for_gpus_say_so_and_promise_no_seconds(on_cpus):
    _, step = on_cpus
    assert "in place of NVIDIA H200, because there is no plugin" in step.stand_in
    assert step.target == "4 CPU devices"
    assert step.work_s is None
    assert {(s.is_async, s.seconds) for s in step.sent} == {(False, None)}


def test_an_h200_program_scatters_its_gradients_and_works_beside_collectives(on_h200s):
    _, step = on_h200s
    assert step.stand_in == ""
    assert step.target == "4 NVIDIA H200 of 2 hosts"
    assert any(s.collective == "reduce_scatter" and s.axes == ("fsdp",) for s in step.sent)
    assert any(s.is_async and (s.beside_s or 0) > 0 for s in step.sent)
    assert step.work_s is not None
    assert 0 < step.work_s < step.waited_s
    assert all(0 <= row.covered <= 1 for row in step.traffic)


@needs_plugin
def test_one_kernel_updates_a_parameter_and_its_moments(tmp_path):
    # Layers that no loop goes over: few of them have gradients that XLA concatenates on their own.
    cfg = tiny(tmp_path, "parallel.layers_per_scan_step=all", "parallel.remat=none")
    plan = make_plan(cfg, Topology.parse("1:h200"))
    target = target_of(plan.topology)
    mesh = build_mesh(plan, devices=target.devices)
    text, _, _ = compiled_text(cfg, plan, mesh, target=target, folder=tmp_path)
    entry = text[text.index("\nENTRY") :]
    results = [line.split(" fusion(")[0] for line in entry.splitlines() if " fusion(" in line]
    assert any(r.count("f32[2,32,16]") == 3 for r in results)


def test_a_plans_workspace_is_compared_only_where_the_devices_were_asked():
    ledger = Ledger((Entry("parameters", 10, ""), Entry("workspace", 5, "")))
    memory = Memory(10, 10, 10, 3, 0)
    assert [row.planned for row in compared(ledger, memory, on_devices=True)] == [10, 5, 15]
    assert [row.planned for row in compared(ledger, memory, on_devices=False)] == [10, 0, 10]


# Kind of device → what the refusal names; neither has a compiler here.
ABSENT = {"8:mi300x": "MI300X", "4:tpu-v4": "TPU v4"}


@pytest.mark.parametrize("text", ABSENT)
def test_what_cannot_be_described_is_refused_by_name(text):
    with pytest.raises(TrainingError, match=ABSENT[text]):
        target_of(Topology.parse(text))


@needs_plugin
def test_a_gpu_that_the_compiler_is_told_nothing_of_is_refused_with_those_it_knows():
    with pytest.raises(TrainingError, match=r"A100.*H200"):
        target_of(Topology.parse("8:a100"))


@pytest.mark.multidevice
def test_more_cpu_devices_than_there_are_is_refused_with_the_way_to_have_them():
    with pytest.raises(TrainingError, match=r"4096 .* started with 8.*JAX_NUM_CPU_DEVICES=4096"):
        target_of(Topology.parse("512x8:cpu:ib400"))


def test_a_plan_for_no_device_is_refused(tmp_path):
    cfg, plan = planned(tmp_path)
    with pytest.raises(TrainingError, match="topology"):
        compile_step(cfg, replace(plan, topology=None), target=Target((), "cpu"))


HOSTS = np.array([0, 0, 1, 1, 2, 2])
# Groups of devices → hosts that a group spans, devices in each, and the slowest link.
SPANS = {
    "inside": (((0, 1), (2, 3), (4, 5)), (1, 2), "inside a host"),
    "across": (((0, 2, 4), (1, 3, 5)), (3, 1), "across hosts"),
    "everyone": (((0, 1, 2, 3, 4, 5),), (3, 2), "across hosts"),
    # Two in one host and one in another: the ring runs at the network's speed.
    "uneven": (((0, 1, 2), (3, 4, 5)), (3, 1), "across hosts"),
    "pairs": (((1, 2), (3, 4)), (2, 1), "across hosts"),
    "alone": (((0,), (1,)), (1, 1), "one device"),
}


@pytest.mark.parametrize("name", SPANS)
def test_groups_are_laid_over_the_hosts_of_their_devices(name):
    groups, span, link = SPANS[name]
    assert span_of(groups, HOSTS) == span
    assert link_of(Collective("all_reduce", "f32[1]", groups), HOSTS) == link


def test_a_collective_costs_what_its_links_cost():
    everyone = Collective("all_reduce", "f32[1]", SPANS["everyone"][0])
    inside, network = TOPOLOGY.inside_link, TOPOLOGY.network
    group = Group(
        inside=2,
        hosts=3,
        near=Lane(inside.bandwidth_bps, inside.latency_s),
        far=Lane(network.bandwidth_bps, network.latency_s),
    )
    found = wire_seconds(everyone, 10**9, replace(TOPOLOGY, hosts=3), HOSTS)
    assert found == all_reduce(10**9, group)
    assert wire_seconds(replace(everyone, groups=((0,),)), 10**9, TOPOLOGY, HOSTS) == 0


SENT = Sent("all_reduce", ("data",), 3, "across hosts", 8, 1, False, False, 1.0, 0.0, 1.0, "a.py:1")
FULL = Memory(arguments=75, outputs=75, aliased=75, temporaries=64, peak=139)


BOTH = Traced((SENT, replace(SENT, is_async=True)))


def notes(memory=FULL, *, slop=95, traced=BOTH):
    return list(notes_of(traced, memory, capacity_bytes=150, slop_percent=slop))


def test_a_step_above_the_compilers_aim_is_told_what_that_costs_and_how_to_raise_it():
    # 80 % of 150 is 120; 95 % of the 45 that the arguments leave of it is 42.
    (note,) = notes()
    assert "aims below 117 B" in note
    assert "1 of 2" in note
    # (142 - 75) / 45.
    assert "--xla_gpu_memory_limit_slop_factor=148" in note
    assert notes(replace(FULL, temporaries=42)) == []
    assert notes(slop=150) == []
    # Arguments that fill what it plans with leave nothing to raise.
    (note,) = notes(replace(FULL, arguments=130))
    assert "XLA_FLAGS" not in note
    assert notes(slop=None) == []


def test_what_is_counted_by_halves_is_told():
    one = Traced((replace(SENT, in_branch=True),), unknown_loops=("while.2",))
    found = notes(slop=None, traced=one)
    assert [note.split()[0] for note in found] == ["1", "1"]
    assert "loops of unknown length" in found[0]
    assert "branches" in found[1]


ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <1 param.4 @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 100, page 0, preallocated-temp:
 value: <2 zeros.1 @0> (size=40,offset=0): f32[10]{0}
 value: <3 sum.2 @0> (size=40,offset=0): f32[10]{0}
 value: <4 while.2{1} (phi) @0> (size=40,offset=0): f32[10]{0}
 value: <5 pair{} @0> (size=16,offset=44): (f32[10]{0}, f32[2]{0})
 value: <6 gather{0} @0> (size=30,offset=30): f32[5]{0}
 value: <7 part @0> (size=20,offset=40): f32[5]{0}

Total bytes used: 164
"""


def test_memory_is_counted_once_for_the_largest_that_ever_lies_there():
    found = list(temporaries(ASSIGNMENT))
    assert [v.operation for v in found] == ["zeros.1", "sum.2", "gather", "part"]
    assert [[v.operation for v in group] for group in widest(found)] == [
        ["zeros.1", "sum.2"],
        ["part"],
    ]


def test_the_line_of_a_layer_is_told_and_not_what_every_layer_passes_through():
    stack = (
        "/x/site-packages/optax/tree.py:3",
        "/repo/pallas_kernels/sharded.py:208",
        "/repo/jaxfound/models/layers/linear.py:48",
        "/repo/jaxfound/models/layers/mlp.py:39",
    )
    assert source_line(stack) == "jaxfound/models/layers/mlp.py:39"
    assert source_line(stack[:2]) == "pallas_kernels/sharded.py:208"
    assert source_line(()) == ""


@needs_plugin
@pytest.mark.slow
def test_the_ledger_of_50b_on_three_hosts_is_within_15_percent_of_the_compilers():
    cfg = load(ROOT / "configs" / "50b-3x8-zero.yaml")
    plan = make_plan(cfg, Topology.parse("3x8:h200:ib400"))
    step = compile_step(cfg, plan)
    arguments, _, total = step.planned
    assert arguments.planned == arguments.compiled
    assert abs(total.deviation) < 0.15
    assert step.fits is True
