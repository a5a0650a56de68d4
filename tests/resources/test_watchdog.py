"""What a watchdog does of what it sees; how each process would end is noted instead of done."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path

import pytest

from jaxfound.resources.control import ControlPlane, LocalStore
from jaxfound.resources.ending import tell_ending
from jaxfound.resources.job_stop import JobStop
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.pulse import Pulse, read_heartbeat
from jaxfound.resources.watchdog import Surroundings, Watchdog


class EndedError(Exception):
    """Instead of the end of the process."""


def end(code):
    raise EndedError(int(code))


@pytest.fixture(autouse=True)
def nobody_lingers(monkeypatch):
    monkeypatch.setattr("jaxfound.resources.ending.LINGER_S", 0)


def watchdog(folder: Path, *, process=0, count=1, store=None, hang_s=10, asked=""):
    """A watchdog that looks when it is told to, at a clock that can be set."""
    now = [0.0]
    plane = ControlPlane(process, count, store or LocalStore())
    pulse = Pulse(clock=lambda: now[0])
    around = Surroundings(
        heartbeat=folder / f"{process}.json",
        attempt=3,
        stacks=folder / "logs" / f"{process}.txt",
        hang_s=hang_s,
        slow_s=100,
        interval_s=0.001,
    )
    return Watchdog(plane, pulse, JobStop(plane, lambda: asked), around, end), now


def test_an_agent_reads_how_far_the_process_is(tmp_path):
    dog, now = watchdog(tmp_path)
    dog.pulse.enter("data", step=7)
    dog.pulse.committed = 5
    now[0] = 2.0
    dog.look()
    told = read_heartbeat(tmp_path / "0.json")
    assert (told.attempt, told.beat.step, told.beat.committed, told.beat.age_s) == (3, 7, 5, 2.0)


def test_a_hang_is_told_to_all_and_leaves_the_stacks(tmp_path, caplog):
    store = LocalStore()
    (first, now), (second, later) = (
        watchdog(tmp_path, process=p, count=2, store=store) for p in range(2)
    )
    first.pulse.enter("wait", step=4)
    second.pulse.enter("data", step=4)
    second.look()
    later[0] = now[0] = 9.0
    second.look()
    first.look()
    now[0] = later[0] = 11.0
    # The other one has died down: its beats stay what they were.
    with pytest.raises(EndedError, match="75"):
        first.look()
    (hang,) = [r for r in caplog.records if r.message == "job.hang"]
    assert (hang.guilty, "held up by process 1" in hang.why) == ([1], True)
    assert "test_a_hang_is_told" in (tmp_path / "logs" / "0.txt").read_text()
    with pytest.raises(EndedError, match="75"):
        second.look()
    assert (tmp_path / "logs" / "1.txt").exists()


def test_a_process_that_moves_is_left_alone(tmp_path):
    dog, now = watchdog(tmp_path)
    for step in range(5):
        dog.pulse.enter("data", step=step)
        now[0] += 9.0
        dog.look()


def test_no_hang_is_looked_for_when_none_is_asked_for(tmp_path):
    dog, now = watchdog(tmp_path, hang_s=0)
    now[0] = 1e6
    dog.look()


@pytest.mark.parametrize("code", [Exit.REFUSED, Exit.PEER])
def test_the_end_that_another_process_tells_is_followed(tmp_path, code):
    store = LocalStore()
    dog, _ = watchdog(tmp_path, count=2, store=store)
    tell_ending(ControlPlane(1, 2, store), code=code, why="reasons")
    with pytest.raises(EndedError, match=str(int(code))):
        dog.look()


def test_a_notice_before_the_first_step_ends_at_once(tmp_path):
    dog, _ = watchdog(tmp_path, asked="SIGTERM")
    with pytest.raises(EndedError, match="76"):
        dog.look()


def test_who_keeps_the_keys_stays_until_the_others_have_read_the_notice(tmp_path, monkeypatch):
    stayed, store = [], LocalStore()
    monkeypatch.setattr("jaxfound.resources.watchdog.linger", lambda plane: stayed.append(plane))
    dogs = [
        watchdog(tmp_path, process=p, count=2, store=store, asked="SIGTERM")[0] for p in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        looks = [pool.submit(dog.look) for dog in dogs]
        ends = [look.exception(timeout=20) for look in looks]
    assert [str(error) for error in ends] == ["76", "76"]
    assert [plane.process for plane in stayed] == [0]


def test_a_process_whose_agent_is_gone_ends(tmp_path, monkeypatch):
    dog, _ = watchdog(tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(EndedError, match="77"):
        dog.look()


def test_a_process_that_was_stopped_for_a_time_is_forgiven(tmp_path, monkeypatch):
    dog, now = watchdog(tmp_path)
    # The thread wakes up an hour later, by its own clock.
    times = chain([0.0, 0.0], repeat(3600.0))
    monkeypatch.setattr("jaxfound.resources.watchdog.time.monotonic", lambda: next(times))
    now[0] = 3600.0
    monkeypatch.setattr(dog, "look", lambda: dog._closing.set())
    dog._watch()
    assert dog.pulse.look().age_s == 0.0
