import pytest

from jaxfound.resources.step_timer import StepTimer


def timer(**changes):
    return StepTimer(**{"tokens_per_step": 100, "num_steps": 10, **changes})


def run(clock, times):
    """Feed (dispatch, completion) pairs; steps are dispatched in order of their dispatch time."""
    return [
        (clock.dispatched(step, now=start), clock.completed(step, now=end))[1]
        for step, (start, end) in enumerate(times, start=1)
    ]


def test_a_step_lasts_from_completion_to_completion_however_early_it_was_dispatched():
    clock = timer()
    for step in (1, 2, 3):
        clock.dispatched(step, now=0.001 * step)
    times = [clock.completed(step, now=float(step)) for step in (1, 2, 3)]
    assert [t.duration_s for t in times] == [pytest.approx(0.999), 1.0, 1.0]
    assert [t.idle_s for t in times] == [0.0, 0.0, 0.0]
    assert clock.idle_share == 0.0
    assert times[2].tokens_per_s == 100.0


def test_time_between_a_completion_and_a_later_dispatch_is_idle():
    clock = timer()
    times = run(clock, [(0.0, 5.0), (5.5, 7.0), (7.0, 9.0)])
    assert [(t.duration_s, t.idle_s) for t in times] == [(5.0, 0.0), (2.0, 0.5), (2.0, 0.0)]
    assert clock.idle_share == pytest.approx(0.5 / 4.0)


def test_the_first_step_compiles_and_counts_in_no_average():
    clock = timer()
    run(clock, [(0.0, 60.0)])
    assert clock.median_s is None
    assert clock.tokens_per_s is None
    assert clock.idle_share is None
    assert clock.eta_s(1) is None


def test_one_slow_step_moves_neither_the_median_nor_the_time_left():
    clock = timer()
    run(clock, [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 13.0), (13.0, 14.0)])
    assert clock.median_s == 1.0
    assert clock.tokens_per_s == 100.0
    assert clock.eta_s(5) == 5.0
    assert clock.eta_s(12) == 0.0


def test_the_window_forgets_old_steps():
    clock = timer(window=2)
    run(clock, [(0.0, 1.0), (1.0, 11.0), (11.0, 12.0), (12.0, 13.0)])
    assert clock.median_s == 1.0


def test_an_evaluation_between_two_steps_is_in_neither():
    clock = timer()
    run(clock, [(0.0, 1.0), (1.0, 2.0)])
    clock.restart(now=30.0)
    clock.dispatched(3, now=30.5)
    time = clock.completed(3, now=32.0)
    assert (time.duration_s, time.idle_s) == (2.0, 0.5)


def test_two_completions_at_the_same_time_give_no_infinite_rate():
    clock = timer()
    assert run(clock, [(0.0, 1.0), (1.0, 1.0)])[1].tokens_per_s == 0.0


def test_a_step_that_was_not_dispatched_next_is_refused():
    clock = timer()
    clock.dispatched(1, now=0.0)
    clock.dispatched(2, now=0.0)
    with pytest.raises(
        ValueError, match=r"step 2 completed, but the steps dispatched are \[1, 2\]"
    ):
        clock.completed(2, now=1.0)


def test_time_that_runs_backwards_is_refused():
    clock = timer()
    clock.dispatched(1, now=5.0)
    with pytest.raises(ValueError, match="monotonic"):
        clock.completed(1, now=4.0)


def test_a_window_without_steps_is_refused():
    with pytest.raises(ValueError, match="window=0"):
        timer(window=0)
