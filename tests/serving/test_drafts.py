"""Drafts are checked by drawing: they change how many steps are needed, and no token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.data import ByteTokenizer
from jaxfound.models.build import Frame
from jaxfound.serving.generate import Generator
from jaxfound.serving.programs import NONE
from jaxfound.serving.request import ScheduledBatch
from jaxfound.serving.runner import Runner, followers_of
from jaxfound.serving.sampler import Sampling
from tests.models.tiny import model_config, tokens_of, weights_of
from tests.serving.by_hand import GREEDY, SERVE, ByHand, prefill
from tests.serving.tiny_engine import (
    LARGEST,
    MAX_LENGTH,
    drive,
    mixed_requests,
    one_by_one,
    tiny_engine,
)

# So few that a guess of random weights is often right.
NUM_IDS = 6
NUM_DRAFTS = 2
CFG = SERVE.model_copy(
    update={"max_length": MAX_LENGTH, "num_pages": 64, "draft_tokens": NUM_DRAFTS}
)
HOW = [GREEDY, Sampling(temperature=0.9, seed=3, presence_penalty=0.7, top_p=0.95)]


class FewIds(ByteTokenizer):
    """None of them ends a text."""

    vocab_size, eos_id = NUM_IDS, -1

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def frame():
    return Frame(model_config("mla_moe_mtp"))


@pytest.fixture(scope="module")
def arrays(frame):
    return weights_of(frame)


@pytest.fixture(scope="module")
def compiled(frame, arrays):
    return Runner(frame, arrays, CFG, num_ids=NUM_IDS)


@pytest.fixture
def runner(compiled):
    compiled.reset()
    return compiled


@pytest.fixture(scope="module")
def generator(frame, arrays):
    return Generator(frame, arrays, FewIds(), step=0)


@pytest.fixture(scope="module")
def alone(generator):
    """The continuation of a prompt without drafts."""

    def continuation(request, count):
        prompt, sampling = request.prompt, request.sampling
        return list(generator.tokens(prompt, max_tokens=count, sampling=sampling))

    return continuation


@pytest.fixture(scope="module")
def guesses(frame, arrays):
    """What the modules make of whole rows, as in training."""

    @jax.jit
    def ahead(tokens_of_depth):
        model = frame.bind(*arrays)
        row = model.row(tokens_of_depth[0], None, None)
        state, found = model.hidden(tokens_of_depth[0], row).final, []
        for module, tokens in zip(model.mtp, tokens_of_depth[1:], strict=True):
            state, _ = module(state, model.embedding(tokens), row)
            found.append(jnp.argmax(model.logits(state)[..., :NUM_IDS], axis=-1))
        return jnp.concatenate(found)

    def of(tokens):
        """The modules' guesses behind `tokens`, the last of which was drawn and not cached."""
        known, found = list(tokens), []
        for depth in range(NUM_DRAFTS):
            rows = np.zeros((1 + NUM_DRAFTS, 1, MAX_LENGTH), np.int32)
            for i in range(1 + NUM_DRAFTS):
                rows[i, 0, : len(known[i:])] = known[i:]
            found.append(int(ahead(rows)[depth, len(tokens) - 2]))
            known.append(found[-1])
        return found

    return of


def begin(runner, *requests):
    step = prefill(*(request.chunk(len(request.sequence.tokens)) for request in requests))
    for request, result in zip(requests, runner.dispatch(step).read(), strict=True):
        request.read(result)


def wrong(token):
    return (token + 1) % NUM_IDS


def set_drafts(runner, row, drafts):
    held = runner._rows.drafts.at[row].set(jnp.asarray(drafts, jnp.int32))
    runner._rows = runner._rows._replace(drafts=held)


@pytest.mark.parametrize("how", HOW, ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_as_many_tokens_come_as_drafts_are_right(num_right, how, runner, alone):
    """Whatever they are; beside a row whose drafts are wrong, and after them the next step."""
    a = ByHand(tokens_of(9, seed=1), row=2, pages=range(12), sampling=how)
    b = ByHand(tokens_of(5, seed=2), row=0, pages=range(20, 32), sampling=how)
    expected, other = alone(a.sequence.request, 12), alone(b.sequence.request, 3)
    begin(runner, a, b)
    for step in range(2):
        drafts = expected[len(a.sequence.tokens) - 9 :][:NUM_DRAFTS]
        drafts[num_right:] = [wrong(token) for token in drafts[num_right:]]
        set_drafts(runner, 2, drafts)
        set_drafts(runner, 0, [wrong(other[1 + step]), 0])
        found = runner.dispatch(ScheduledBatch((), (b.token(3), a.token(3)))).read()
        assert [len(result.tokens) for result in found] == [1, 1 + num_right]
        b.read(found[0])
        a.read(found[1])
    assert a.sequence.tokens[9:] == expected[: len(a.sequence.tokens) - 9]
    assert b.sequence.tokens[5:] == other


def test_a_row_near_its_end_checks_fewer(runner, alone):
    """A program of three places, of which a row has one, or two."""
    a = ByHand(tokens_of(9, seed=1), row=1, pages=range(12))
    b = ByHand(tokens_of(6, seed=4), row=3, pages=range(20, 32))
    begin(runner, a, b)
    for counts in ((1, 2), (2, 1), (3, 2)):
        for request in (a, b):
            there, prompt = len(request.sequence.tokens), len(request.sequence.request.prompt)
            expected = alone(request.sequence.request, 12)
            set_drafts(runner, request.row, expected[there - prompt :][:NUM_DRAFTS])
        step = ScheduledBatch((), (a.token(counts[0]), b.token(counts[1])))
        for request, result, count in zip(
            (a, b), runner.dispatch(step).read(), counts, strict=True
        ):
            assert len(result.tokens) == count
            request.read(result)
    for request in (a, b):
        drawn = request.sequence.tokens[len(request.sequence.request.prompt) :]
        assert drawn == alone(request.sequence.request, len(drawn))


def test_the_drafts_are_what_the_modules_say_of_the_whole_row(runner, guesses):
    """Chunks of a prompt beside another's, and steps of which all or one token is right.

    The module of depth 2 has read a guess in the newest place, so that its cache is the whole
    row's only where guesses were right.
    """
    a = ByHand(tokens_of(19, seed=5), row=1, pages=range(12))
    b = ByHand(tokens_of(30, seed=6), row=2, pages=range(20, 32))
    steps = [prefill(a.chunk(7), b.chunk(11)), prefill(b.chunk(19), a.chunk(12))]
    results = [runner.dispatch(step).read() for step in steps]
    for request, result in zip((b, a), results[1], strict=True):
        request.read(result)
        found = list(np.asarray(runner._rows.drafts)[request.row])
        assert found == guesses(request.sequence.tokens)
    for _ in range(4):
        result = runner.dispatch(ScheduledBatch((), (a.token(3),))).read()[0]
        a.read(result)
        assert np.asarray(runner._rows.drafts)[1, 0] == guesses(a.sequence.tokens)[0]


def test_log_probabilities_come_with_every_token(runner):
    """The same as those of one token a step."""
    plain = ByHand(tokens_of(9, seed=7), row=0, pages=range(12), logprobs=2)
    first = runner.dispatch(prefill(plain.chunk(9))).read()[0]
    singly = [runner.dispatch(ScheduledBatch((), (plain.token(),))).read()[0] for _ in range(3)]
    a = ByHand(plain.sequence.request.prompt, row=1, pages=range(20, 32), logprobs=2)
    assert runner.dispatch(prefill(a.chunk(9))).read()[0].tokens == first.tokens
    set_drafts(runner, 1, [each.tokens[0] for each in singly[:2]])
    together = runner.dispatch(ScheduledBatch((), (a.token(3),))).read()[0]
    assert len(together.logprobs) == 3
    for found, each in zip(together.logprobs, singly, strict=True):
        expected = each.logprobs[0]
        assert found.token == expected.token
        np.testing.assert_allclose(found.logprob, expected.logprob, rtol=2e-5, atol=2e-5)
        assert [token for token, _ in found.top] == [token for token, _ in expected.top]


def test_what_follows_a_chunk_is_known_but_for_the_token_that_is_drawn():
    a = ByHand(range(5), row=0, pages=range(4))
    first, last = a.chunk(3), a.chunk(2)
    found = followers_of([first, last], shape=(2, 4))
    np.testing.assert_array_equal(found, [[1, 2, 3, NONE], [4, -1, NONE, NONE]])


def few_ids(requests):
    return [replace(each, prompt=tuple(i % NUM_IDS for i in each.prompt)) for each in requests]


@pytest.fixture(scope="module")
def requests():
    return few_ids(mixed_requests(40))


@pytest.fixture(scope="module")
def expected(generator, requests):
    return one_by_one(generator, requests)


CASES = {
    "one at a time": {"concurrency": 1},
    "eight, chunks": {"concurrency": 8, "token_budget": 24},
    "few pages, cancels": {"concurrency": 32, "num_pages": 20, "cancels": 0.2},
}


def check(runner, requests, expected, *, concurrency, cancels=0.0, **sizes):
    engine, scheduler = tiny_engine(runner, tokenizer=FewIds(), **sizes)
    outputs, cancelled = drive(engine, requests, concurrency=concurrency, cancels=cancels)
    for request in requests:
        found = [token for output in outputs[request.id] for token in output.tokens]
        if request.id in cancelled:
            assert found == expected[request.id][: len(found)]
        else:
            assert found == expected[request.id], request
    snapshot = scheduler.snapshot()
    assert snapshot.pages_in_use == 0
    return snapshot


@pytest.mark.parametrize("name", CASES)
def test_mixed_requests_get_the_ids_that_they_get_one_by_one(name, compiled, requests, expected):
    snapshot = check(compiled, requests, expected, **{"num_pages": CFG.num_pages, **CASES[name]})
    assert 0 < snapshot.accepted_tokens < snapshot.drafted_tokens


@pytest.fixture(scope="module", params=[1, 2])
def larger(request, generator):
    cfg = LARGEST.model_copy(update={"draft_tokens": request.param})
    return Runner(generator.frame, generator.arrays, cfg, num_ids=NUM_IDS)


@pytest.mark.slow
@pytest.mark.parametrize("cancels", [0.0, 0.2])
@pytest.mark.parametrize("num_pages", [11, LARGEST.num_pages])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_two_hundred_requests_get_the_ids_that_they_get_one_by_one(
    concurrency, prefix_cache, num_pages, cancels, larger, many, many_expected
):
    snapshot = check(
        larger,
        many,
        many_expected,
        concurrency=concurrency,
        prefix_cache=prefix_cache,
        num_pages=num_pages,
        cancels=cancels,
    )
    assert snapshot.accepted_tokens > 0


@pytest.fixture(scope="module")
def many():
    return few_ids(mixed_requests(200, seed=1))


@pytest.fixture(scope="module")
def many_expected(generator, many):
    return one_by_one(generator, many)
