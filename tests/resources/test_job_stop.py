"""One notice stops all processes after the same step, wherever each of them is."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxfound.resources.control import ControlPlane, LocalStore, PeerError
from jaxfound.resources.job_stop import JobStop
from jaxfound.resources.signals import GracefulStop

# Its main thread is in one call of C code for seconds; another thread looks.
BUSY = """
import ctypes, os, signal, sys, threading, time
from jaxfound.resources.signals import GracefulStop
stop = GracefulStop()
with stop:
    def look():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        print(stop.signal_name, flush=True)
        os._exit(0)
    threading.Thread(target=look).start()
    while True:
        ctypes.CDLL(None).sleep(60)
"""


class Member:
    """A process as threads: one trains, one looks."""

    def __init__(self, process, count, store):
        self.asked = ""
        self.done = 0
        self.over = threading.Event()
        self.stop = JobStop(ControlPlane(process, count, store, timeout_s=20), lambda: self.asked)
        threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        while not self.over.wait(0.003):
            self.stop.look()

    def train(self, steps, *, lockstep, asked_at=None, seed=0):
        """Take steps until asked to stop; return how many, and who asked."""
        chance = random.Random(seed)
        for _ in range(steps):
            # A collective: nobody is a step ahead of another.
            lockstep.wait(20)
            time.sleep(chance.uniform(0, 0.01))
            self.done += 1
            if self.done == asked_at:
                self.asked = "SIGTERM"
            if reason := self.stop():
                return self.done, reason
        return self.done, ""


def trained(count, *, asked, steps=400, seed=0):
    store = LocalStore()
    members = [Member(p, count, store) for p in range(count)]
    lockstep = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        jobs = [
            pool.submit(
                m.train, steps, lockstep=lockstep, asked_at=asked.get(p), seed=10 * seed + p
            )
            for p, m in enumerate(members)
        ]
        found = [job.result(timeout=60) for job in jobs]
    for member in members:
        member.over.set()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_notice_to_one_stops_all_after_the_same_step(seed):
    found = trained(3, asked={seed % 3: 20 + seed}, seed=seed)
    assert len(set(found)) == 1
    assert found[0][1] == "SIGTERM"
    assert found[0][0] >= 20 + seed


def test_notices_to_all_at_different_steps_are_one():
    assert len(set(trained(3, asked={0: 12, 1: 11, 2: 13}))) == 1


def test_nobody_stops_without_a_notice():
    assert trained(2, asked={}, steps=30) == [(30, "")] * 2


def test_a_notice_before_the_first_step_says_that_nothing_is_done():
    store = LocalStore()
    stops = [JobStop(ControlPlane(p, 2, store), lambda p=p: "SIGTERM" * p) for p in range(2)]
    # The one that was asked tells the other, which has not been.
    with ThreadPoolExecutor(2) as pool:
        job = pool.submit(stops[1].look)
        while not store.read("jaxfound/stop"):
            time.sleep(0.001)
        stops[0].look()
        job.result(timeout=20)
    assert [stop.nothing_done for stop in stops] == [True, True]
    assert [stop() for stop in stops] == ["SIGTERM", "SIGTERM"]


def test_a_lone_process_stops_when_it_is_asked():
    asked = [""]
    stop = JobStop(ControlPlane(0, 1, LocalStore()), lambda: asked[0])
    assert (stop(), stop.nothing_done) == ("", False)
    asked[0] = "SIGINT"
    assert (stop(), stop.nothing_done) == ("SIGINT", False)


def test_who_does_not_answer_a_notice_is_named(monkeypatch):
    monkeypatch.setattr("jaxfound.resources.job_stop.AGREE_S", 0.05)
    stop = JobStop(ControlPlane(0, 2, LocalStore()), lambda: "SIGTERM")
    with pytest.raises(PeerError, match=r"for processes \[1\] of 2"):
        stop.look()


def test_a_signal_is_seen_while_the_main_thread_is_in_c():
    found = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("SIGTERM\n", 0), found.stderr


def test_a_second_notice_changes_nothing():
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
