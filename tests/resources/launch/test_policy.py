"""What an agent does after each end: the exit codes' contract."""

import pytest

from jaxfound.resources.launch.exits import Exit, meaning_of, worst
from jaxfound.resources.launch.policy import LONGEST_WAIT_S, next_move

CRASH, KILLED, ABORTED = 1, -9, -6


def move(code, *, is_stopping=False, progressed=False, fruitless=0, max_restarts=3):
    return next_move(
        code,
        is_stopping=is_stopping,
        progressed=progressed,
        fruitless=fruitless,
        max_restarts=max_restarts,
    )


@pytest.mark.parametrize("code", [Exit.HANG, Exit.PREEMPTED, Exit.PEER, CRASH, KILLED, ABORTED])
def test_what_can_go_better_is_started_again(code):
    assert move(code).restarts


@pytest.mark.parametrize("code", [Exit.DONE, Exit.REFUSED, Exit.CHECKPOINT])
def test_what_would_end_the_same_way_is_not(code):
    assert not move(code).restarts


@pytest.mark.parametrize("code", [*Exit, KILLED])
def test_an_agent_that_was_asked_to_stop_starts_nothing(code):
    assert not move(code, is_stopping=True).restarts


def test_restarts_without_a_committed_step_are_limited():
    fruitless, restarts = 0, 0
    while (now := move(CRASH, fruitless=fruitless)).restarts:
        fruitless, restarts = now.fruitless, restarts + 1
    assert restarts == 3
    assert "3 restarts in a row committed no step" in now.why


def test_a_committed_step_gives_all_restarts_back():
    assert move(CRASH, fruitless=3, progressed=True).fruitless == 1
    assert not move(CRASH, progressed=True, max_restarts=0).restarts


def test_a_preemption_costs_no_restart():
    now = move(Exit.PREEMPTED, fruitless=3)
    assert (now.restarts, now.fruitless, now.wait_s) == (True, 3, 0)


def test_waits_double_up_to_a_limit():
    waits = [move(CRASH, fruitless=n, max_restarts=99).wait_s for n in range(10)]
    assert waits[:4] == [0, 1, 2, 4]
    assert max(waits) == waits[-1] == LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ({0: Exit.PEER, 1: KILLED, 2: Exit.PEER}, 1),
        ({0: Exit.PREEMPTED, 1: Exit.PEER}, 1),
        ({0: Exit.HANG, 1: Exit.HANG}, 0),
        ({0: ABORTED, 1: Exit.HANG}, 1),
        # JAX aborts a process that is in C++ code when it loses another.
        ({0: ABORTED, 1: Exit.PEER, 2: KILLED}, 2),
        ({0: ABORTED, 1: CRASH}, 1),
        ({0: CRASH, 1: Exit.REFUSED}, 1),
        ({0: Exit.DONE, 1: ABORTED}, 1),
    ],
)
def test_the_reason_is_not_a_process_that_lost_another(codes, reason):
    assert worst(codes) == (reason, codes[reason])


def test_every_code_is_explained():
    assert all(meaning_of(code).text for code in [*Exit, 3, -15])
