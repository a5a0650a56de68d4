"""Ports of a job are all free, and no other job's."""

import socket

from jaxfound.resources.launch import ports
from jaxfound.resources.launch.join import NUM_PORTS


def test_a_row_of_ports_of_which_one_is_taken_is_left_out(monkeypatch):
    # Two rows, the first with a port that somebody listens at.
    while True:
        base = ports.free_ports()
        if base + 2 * NUM_PORTS <= ports.END and all(map(ports._is_free, both_rows(base))):
            break
    monkeypatch.setattr(ports, "FIRST", base)
    monkeypatch.setattr(ports, "END", base + 2 * NUM_PORTS)
    with socket.socket() as taken:
        taken.bind(("", base + NUM_PORTS - 1))
        assert {ports.free_ports() for _ in range(8)} == {base + NUM_PORTS}


def both_rows(base):
    return range(base, base + 2 * NUM_PORTS)


def test_two_jobs_have_all_ports_in_common_or_none():
    bases = [ports.free_ports() for _ in range(8)]
    assert {base % NUM_PORTS for base in bases} == {0}
    assert all(ports.FIRST <= base < ports.END for base in bases)
