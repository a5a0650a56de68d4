"""What saves cost a step is summed as stated; the measurement itself is tests/cli's."""

import pytest

from jaxfound.training.checkpoint_record import (
    STEP_LIMITS,
    SaverTimes,
    Saves,
    Shape,
    Steps,
    StepTimes,
    as_record,
)
from jaxfound.training.events import TrainingError
from jaxfound.training.measure_checkpoints import Trainer, shape_of, take_steps, turns

STATE = Shape(32, (128, 1024))


def saver(*blocked_s):
    return SaverTimes(blocked_s, blocked_s, blocked_s)


def saves(ours):
    others = {"orbax": saver(3.0, 5.0, 4.0), "orbax_uncompressed": saver(2.0, 1.0, 9.0)}
    return Saves(STATE, 0.001, {"jaxfound": saver(*ours), **others})


def steps(tiers, *, skipped=0):
    none = (StepTimes(1.0, 2.0, 1.0, 3.0), StepTimes(2.0, 4.0, 3.0, 5.0))
    direct = StepTimes(1.0, 9.0, 4.1, 30.0)
    return Steps(STATE, 200, 100, 1e6, none, tiers, direct, uploading=0.5, skipped=skipped)


def test_a_save_is_compared_with_the_faster_of_the_others():
    assert saves((0.1, 0.3, 0.15)).share == pytest.approx(0.15 / 2)
    assert saves((0.1, 0.3, 0.15)).is_kept
    assert not saves((0.3, 0.2, 0.25)).is_kept


def test_steps_are_compared_round_by_round():
    found = steps((StepTimes(1.05, 2.1, 1.0, 9.0), StepTimes(2.1, 4.4, 3.0, 9.0)))
    assert found.median_ratio == pytest.approx(1.05)
    assert found.p99_ratio == pytest.approx((1.05 + 1.1) / 2)
    assert found.direct_ratio == pytest.approx(4.1 / 2.0), "over the median of the rounds' means"


@pytest.mark.parametrize(
    ("p99_s", "skipped", "kept"), [(2.19, 0, True), (2.21, 0, False), (2, 1, False)]
)
def test_a_slow_step_and_a_save_that_was_left_out_miss_the_limit(p99_s, skipped, kept):
    slow = (StepTimes(1.0, p99_s, 1.0, 9.0), StepTimes(2.0, 2 * p99_s, 3.0, 9.0))
    assert STEP_LIMITS["cpu"] == 1.10
    assert steps(slow, skipped=skipped).is_kept is kept


def test_p99_of_200_steps_leaves_out_the_two_longest():
    seconds = [1.0] * 197 + [2.0, 50.0, 60.0]
    assert StepTimes.of(seconds).p99_s == pytest.approx(2.0, rel=0.3)
    assert StepTimes.of(seconds).longest_s == 60.0


def test_kinds_take_turns_and_the_order_is_turned_each_round():
    assert turns(["a", "b"], rounds=3) == ["a", "b", "b", "a", "a", "b"]


def test_a_state_is_as_large_as_asked_for():
    assert shape_of(2**24) == STATE
    assert STATE.num_bytes == 2**24
    assert shape_of(2**33).num_bytes == 2**33


def test_every_step_changes_the_state_and_a_save_comes_every_so_many():
    trainer = Trainer.of(shape_of(1))
    seen = []
    take_steps(trainer, 7, every=3, save=lambda state: seen.append(float(state["leaf_00"][0, 0])))
    assert len(seen) == 2
    assert len({*seen, float(trainer.state["leaf_00"][0, 0])}) == 3


def test_a_record_keeps_what_was_not_measured_again_and_no_other_device():
    before = {"device": "cpu", "saves": {"commit": "a"}, "steps": {"commit": "a"}}
    around = {"commit": "b", "date": "2026-01-01T00:00:00+00:00", "note": "calm"}
    record = as_record(before, found={"saves": saves((0.1,))}, **around)
    assert record["steps"] == {"commit": "a"}
    assert (record["saves"]["commit"], record["saves"]["note"]) == ("b", "calm")
    with pytest.raises(TrainingError, match="record is of NVIDIA H200, this is cpu"):
        as_record({"device": "NVIDIA H200"}, found={}, **around)
