"""Load tests: what is planned, what is measured, and what the figures mean."""

import asyncio
import math

import numpy as np
import pytest

from jaxfound.config import ConfigError
from jaxfound.serving.load_plan import Lengths, Shot, Workload, plan_shots
from jaxfound.serving.load_report import Limits, Shown, Spread, summarise
from jaxfound.serving.loadgen import EngineTarget, News, TargetError, run_load
from tests.serving.scripted import ScriptedFront, served_model

TEN = Lengths.parse("10")


def shots(num=8, *, rate=None, **keys):
    keys = {"concurrency": None if rate else 2, "rate": rate, **keys}
    workload = Workload(num, keys.pop("prompt", TEN), TEN, **keys)
    return plan_shots(workload, ids=range(3, 300), max_length=128)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("7", 7, 7), ("3-9", 3, 9), ("lognormal:50:0", 50, 50)]
)
def test_lengths_stay_in_their_range(text, low, high):
    drawn = Lengths.parse(text).draw(500, np.random.default_rng(0))
    assert (min(drawn), max(drawn)) == (low, high)


def test_lognormal_lengths_have_their_median_and_spread():
    drawn = np.array(Lengths.parse("lognormal:200:0.5").draw(4000, np.random.default_rng(0)))
    # The standard error of either is below 0.01.
    assert np.log(drawn).std() == pytest.approx(0.5, abs=0.03)
    assert np.median(np.log(drawn)) == pytest.approx(math.log(200), abs=0.03)


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "a", "lognormal:9", "lognormal:9:x", "1.5"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ConfigError, match="is no length"):
        Lengths.parse(text)


def test_arrivals_of_an_open_loop_are_a_poisson_process():
    times = [shot.at_s for shot in shots(4000, rate=50.0)]
    gaps = np.diff(times)
    assert times[0] == 0
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.06)


def test_the_same_seed_sends_the_same_and_all_of_it_fits():
    wide = Lengths.parse("1-400")
    assert shots(20, prompt=wide, seed=3) == shots(20, prompt=wide, seed=3)
    assert shots(20, prompt=wide, seed=3) != shots(20, prompt=wide, seed=4)
    assert all(len(s.prompt) + s.max_tokens <= 128 for s in shots(200, prompt=wide))


def test_prompts_begin_alike_where_asked():
    prompts = [shot.prompt for shot in shots(5, prompt=Lengths.parse("20"), shared_prefix=12)]
    assert len({prompt[:12] for prompt in prompts}) == 1
    assert len({prompt[12:] for prompt in prompts}) == 5


def test_a_load_is_either_closed_or_open():
    for keys in ({}, {"concurrency": 1, "rate": 1.0}):
        with pytest.raises(ConfigError, match="Give one of them"):
            Workload(1, TEN, TEN, **keys)


class Clockwork:
    """A target that answers with tokens at fixed times, and counts who is there."""

    def __init__(self, *, first_s=0.02, next_s=0.01, num=3, fails=()):
        self.first_s, self.next_s, self.num, self.fails = first_s, next_s, num, fails
        self.here, self.most = 0, 0

    async def send(self, shot):
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            for i in range(self.num):
                await asyncio.sleep(self.next_s if i else self.first_s)
                if shot.number in self.fails:
                    raise TargetError("status 503")
                yield News(1, i + 1, 0.005)
        finally:
            self.here -= 1


def test_a_closed_loop_keeps_its_clients_busy_and_no_more():
    target = Clockwork()
    shown = asyncio.run(run_load(target, shots(12), concurrency=3, limit_s=20.0))
    assert target.most == 3
    assert [each.number for each in shown] == list(range(12))
    assert all(each.num_tokens == 3 and len(each.gaps_s) == 2 for each in shown)
    assert all(each.first_token_s >= 0.02 and each.per_token_s >= 0.01 for each in shown)


def test_an_open_loop_sends_on_time_whatever_is_answered():
    target = Clockwork(first_s=0.3)
    planned = shots(6, rate=60.0)
    shown = asyncio.run(run_load(target, planned, concurrency=None, limit_s=20.0))
    # All had been sent before the first was answered.
    assert target.most == 6
    assert [each.planned_s for each in shown] == [shot.at_s for shot in planned]
    assert all(each.sent_s >= each.planned_s for each in shown)


def test_failures_are_counted_by_reason_and_are_never_good():
    shown = asyncio.run(run_load(Clockwork(fails={1, 4}), shots(6), concurrency=2, limit_s=20.0))
    found = summarise("x", shown, limits=Limits())
    assert found.failures == {"status 503": 2}
    assert found.good_share == pytest.approx(4 / 6)
    assert found.queue_s.p50 == 0.005


def test_what_is_not_done_in_time_is_broken_off_and_counted():
    target = Clockwork(first_s=30.0)
    shown = asyncio.run(run_load(target, shots(5), concurrency=2, limit_s=0.2))
    assert target.here == 0
    assert {each.error for each in shown} == {"not done within the time limit"}
    assert len(shown) == 5


def one(**changes):
    keys = {"planned_s": 1.0, "sent_s": 1.1, "first_s": 1.5, "end_s": 2.5, "num_prompt": 10}
    return Shown(**{"number": 0, **keys, "num_tokens": 11, "gaps_s": (0.1,) * 10, **changes})


def test_figures_are_those_of_their_definitions():
    found = summarise("x", [one(), one(end_s=4.5)], limits=Limits(0.6, 0.15))
    assert found.first_token_s.p50 == pytest.approx(0.5)
    assert found.per_token_s.largest == pytest.approx(0.3)
    assert found.per_token_s.mean == pytest.approx(0.2)
    assert found.whole_s.largest == pytest.approx(3.5)
    assert found.lag_s.p99 == pytest.approx(0.1)
    assert found.duration_s == 4.5
    assert found.token_rate == pytest.approx(22 / 4.5)
    assert found.prompt_rate == pytest.approx(20 / 4.5)
    # The second is too slow a token; both would be without a limit.
    assert (found.good_share, found.goodput) == (0.5, pytest.approx(1 / 4.5))
    assert math.isnan(found.queue_s.p50)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(0.5, 0.1), True),
        (Limits(0.49, 0.1), False),
        (Limits(0.5, 0.09), False),
        (Limits(), True),
    ],
)
def test_limits_are_met_up_to_their_value(limits, good):
    assert limits.met_by(one(planned_s=1.0, end_s=2.5)) is good


def test_a_spread_is_numpys_percentiles():
    values = list(np.random.default_rng(0).random(1000))
    found = Spread.of([*values, math.nan])
    assert found.p90 == pytest.approx(np.percentile(values, 90))
    assert found.largest == max(values)


def test_an_engine_is_a_target():
    front = ScriptedFront(served_model().tokenizer)
    planned = [Shot(i, 0.0, (0, 392), 20) for i in range(4)] + [Shot(4, 0.0, (5,) * 13, 2)]
    shown = asyncio.run(run_load(EngineTarget(front), planned, concurrency=2, limit_s=20.0))
    assert [each.num_tokens for each in shown] == [8] * 4 + [0]
    assert [each.error for each in shown] == [""] * 4 + ["RequestError"]
    assert not front.open
