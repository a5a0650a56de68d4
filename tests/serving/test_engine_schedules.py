"""Whatever is asked for, cancelled and preempted: each request gets the ids it gets alone."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.data import ByteTokenizer
from jaxfound.serving import Sampling
from jaxfound.serving.request import Request
from jaxfound.serving.stopping import first_stop
from tests.serving.fake_runner import fake_engine, logprobs_of, one_by_one, run

MAX_LENGTH = 24
# Beginnings that prompts share, longer than pages.
BEGINNINGS = [(), (97,) * 7, (97, 98, 99, 97, 98, 99, 97, 98, 99)]


@st.composite
def sizes(draw):
    """Sizes of an engine in which the longest request just fits, or more."""
    page_size = draw(st.integers(1, 5))
    max_rows, drafts = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    least = max_rows * (1 + drafts)
    return {
        "page_size": page_size,
        "num_pages": -(-MAX_LENGTH // page_size) + draw(st.integers(0, 6)),
        "max_rows": max_rows,
        "draft_tokens": drafts,
        "token_budget": least + draw(st.integers(0, 12)),
        "prefill_rows": draw(st.integers(1, 3)),
        "prefix_cache": draw(st.booleans()),
        "max_length": MAX_LENGTH,
    }


@st.composite
def asked(draw):
    """The fields of a request that fits."""
    more = draw(st.lists(st.sampled_from(b"abc"), min_size=1, max_size=6))
    prompt = (*draw(st.sampled_from(BEGINNINGS)), *more)
    return {
        "prompt": prompt,
        "max_tokens": draw(st.integers(1, MAX_LENGTH - len(prompt))),
        "seed": draw(st.integers(0, 2)),
        "stop": tuple(draw(st.lists(st.sampled_from(["ab", "é", "cab"]), max_size=2))),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.booleans()),
        "priority": draw(st.integers(0, 1)),
    }


# An add twice: most of a schedule is work.
OPERATIONS = st.lists(st.one_of(asked(), st.just("step"), asked(), st.integers(0, 20)), max_size=30)


def request(id, *, seed, **fields):
    return Request(id, sampling=Sampling(seed=seed), **fields)


def expected(wanted):
    """Ids, text and reason of a request that is alone: the rules read plainly."""
    tokens, reason = one_by_one(wanted)
    decode = ByteTokenizer().decode
    for num in range(1, len(tokens) + 1):
        # A character that is not complete yet is no text; at the very end it is a mark.
        text = decode(tokens[:num]).rstrip("\ufffd")
        end = first_stop(text, wanted.stop)
        if end is not None:
            return tokens[:num], text[:end], "stop"
    return tokens, decode(tokens), reason


def follow(engine, operations):
    """Do operations in order, then step to the end; requests and outputs by id, ids cancelled."""
    numbers = count()
    known, outputs, cancelled = {}, {}, set()

    def step():
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)

    for operation in operations:
        if isinstance(operation, dict):
            id = f"r{next(numbers)}"
            known[id] = request(id, **operation)
            engine.add(known[id])
        elif operation == "step":
            step()
        elif engine.cancel(f"r{operation}"):
            cancelled.add(f"r{operation}")
    while engine.has_work:
        step()
    return known, outputs, cancelled


@settings(max_examples=60, deadline=None)
@given(sizes(), OPERATIONS)
def test_any_schedule_gives_each_request_what_it_gets_alone_and_all_pages_back(sizes, operations):
    check(sizes, operations)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(sizes(), OPERATIONS)
def test_thousands_of_schedules_do(sizes, operations):
    check(sizes, operations)


def check(sizes, operations):
    engine, scheduler, _ = fake_engine(**sizes)
    known, outputs, cancelled = follow(engine, operations)
    assert set(outputs) == set(known)
    for id, wanted in known.items():
        tokens = tuple(token for output in outputs[id] for token in output.tokens)
        text = "".join(output.text for output in outputs[id])
        *earlier, last = outputs[id]
        assert all(output.finish_reason is None for output in earlier)
        assert last.num_completion_tokens == len(tokens)
        assert last.num_prompt_tokens == len(wanted.prompt)
        alone, whole, reason = expected(wanted)
        if id in cancelled:
            assert last.finish_reason == "cancelled"
            assert tuple(alone[: len(tokens)]) == tokens
            assert text == ByteTokenizer().decode(tokens)
        else:
            assert (list(tokens), text, last.finish_reason) == (alone, whole, reason)
        check_logprobs(wanted, tokens, outputs[id])
    snapshot = scheduler.snapshot()
    assert snapshot.pages_in_use == 0
    assert snapshot.pages_free + snapshot.pages_cached == snapshot.num_pages
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
    # All of it can be had by one.
    longest = Request("whole", (98,), MAX_LENGTH - 1, ignore_eos=True)
    tokens = [t for output in run(engine, [longest])["whole"] for t in output.tokens]
    assert tokens == one_by_one(longest)[0]


def check_logprobs(wanted, tokens, outputs):
    """Those of each id, in order, and of the prompt, once, with the first ids."""
    told = [one for output in outputs for one in output.logprobs]
    every = (*wanted.prompt, *tokens)
    num = len(wanted.prompt)
    if wanted.logprobs is None:
        assert told == []
    else:
        assert [(one.token, one.logprob) for one in told] == [
            (token, logprobs_of(every[:place], token).logprob)
            for place, token in enumerate(tokens, num)
        ]
        assert {len(one.top) for one in told} <= {wanted.logprobs}
    of_prompt = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    if not wanted.prompt_logprobs or not outputs[0].tokens:
        assert of_prompt == [] or wanted.prompt_logprobs
        return
    assert [one and (one.token, one.logprob) for one in of_prompt[0]] == [None] + [
        (every[place], logprobs_of(every[:place], every[place]).logprob) for place in range(1, num)
    ]
    assert len(of_prompt) == 1
