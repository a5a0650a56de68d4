"""Who holds a job up, and which host is slow."""

import pytest

from jaxfound.resources.hang import Limits, find_hang
from jaxfound.resources.pulse import PHASES, Beat, Pulse
from jaxfound.resources.stragglers import find_stragglers

LIMITS = Limits(fast_s=10, slow_s=100, step_s=0.5)


def beat(step, phase, age_s):
    return Beat(number=1, step=step, phase=phase, age_s=age_s, committed=-1)


def hang(*beats, process=0, limits=LIMITS, silent=()):
    return find_hang(
        dict(enumerate(beats)), process=process, limits=limits, silent=frozenset(silent)
    )


@pytest.mark.parametrize("phase", ["data", "dispatch", "loop"])
def test_the_one_that_does_not_wait_holds_up_the_others(phase):
    found = hang(beat(29, "wait", 11), beat(29, phase, 12), beat(29, "wait", 11))
    assert found.guilty == (1,)
    assert (
        f"held up by process 1. process 0: step 29, wait for 11 s, process 1: step 29, {phase}"
        in found.text
    )


def test_when_all_wait_the_one_that_is_behind_is_named_else_nobody():
    assert hang(beat(30, "wait", 11), beat(29, "wait", 11)).guilty == (1,)
    found = hang(beat(29, "wait", 11), beat(29, "wait", 11))
    assert found.guilty == ()
    assert "every process waits for the others" in found.text


def test_a_process_that_is_silent_is_named_whatever_it_said_last():
    assert hang(beat(29, "wait", 11), beat(29, "wait", 1), silent=[1]).guilty == (1,)
    assert hang(beat(29, "wait", 11), beat(29, "save", 1), silent=[1]).guilty == (1,)


def test_nobody_hangs_while_one_saves():
    assert hang(beat(29, "wait", 99), beat(29, "save", 99)) is None
    assert hang(beat(29, "wait", 199), beat(29, "save", 101)).guilty == (1,)


def test_nobody_hangs_while_one_moves_however_slowly():
    assert hang(beat(29, "wait", 13), beat(28, "data", 4)) is None
    assert hang(beat(29, "wait", 13), beat(29, "wait", 0)) is None


def test_nothing_hangs_before_the_limit_of_its_phase():
    assert hang(beat(29, "wait", 9), beat(29, "data", 99)) is None
    assert hang(beat(0, "compile", 99)) is None
    assert hang(beat(0, "compile", 101)).guilty == (0,)


def test_ten_usual_steps_are_no_hang():
    slow = Limits(fast_s=10, slow_s=100, step_s=2.0)
    assert hang(beat(29, "data", 19), limits=slow) is None
    assert hang(beat(29, "data", 21), limits=slow).guilty == (0,)


def test_a_pulse_says_what_the_process_does_and_for_how_long():
    now = [100.0]
    pulse = Pulse(clock=lambda: now[0])
    pulse.enter("data", step=7)
    now[0] = 103.0
    first = pulse.look()
    assert (first.step, first.phase, first.age_s) == (7, "data", 3.0)
    assert Beat.parse(first.to_text()) == first
    pulse.enter("wait")
    now[0] = 104.0
    assert (pulse.look().step, pulse.look().phase, pulse.look().age_s) == (7, "wait", 1.0)
    assert pulse.look().number > first.number
    assert pulse.take_spent()["data"] == 3.0
    assert pulse.take_spent()["data"] == 0.0
    pulse.forgive()
    assert pulse.look().age_s == 0.0


def spent(**seconds):
    return {**dict.fromkeys(PHASES, 0.0), **seconds}


def test_the_host_whose_own_work_takes_longer_is_the_slow_one():
    times = {p: spent(data=0.1 + 0.01 * p, wait=9.9) for p in range(8)}
    times[5] = spent(data=6.0, dispatch=0.1, wait=3.9)
    (slow,) = find_stragglers(times, steps=10)
    assert (slow.process, slow.phase, slow.own_s) == (5, "data", pytest.approx(0.61))


def test_hosts_that_are_alike_are_not_slow():
    assert find_stragglers({p: spent(data=0.1, wait=9.9) for p in range(8)}, steps=10) == ()
    # Above the others by next to nothing of a step.
    times = {p: spent(data=0.1 + 0.1 * (p == 3), wait=9.9) for p in range(8)}
    assert find_stragglers(times, steps=10) == ()
    assert find_stragglers({0: spent(data=9.0)}, steps=10) == ()


def test_the_slower_of_two_hosts_is_found():
    times = {0: spent(data=0.1, wait=9.9), 1: spent(data=8.0, wait=2.0)}
    assert [s.process for s in find_stragglers(times, steps=10)] == [1]
