"""The engine over a model: every request gets the ids that it gets one by one."""

import pytest

from tests.serving.tiny_engine import (
    WIDE,
    drive,
    mixed_requests,
    one_by_one,
    tiny_engine,
    tiny_generator,
    tiny_runner,
)

# Pages for little more than the longest request: those that run preempt each other.
TIGHT = 11
CASES = {
    "one at a time": {"concurrency": 1},
    "eight, chunks": {"concurrency": 8, "token_budget": 24, "prefill_rows": 2},
    "thirty-two, no prefix cache": {"concurrency": 32, "prefix_cache": False},
    "thirty-two, few pages, cancels": {"concurrency": 32, "num_pages": TIGHT, "cancels": 0.2},
}


@pytest.fixture(scope="module")
def generator():
    return tiny_generator()


@pytest.fixture(scope="module")
def runner(generator):
    return tiny_runner(generator)


@pytest.fixture(scope="module")
def requests():
    return mixed_requests(40)


@pytest.fixture(scope="module")
def alone(generator, requests):
    return one_by_one(generator, requests)


def check(there, requests, alone, *, concurrency, cancels=0.0, **sizes):
    engine, scheduler = tiny_engine(there, **sizes)
    outputs, cancelled = drive(engine, requests, concurrency=concurrency, cancels=cancels)
    for request in requests:
        found = [token for output in outputs[request.id] for token in output.tokens]
        expected = alone[request.id]
        if request.id in cancelled:
            assert found == expected[: len(found)]
        else:
            assert found == expected, request
            ends = "length" if len(expected) == request.max_tokens else "stop"
            assert outputs[request.id][-1].finish_reason == ends
    snapshot = scheduler.snapshot()
    assert snapshot.pages_in_use == 0
    assert snapshot.pages_free + snapshot.pages_cached == snapshot.num_pages
    return snapshot, cancelled


@pytest.mark.parametrize("name", CASES)
def test_mixed_requests_get_the_ids_that_they_get_one_by_one(name, runner, requests, alone):
    snapshot, cancelled = check(runner, requests, alone, **CASES[name])
    assert (snapshot.num_preempted > 0) == ("few pages" in name)
    assert (snapshot.reused_tokens > 0) == ("no prefix cache" not in name)
    assert bool(cancelled) == ("cancels" in name)


@pytest.fixture(scope="module")
def wide(generator):
    return tiny_runner(generator, WIDE)


@pytest.fixture(scope="module")
def many():
    return mixed_requests(200, seed=1)


@pytest.fixture(scope="module")
def many_alone(generator, many):
    return one_by_one(generator, many)


@pytest.mark.slow
@pytest.mark.parametrize("cancels", [0.0, 0.2])
@pytest.mark.parametrize("token_budget", [40, WIDE.token_budget])
@pytest.mark.parametrize("num_pages", [TIGHT, WIDE.num_pages])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_two_hundred_requests_get_the_ids_that_they_get_one_by_one(
    concurrency, prefix_cache, num_pages, token_budget, cancels, wide, many, many_alone
):
    check(
        wide,
        many,
        many_alone,
        concurrency=concurrency,
        cancels=cancels,
        prefix_cache=prefix_cache,
        num_pages=num_pages,
        token_budget=token_budget,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mla", "mla_moe_mtp"])
def test_other_models_get_the_ids_that_they_get_one_by_one(name, requests):
    generator = tiny_generator(name)
    check(
        tiny_runner(generator),
        requests,
        one_by_one(generator, requests),
        concurrency=16,
        num_pages=TIGHT,
        cancels=0.1,
    )
