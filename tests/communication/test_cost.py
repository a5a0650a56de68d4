"""Seconds of collectives against numbers worked out by hand."""

import math

import pytest

from jaxfound.communication.cost import COLLECTIVES, NO_LANE, Group, Lane, ring_pass

NEAR = Lane(bandwidth_bps=100e9, latency_s=1e-6)
FAR = Lane(bandwidth_bps=10e9, latency_s=5e-6)
HOST = Group(inside=4, near=NEAR)
# Two hosts of four devices each; three hosts with one device of the group in each.
TWO_HOSTS = Group(inside=4, hosts=2, near=NEAR, far=FAR)
RAIL = Group(inside=1, hosts=3, far=FAR)
GIGA = 10**9

# Every line is messages x latency + bytes / bandwidth, 1 GB a device.
BY_HAND = {
    # Three messages of a quarter.
    ("all_gather", "host"): 3 * (1e-6 + 0.25e9 / 100e9),
    ("reduce_scatter", "host"): 3 * (1e-6 + 0.25e9 / 100e9),
    ("all_reduce", "host"): 6 * (1e-6 + 0.25e9 / 100e9),
    ("all_to_all", "host"): 3 * (1e-6 + 0.25e9 / 100e9),
    ("permute", "host"): 1e-6 + 1e9 / 100e9,
    # A quarter, halved, over the network; then whole quarters inside.
    ("all_gather", "two_hosts"): (5e-6 + 0.125e9 / 10e9) + 3 * (1e-6 + 0.25e9 / 100e9),
    ("reduce_scatter", "two_hosts"): (5e-6 + 0.125e9 / 10e9) + 3 * (1e-6 + 0.25e9 / 100e9),
    ("all_reduce", "two_hosts"): 2 * (5e-6 + 0.125e9 / 10e9) + 6 * (1e-6 + 0.25e9 / 100e9),
    # An eighth for each of three neighbours and of four devices elsewhere.
    ("all_to_all", "two_hosts"): 3 * (1e-6 + 0.125e9 / 100e9) + 4 * (5e-6 + 0.125e9 / 10e9),
    ("permute", "two_hosts"): 5e-6 + 1e9 / 10e9,
    ("all_reduce", "rail"): 4 * (5e-6 + 1e9 / 3 / 10e9),
    ("all_to_all", "rail"): 2 * (5e-6 + 1e9 / 3 / 10e9),
}
GROUPS = {"host": HOST, "two_hosts": TWO_HOSTS, "rail": RAIL}


@pytest.mark.parametrize(("collective", "group"), BY_HAND)
def test_a_collective_takes_the_seconds_worked_out_by_hand(collective, group):
    seconds = COLLECTIVES[collective](GIGA, GROUPS[group])
    assert math.isclose(seconds, BY_HAND[collective, group], rel_tol=1e-12)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_of_one_sends_nothing(collective):
    assert COLLECTIVES[collective](GIGA, Group(inside=1)) == 0


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_with_one_bandwidth_everywhere_hosts_make_no_difference_to_the_bytes(collective):
    # (n - 1) / n of the bytes, whether they go in one ring of 12 or by 3 hosts of 4.
    lane = Lane(bandwidth_bps=50e9, latency_s=0.0)
    by_hosts = Group(inside=4, hosts=3, near=lane, far=lane)
    one_ring = Group(inside=12, near=lane)
    cost = COLLECTIVES[collective]
    assert math.isclose(cost(GIGA, by_hosts), cost(GIGA, one_ring), rel_tol=1e-12)


def test_small_messages_cost_their_latency_alone():
    assert math.isclose(ring_pass(0, 8, FAR), 7 * 5e-6)


def test_the_lane_that_is_not_used_takes_no_time():
    assert ring_pass(GIGA, 8, NO_LANE) == 0
