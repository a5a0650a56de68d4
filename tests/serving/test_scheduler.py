"""Who runs, who waits, who gives way; what a step computes. Pages of 4 tokens unless said."""

import pytest

from jaxfound.config.serve import ServeConfig
from jaxfound.serving.request import Request, ScheduledBatch
from jaxfound.serving.scheduler import Scheduler
from tests.serving.paged_device import Engine, continuation, serve


def scheduler(*, num_pages: int = 32, max_length: int = 128, **keys) -> Scheduler:
    sizes = {"page_size": 4, "max_rows": 4, "token_budget": 16, "prefill_rows": 2}
    return Scheduler(ServeConfig(**(sizes | keys)), num_pages=num_pages, max_length=max_length)


def request(name: str, length: int, max_tokens: int = 4, **kinds) -> Request:
    """A prompt of its own: no other begins like it."""
    first = 1 + sum(map(ord, name))
    return Request(name, tuple(range(first, first + length)), max_tokens, ignore_eos=True, **kinds)


def parts(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    """Who, from which token on, how many."""
    return [(r.sequence.request.id, r.start, r.count) for r in (*batch.decode, *batch.prefill)]


def test_a_prompt_is_computed_in_chunks_and_draws_with_the_last():
    engine = Engine(scheduler())
    sequence = engine.scheduler.add(request("a", 40))
    for _ in range(3):
        engine.step()
    rows = [batch.prefill[0] for batch in engine.batches]
    assert [(r.start, r.count, r.draws, r.fresh) for r in rows] == [
        (0, 16, False, True),
        (16, 16, False, False),
        (32, 8, True, False),
    ]
    assert sum((r.tokens for r in rows), ()) == sequence.request.prompt


def test_rows_that_decode_come_before_prompts_and_share_the_budget():
    s = scheduler()
    s.add(request("a", 3))
    s.schedule()
    s.add(request("b", 40))
    assert parts(s.schedule()) == [("a", 3, 1), ("b", 0, 15)]


def test_a_chunk_ends_with_a_page_where_another_prompt_can_use_the_rest():
    s = scheduler(token_budget=18)
    s.add(request("a", 40))
    s.add(request("b", 40))
    assert parts(s.schedule()) == [("a", 0, 16), ("b", 0, 2)]


def test_short_prompts_that_keep_coming_do_not_hold_up_a_long_one():
    engine = Engine(scheduler(token_budget=8, prefill_rows=2))
    engine.scheduler.add(request("long", 48))
    for number in range(7):
        engine.scheduler.add(request(f"short{number}", 2, max_tokens=1))
        engine.step()
    # Rows that decode take at most 3 of 8 tokens, so at least 5 a step are the long prompt's; the
    # short ones that came first in order did not take them.
    first = next(i for i, b in enumerate(engine.batches) for r in b.prefill if r.draws)
    long = [r.count for b in engine.batches for r in b.prefill if r.sequence.request.id == "long"]
    assert sum(long) == 48
    assert len(long) == 6
    assert first == 5


def test_a_smaller_priority_runs_first_and_equal_ones_by_arrival():
    s = scheduler(max_rows=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        s.add(request(name, 3, priority=priority))
    assert [w.request.id for w in s.waiting] == ["b", "c", "a"]
    assert parts(s.schedule()) == [("b", 0, 3)]


def test_nobody_passes_one_that_waits_for_room():
    s = scheduler(num_pages=8)
    s.add(request("a", 12, max_tokens=8))
    s.schedule()
    s.add(request("big", 20))
    s.add(request("small", 2))
    batch = s.schedule()
    assert parts(batch) == [("a", 12, 1)]
    assert not batch.preempted


def test_the_latest_arrival_of_the_last_priority_gives_way_and_goes_to_the_front_of_its_class():
    engine = Engine(scheduler(num_pages=9, max_length=36, max_rows=3))
    for name, priority in (("a", 0), ("b", 1), ("c", 1)):
        engine.scheduler.add(request(name, 4, max_tokens=16, priority=priority))
    engine.scheduler.add(request("d", 4, priority=1))
    while not engine.batches or not engine.batches[-1].preempted:
        engine.step()
    assert [s.request.id for s in engine.batches[-1].preempted] == ["c"]
    assert [s.request.id for s in engine.scheduler.waiting] == ["c", "d"]
    engine.run_to_the_end()
    assert len(engine.finished) == 4


def test_a_request_that_waits_takes_no_pages_from_one_that_runs():
    engine = Engine(scheduler(num_pages=4, max_length=16))
    engine.scheduler.add(request("late", 4, max_tokens=12, priority=1))
    engine.step()
    engine.scheduler.add(request("urgent", 8))
    engine.run_to_the_end()
    assert all(not batch.preempted for batch in engine.batches)
    assert list(engine.finished) == ["late", "urgent"]


def test_one_that_lost_its_pages_begins_again_when_its_tokens_are_read():
    engine = Engine(scheduler(num_pages=5, max_length=20, prefix_cache=False))
    early = engine.scheduler.add(request("early", 4, max_tokens=16))
    late = engine.scheduler.add(request("late", 4, max_tokens=8))
    while not late.num_preempted:
        batch = engine.scheduler.schedule()
        engine.unread.append(engine.device.run(batch))
        if not late.num_preempted:
            engine.read(keep=1)
    assert late.num_unread == 1
    known = late.num_tokens
    engine.scheduler.finish(early)
    # There is room now, and it has to wait all the same.
    assert not engine.scheduler.schedule().num_tokens
    engine.read()
    row = engine.scheduler.schedule().prefill[0]
    assert (row.sequence, row.start, row.count, row.fresh) == (late, 0, known, True)
    assert row.tokens == tuple(late.tokens)
    assert len(row.tokens) == known


def test_preempting_repeats_no_token_and_changes_none():
    requests = [request(name, 4, max_tokens=20) for name in "abc"]
    engine, got = serve(scheduler(num_pages=9, max_length=36), requests)
    assert sum(len(batch.preempted) for batch in engine.batches) >= 2
    assert got == {r.id: continuation(r) for r in requests}


def test_one_that_lacks_a_page_waits_for_those_that_are_about_to_come_back():
    # Both hold 2 of 4 pages; when the second needs a third, the first has drawn its last token.
    requests = [request("a", 4, max_tokens=5), request("b", 4, max_tokens=9)]
    engine, got = serve(scheduler(num_pages=4, max_length=13), requests)
    assert got == {r.id: continuation(r) for r in requests}
    assert not any(batch.preempted for batch in engine.batches)
    assert [b.num_tokens for b in engine.batches[:6]] == [8, 2, 2, 2, 2, 0]


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_lone_request_that_fills_the_pool_completes(behind):
    # 24 + 9 tokens, of which the last is never cached: 8 pages.
    lone = request("a", 24, max_tokens=9)
    engine, got = serve(scheduler(num_pages=8, max_length=33), [lone], behind=behind)
    assert got["a"] == continuation(lone)
    assert not any(batch.preempted for batch in engine.batches)


MOMENTS = ["waiting", "in prefill", "decoding", "with a step under way", "without its pages"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_can_be_cancelled_at_any_moment(moment):
    engine = Engine(scheduler(num_pages=9, max_length=36, max_rows=3))
    s = engine.scheduler
    others = [request("a", 4, max_tokens=16), request("b", 4, max_tokens=16)]
    for other in others:
        s.add(other)
    victim = s.add(request("victim", 20 if moment == "in prefill" else 4, max_tokens=16))
    reached = {
        "waiting": lambda: True,
        "in prefill": lambda: 0 < victim.num_cached < 20,
        "decoding": lambda: victim.decoding and not victim.num_unread,
        "with a step under way": lambda: victim.decoding and victim.num_unread,
        "without its pages": lambda: victim.num_preempted and victim.row is None,
    }[moment]
    while not reached():
        engine.step(behind=0 if moment == "decoding" else 1)
    assert s.cancel("victim") is victim
    assert s.cancel("victim") is None
    assert victim not in (*s.waiting, *s.running)
    assert (victim.row, victim.pages) == (None, [])
    engine.run_to_the_end()
    assert engine.finished == {r.id: continuation(r) for r in others}
    assert s.snapshot().pages_in_use == 0


def test_a_token_that_comes_after_the_end_is_dropped():
    s = scheduler()
    ended = s.add(request("a", 4))
    s.schedule()
    s.schedule()
    assert s.commit(ended, [5])
    s.finish(ended)
    again = s.add(request("a", 8))
    assert not s.commit(ended, [6])
    s.finish(ended)
    assert ended.tokens[-1] == 5
    assert s.waiting == [again]


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_tokens_that_no_step_was_asked_for_are_refused(tokens):
    s = scheduler()
    sequence = s.add(request("a", 4))
    s.schedule()
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens for request 'a', .* asked for 1"):
        s.commit(sequence, tokens)


def test_prompts_that_begin_alike_and_come_at_once_compute_the_beginning_once():
    shared = tuple(range(100, 112))
    requests = [Request(f"r{i}", (*shared, i, i), 2, ignore_eos=True) for i in range(4)]
    engine, got = serve(scheduler(token_budget=32, prefill_rows=4), requests)
    assert got == {r.id: continuation(r) for r in requests}
    # 12 tokens once, two more of each prompt, and of two tokens of each the first.
    assert engine.device.num_computed == 12 + 4 * 2 + 4
    assert engine.scheduler.snapshot().reused_tokens == 3 * 12
    assert engine.scheduler.snapshot().hit_rate == 36 / 56


def test_nobody_waits_for_pages_that_are_not_going_to_be_shared():
    shared = tuple(range(100, 108))
    engine = Engine(scheduler(token_budget=32))
    engine.scheduler.add(Request("first", (*shared, 1), 20, ignore_eos=True))
    engine.step()
    # Its logits are asked for: it computes again what is there, and keeps that to itself.
    alone = Request("alone", (*shared, 2, 2, 2, 2, 3), 20, ignore_eos=True, prompt_logprobs=True)
    engine.scheduler.add(alone)
    engine.step()
    engine.scheduler.add(Request("like it", (*shared, 2, 2, 2, 2, 4), 20, ignore_eos=True))
    assert ("like it", 8, 5) in parts(engine.step())
    engine.run_to_the_end()


@pytest.mark.parametrize(("length", "num_reused"), [(11, 8), (12, 8), (13, 12)])
def test_a_prompt_that_is_wholly_cached_computes_what_it_needs_to_draw(length, num_reused):
    s = scheduler()
    engine, _ = serve(s, [request("a", 16)])
    same = Request("b", request("a", length).prompt, 4, ignore_eos=True)
    sequence = s.add(same)
    engine.run_to_the_end()
    assert sequence.num_reused == num_reused
    assert engine.finished["b"] == continuation(same)


def test_a_prompt_whose_logits_are_asked_for_is_computed_from_its_first_token():
    s = scheduler()
    engine, _ = serve(s, [request("a", 12)])
    sequence = s.add(request("a", 12, prompt_logprobs=True))
    engine.step()
    assert parts(engine.batches[-1]) == [("a", 0, 12)]
    assert sequence.num_reused == 0


def test_a_step_with_drafts_yields_what_was_accepted():
    s = scheduler(draft_tokens=2)
    sequence = s.add(request("a", 4, max_tokens=6))
    s.schedule()
    s.commit(sequence, [1])
    (row,) = s.schedule().decode
    assert (row.start, row.count) == (4, 3)
    # Until it is read, nobody knows where the next one begins.
    assert not s.schedule().num_tokens
    s.commit(sequence, [2, 3])
    assert (sequence.num_drawn, sequence.num_cached, sequence.num_unread) == (3, 6, 0)
    (row,) = s.schedule().decode
    assert (row.start, row.count) == (6, 3)
    s.commit(sequence, [4])
    # Two are left to draw: a draft more could be accepted and would be one too many.
    (row,) = s.schedule().decode
    assert (row.start, row.count) == (7, 2)
    counts = s.snapshot()
    assert (counts.drafted_tokens, counts.accepted_tokens) == (4, 1)


def test_the_same_calls_give_the_same_steps():
    def steps() -> list:
        requests = [request(name, 5 + i, max_tokens=12) for i, name in enumerate("abcdef")]
        engine, _ = serve(scheduler(num_pages=9, max_length=36), requests)
        return [
            [
                (r.sequence.request.id, r.row, r.start, r.count, r.pages)
                for r in b.prefill + b.decode
            ]
            for b in engine.batches
        ]

    assert steps() == steps()


def test_after_a_failed_step_nothing_is_there_and_nothing_is_reused():
    s = scheduler(max_rows=1)
    serve(s, [request("a", 12)])
    running, waiting = s.add(request("b", 12)), s.add(request("c", 4))
    s.schedule()
    assert s.clear() == (running, waiting)
    assert not s.has_work
    assert s.pool.num_free == s.pool.num_pages
    _, got = serve(s, [request("a", 12)])
    assert got["a"] == continuation(request("a", 12))


def test_figures_count_pages_tokens_and_requests():
    s = scheduler(num_pages=10)
    s.add(request("a", 6, max_tokens=1))
    first = next(iter(s.schedule().prefill)).sequence
    s.commit(first, [1])
    s.finish(first)
    s.add(request("b", 5, max_tokens=8))
    s.add(request("c", 30, max_tokens=8))
    s.add(request("d", 4))
    s.schedule()
    now = s.snapshot()
    # Of a stays 1 full page; b holds 2 and will need a third. c needs the 8 that are left, one of
    # them b's to come: it waits, and so does d behind it.
    assert (now.pages_cached, now.pages_in_use, now.pages_free) == (1, 2, 7)
    assert (now.num_waiting, now.num_prefilling, now.num_decoding) == (2, 0, 1)
    assert now.tokens_cached == 4 + 5
    assert now.utilisation == 9 / 12
    assert now.fragmentation == 3 / 40
    assert (now.prompt_tokens, now.reused_tokens, now.num_preempted) == (11, 0, 0)
