"""Whatever is asked in whatever order: no page is lost or shared wrongly, every answer is right."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxfound.config.serve import ServeConfig
from jaxfound.serving.request import Request
from jaxfound.serving.scheduler import Scheduler
from tests.serving.paged_device import VOCAB, Engine, continuation, look_at_pages

# Beginnings that prompts share, ends of pages of 4 among them.
BEGINNINGS = [(), (1,) * 4, (1,) * 8, (1, 1, 1, 1, 2, 2), (1,) * 4 + (2,) * 9, tuple(range(1, 9))]


class Serving(RuleBasedStateMachine):
    """Requests come, are cancelled and run, while steps overlap or do not."""

    @initialize(
        num_pages=st.integers(4, 24),
        max_rows=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        prefill_rows=st.integers(1, 3),
        prefix_cache=st.booleans(),
        draft_tokens=st.sampled_from([0, 0, 2]),
    )
    def begin(self, num_pages, max_rows, spare_budget, prefill_rows, prefix_cache, draft_tokens):
        cfg = ServeConfig(
            page_size=4,
            max_rows=max_rows,
            token_budget=max_rows * (1 + draft_tokens) + spare_budget,
            prefill_rows=prefill_rows,
            prefix_cache=prefix_cache,
            draft_tokens=draft_tokens,
        )
        self.scheduler = Scheduler(cfg, num_pages=num_pages, max_length=num_pages * 4)
        self.engine = Engine(self.scheduler)
        self.asked = {}
        self.cancelled = set()

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        end=st.lists(st.integers(1, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 1]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([False, False, True]),
    )
    def add(self, beginning, end, max_tokens, **kinds):
        room = self.scheduler.max_length
        prompt = (*beginning, *end)[: room - 1]
        request = Request(
            id=f"r{len(self.asked)}",
            prompt=prompt,
            max_tokens=min(max_tokens, room - len(prompt)),
            **kinds,
        )
        self.scheduler.add(request)
        self.asked[request.id] = request

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if self.scheduler.cancel(name) is not None:
            self.cancelled.add(name)
        look_at_pages(self.scheduler)

    @rule(behind=st.integers(0, 2))
    def step(self, behind):
        self.engine.step(behind=0 if self.scheduler.cfg.draft_tokens else behind)

    @rule()
    def read(self):
        self.engine.read()
        look_at_pages(self.scheduler)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run_to_the_end(behind=0 if self.scheduler.cfg.draft_tokens else 1)
        look_at_pages(self.scheduler)
        assert self.scheduler.snapshot().pages_in_use == 0
        self.scheduler.holdings.cache.clear()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
        expected = {n: continuation(r) for n, r in self.asked.items() if n not in self.cancelled}
        assert {n: t for n, t in self.engine.finished.items() if n in expected} == expected


def test_no_page_is_lost_and_every_answer_is_right_in_random_operations():
    run_state_machine_as_test(
        Serving, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_no_page_is_lost_and_every_answer_is_right_in_many_random_operations():
    run_state_machine_as_test(
        Serving, settings=settings(max_examples=600, stateful_step_count=100, deadline=None)
    )


# Draft tokens, and operations.
WALKS = [(0, 10_000), (2, 2_000), pytest.param(2, 50_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("draft_tokens", "num_operations"), WALKS)
def test_a_long_life_of_one_engine_loses_no_page(draft_tokens, num_operations):
    walk = random.Random(draft_tokens)
    cfg = ServeConfig(
        page_size=4, max_rows=4, token_budget=16, prefill_rows=3, draft_tokens=draft_tokens
    )
    scheduler = Scheduler(cfg, num_pages=20, max_length=60)
    engine = Engine(scheduler, luck=walk, every=8)
    asked, cancelled = {}, set()
    for number in range(num_operations):
        chance = walk.random()
        if chance < 0.3:
            if len(scheduler.waiting) < 8:
                asked[str(number)] = random_request(walk, name=str(number))
                scheduler.add(asked[str(number)])
        elif chance < 0.35:
            names = [s.request.id for s in (*scheduler.waiting, *scheduler.running)]
            walk.shuffle(names)
            for name in names[: walk.randint(0, 1)]:
                scheduler.cancel(name)
                cancelled.add(name)
        elif chance < 0.4:
            engine.read()
        else:
            engine.step(behind=0 if draft_tokens else walk.randint(0, 2))
    engine.run_to_the_end(behind=0)
    counts = scheduler.snapshot()
    assert counts.pages_in_use == 0
    # The walk was one through every door.
    assert counts.num_preempted > num_operations / 200
    assert counts.num_reclaimed > num_operations / 20
    assert counts.reused_tokens > num_operations / 10
    assert len(cancelled) > num_operations / 80
    expected = {n: continuation(r) for n, r in asked.items() if n not in cancelled}
    assert {n: t for n, t in engine.finished.items() if n in expected} == expected


def random_request(walk: random.Random, *, name: str) -> Request:
    end = tuple(walk.randrange(1, VOCAB) for _ in range(walk.randint(1, 6)))
    return Request(
        id=name,
        prompt=walk.choice(BEGINNINGS) + end,
        max_tokens=walk.randint(1, 40),
        priority=walk.choice([0, 0, 0, 1]),
        ignore_eos=walk.random() < 0.7,
        prompt_logprobs=walk.random() < 0.1,
    )
