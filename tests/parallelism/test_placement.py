"""Axes over hosts: who stays inside, who crosses, in which order devices are walked."""

import jax
import numpy as np
import pytest

from jaxfound.config.parallel import AXES
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.parallelism import PlanError, build_mesh, make_plan
from jaxfound.parallelism.placement import Span, orders, place
from jaxfound.resources.topology import Topology
from tests.models.tiny import model_config, run_config

THREE = Topology.parse("3x8:h200:ib400")
SLOW = Topology.parse("3x8:h200:eth25")
TABLE = ParamTable(
    (
        ParamSpec("layers.mixer.out.kernel", (4, 48, 48), "float32", ("layers", "heads", "embed")),
        ParamSpec("layers.ffn.up.kernel", (4, 48, 48), "float32", ("layers", "embed", "ffn")),
    )
)


def degrees(**given):
    return {axis: given.get(axis, 1) for axis in AXES}


def plan(topology=THREE, *, rows=48, **parallel):
    cfg = run_config(model_config("gqa", num_layers=4), rows=rows, parallel=parallel)
    return make_plan(cfg, topology, params=TABLE)


# Degrees on 3 hosts of 8, walked in mesh order: hosts a group spans, devices of it in each.
SPANS = [
    ({"data": 3, "fsdp": 4, "tensor": 2}, "data", Span(3, 1)),
    ({"data": 3, "fsdp": 4, "tensor": 2}, "fsdp", Span(1, 4)),
    ({"data": 3, "fsdp": 4, "tensor": 2}, "tensor", Span(1, 2)),
    ({"fsdp": 24}, "fsdp", Span(3, 8)),
    ({"data": 6, "tensor": 4}, "data", Span(3, 2)),
    # Hosts hold unequal parts of a group of 12, or of one of 3: counted as if all were elsewhere.
    ({"data": 2, "fsdp": 12}, "fsdp", Span(12, 1)),
    ({"data": 8, "tensor": 3}, "tensor", Span(3, 1)),
]


@pytest.mark.parametrize(("given", "axis", "span"), SPANS)
def test_a_group_spans_the_hosts_that_its_devices_are_in(given, axis, span):
    assert place(degrees(**given), THREE).span(axis) == span


def test_everything_is_inside_one_host():
    placement = place(degrees(data=2, fsdp=2, tensor=2), Topology.parse("8:h200"))
    assert not any(placement.crosses(axis) for axis in AXES)


def test_rows_keep_their_order_and_tensor_its_neighbours_in_every_order_tried():
    tried = list(orders(degrees(pipeline=2, data=2, fsdp=2, context=2, tensor=2)))
    assert tried[0][-5:] == ("pipeline", "data", "fsdp", "context", "tensor")
    # Pipeline and context in any of the places before tensor; data before fsdp.
    assert len(tried) == len(set(tried)) == 12
    assert all(order.index("data") < order.index("fsdp") for order in tried)
    assert {order[-1] for order in tried} == {"tensor"}


def test_stages_that_fill_a_host_leave_the_gradients_to_the_network():
    found = plan(pipeline=4, data=3, tensor=2, num_microbatches=8)
    assert found.placement.order[-3:] == ("data", "pipeline", "tensor")
    assert [axis for axis in AXES if found.placement.crosses(axis)] == ["data"]
    assert "pipeline=4 x tensor=2 stays inside a host; data=3 goes over the network" in (
        found.explain()
    )
    assert "devices are walked by data, pipeline, tensor" in found.explain()


def test_tensor_over_hosts_is_refused_with_its_seconds_and_the_way_out():
    with pytest.raises(PlanError) as refusal:
        plan(data=8, tensor=3, rows=8)
    text = str(refusal.value)
    for word in ("parallel.tensor=3", "host of 8", "GB a device and step", "s by the network",
                 "[1, 2, 4, 8]", "parallel.tensor_span=cluster"):  # fmt: skip
        assert word in text


def test_tensor_over_hosts_is_had_by_who_asks_for_it():
    forced = plan(data=8, tensor=3, tensor_span="cluster", rows=8)
    assert forced.placement.crosses("tensor")
    (wire,) = [w for w in forced.wires if w.axis == "tensor"]
    assert wire.crosses_hosts
    # A ring of three over hosts: 2 x 2 messages of a third of the bytes.
    one = wire.num_bytes / wire.calls
    expected = wire.calls * 4 * (14e-6 + one / 3 / 50e9)
    assert wire.seconds == pytest.approx(expected, rel=1e-12)


def test_a_slow_network_is_warned_of_by_its_seconds():
    fast, slow = plan(data=3, fsdp=8), plan(SLOW, data=3, fsdp=8)
    assert slow.wire_s > fast.wire_s
    assert any("warning: what crosses hosts takes" in note for note in slow.notes)


def test_traffic_that_is_less_than_the_arithmetic_gets_no_warning():
    # One row more each device and step is arithmetic more and traffic not.
    many = plan(data=3, fsdp=8, rows=24 * 10**6)
    assert not any("warning" in note for note in many.notes)


def test_a_network_that_is_not_known_has_no_seconds():
    found = plan(Topology(3, 8, "NVIDIA H200", 10**12), data=3, fsdp=8)
    assert {w.axis: w.seconds is None for w in found.wires} == {"data": True, "fsdp": False}
    assert found.wire_s is None
    assert "network not known" in found.explain()


@pytest.mark.multidevice
def test_the_mesh_walks_the_devices_in_the_order_of_the_placement():
    two = Topology.parse("2x4:h200:ib400")
    found = plan(two, pipeline=2, data=2, tensor=2, num_microbatches=4, rows=8)
    assert found.placement.order[-3:] == ("data", "pipeline", "tensor")
    mesh = build_mesh(found, devices=jax.devices()[:8])
    assert mesh.axis_names == AXES
    ids = np.vectorize(lambda d: d.id)(mesh.devices).reshape(2, 2, 2)
    # [pipeline data tensor]: a step of data is four devices, of pipeline two, of tensor one.
    assert ids.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
