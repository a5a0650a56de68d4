"""Steps of the runner give what a request alone gives, compile nothing and keep their memory."""

import gc
import re
from itertools import pairwise

import jax
import numpy as np
import pytest

from jaxfound.config.schema import ConfigError
from jaxfound.data import ByteTokenizer
from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.serving.drafts import check_drafts, with_modules
from jaxfound.serving.generate import Generator
from jaxfound.serving.request import ScheduledBatch
from jaxfound.serving.runner import Runner
from jaxfound.serving.sampler import Sampling
from jaxfound.serving.step import StepRunner
from tests.models.tiny import forward, model_config, tokens_of, weights_of
from tests.serving.by_hand import GREEDY, SERVE, ByHand, decode, prefill, tokens_by_row

NUM_IDS = 59
# float32 sums in another order: a few units in the last place of logits of size 1 to 10.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


class IdsOnly(ByteTokenizer):
    """As many ids as the model has, none of which ends a text."""

    vocab_size = NUM_IDS
    eos_id = -1


@pytest.fixture(scope="module", params=["mla_moe_yarn", "gqa"])
def frame(request):
    return Frame(model_config(request.param))


@pytest.fixture(scope="module")
def arrays(frame):
    return weights_of(frame)


@pytest.fixture(scope="module")
def compiled(frame, arrays):
    return Runner(frame, arrays, SERVE, num_ids=NUM_IDS)


@pytest.fixture
def runner(compiled):
    compiled.reset()
    return compiled


@pytest.fixture(scope="module")
def alone(frame, arrays):
    """The continuation of a prompt by the slots of one row."""
    generator = Generator(frame, arrays, IdsOnly(), step=0)

    def continuation(prompt, count):
        ids = [int(t) for t in prompt]
        return list(generator.tokens(ids, max_tokens=count, sampling=GREEDY))

    return continuation


def scores(frame, arrays, tokens):
    """Log-probabilities of all ids behind each token, by the whole-row forward pass."""
    logits = forward(frame.bind(*arrays), np.asarray([tokens], np.int32))[0, :, :NUM_IDS]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def test_it_is_what_the_engine_asks_for(runner):
    assert isinstance(runner, StepRunner)


def test_rows_side_by_side_draw_what_each_draws_alone(runner, alone):
    """Chunks of a prompt beside decoding rows; pages anywhere; the host a step behind."""
    a = ByHand(tokens_of(27, seed=1), row=2, pages=range(20, 32))
    b = ByHand(tokens_of(5, seed=2), row=0, pages=range(11, -1, -1))
    c = ByHand(tokens_of(4, seed=3), row=3, pages=(39, 12, 37, 14))
    steps = [
        prefill(a.chunk(7), b.chunk(5)),
        ScheduledBatch((a.chunk(17), c.chunk(4)), (b.token(),)),
    ]
    steps += [ScheduledBatch((a.chunk(3),), (b.token(), c.token()))]
    steps += [decode(c, a, b) for _ in range(5)]
    pending = [runner.dispatch(step) for step in steps]
    drawn = tokens_by_row(steps, [each.read() for each in pending])
    for request in (a, b, c):
        prompt = request.sequence.request.prompt
        assert drawn[request.row] == alone(prompt, len(drawn[request.row]))


def test_what_pages_held_before_changes_nothing(runner, alone):
    runner.dispatch(prefill(ByHand(tokens_of(40, seed=4), row=0, pages=range(12)).chunk(40)))
    spoil(runner)
    a = ByHand(tokens_of(6, seed=5), row=1, pages=range(3, 15))
    steps = [prefill(a.chunk(6)), *(decode(a) for _ in range(6))]
    drawn = tokens_by_row(steps, [runner.dispatch(step).read() for step in steps])
    assert drawn[1] == alone(a.sequence.request.prompt, 7)


def test_a_preempted_row_goes_on_from_the_tokens_that_were_read(runner, alone):
    a = ByHand(tokens_of(6, seed=6), row=1, pages=range(3, 15))
    steps = [prefill(a.chunk(6)), decode(a), decode(a)]
    drawn = tokens_by_row(steps, [runner.dispatch(step).read() for step in steps])[1]
    again = ByHand(a.sequence.request.prompt, row=3, pages=range(20, 32))
    again.sequence.tokens += drawn
    steps = [prefill(again.chunk(9)), decode(again)]
    drawn += tokens_by_row(steps, [runner.dispatch(step).read() for step in steps])[3]
    assert drawn == alone(a.sequence.request.prompt, 5)


def test_rows_that_are_none_write_nowhere(runner):
    """A program of more rows than were scheduled, and a chunk shorter than its program's."""
    spoil(runner)
    a = ByHand(tokens_of(3, seed=7), row=1, pages=(5, 6))
    for step in (prefill(a.chunk(3)), decode(a), decode(a)):
        runner.dispatch(step).read()
    for pool in runner._pages:
        by_layer = np.asarray(pool).reshape(-1, SERVE.num_pages, SERVE.page_size, *pool.shape[2:])
        written = np.isfinite(by_layer.reshape(*by_layer.shape[:3], -1)).any(axis=-1)
        expected = np.zeros(written.shape, bool)
        expected[:, 5, :4] = expected[:, 6, :1] = True
        np.testing.assert_array_equal(written, expected)


def test_a_row_whose_logits_are_not_finite_says_so_and_spares_the_others(runner, alone):
    a = ByHand(tokens_of(6, seed=8), row=1, pages=range(12))
    first = runner.dispatch(prefill(a.chunk(6))).read()[0].tokens
    spoil(runner, but=range(12))
    b = ByHand(tokens_of(6, seed=9), row=2, pages=range(20, 32))
    b.cached = 6
    good, bad = runner.dispatch(decode(a, b)).read()
    assert bad.tokens == ()
    assert "not finite" in bad.error
    assert first + good.tokens == tuple(alone(a.sequence.request.prompt, 2))


def test_log_probabilities_are_those_of_the_forward_pass(runner, frame, arrays):
    prompt = tokens_of(20, seed=10, vocab=NUM_IDS)
    a = ByHand(prompt, row=0, pages=range(12), logprobs=3, prompt_logprobs=True)
    b = ByHand(prompt, row=1, pages=range(12, 24), sampling=Sampling(temperature=1.0, top_k=5))
    steps = [prefill(a.chunk(13), b.chunk(13)), prefill(b.chunk(7), a.chunk(7)), decode(a, b)]
    results = [runner.dispatch(step).read() for step in steps]
    by_a = [results[0][0], results[1][1], results[2][0]]
    tokens = [*prompt, *by_a[1].tokens, *by_a[2].tokens]
    expected = scores(frame, arrays, tokens[:-1])
    found = [*by_a[0].prompt_logprobs, *by_a[1].prompt_logprobs]
    found += [*by_a[1].logprobs, *by_a[2].logprobs]
    assert [each.token for each in found] == [int(t) for t in tokens[1:]]
    for each, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(each.logprob, row[each.token], **CLOSE)
        best = np.argsort(-row)[:3]
        assert [token for token, _ in each.top] == list(best)
        np.testing.assert_allclose([p for _, p in each.top], row[best], **CLOSE)
    assert not any(r.logprobs or r.prompt_logprobs for r in (results[0][1], results[2][1]))


def test_a_draw_is_the_requests_own_whatever_runs_beside_it(runner):
    sampling = Sampling(temperature=1.0, seed=7, frequency_penalty=0.5, top_p=0.95)
    prompt = tokens_of(5, seed=11)

    def drawn(*others, row):
        a = ByHand(prompt, row=row, pages=range(12), sampling=sampling)
        steps = [prefill(a.chunk(5), *(o.chunk(3) for o in others))]
        steps += [decode(*others, a) for _ in range(6)]
        return tokens_by_row(steps, [runner.dispatch(s).read() for s in steps])[row]

    beside = ByHand(tokens_of(3), row=0, pages=range(12, 24), sampling=Sampling())
    assert drawn(row=1) == drawn(beside, row=3)


def test_traffic_compiles_nothing_and_keeps_no_memory(runner):
    """Whatever the sizes, levels and features of the steps."""
    compilations = []

    def heard(event, duration, **_):
        if "compile" in event:
            compilations.append(event)

    def traffic():
        kinds = [GREEDY, Sampling(), Sampling(presence_penalty=1.0), Sampling(top_p=0.9)]
        for number, sampling in enumerate(kinds):
            asked = {"sampling": sampling, "prompt_logprobs": number % 2 == 0}
            a = ByHand(tokens_of(40, seed=1), row=0, pages=range(12), logprobs=2, **asked)
            b = ByHand(tokens_of(3, seed=2), row=3, pages=range(12, 24), **asked)
            steps = [prefill(a.chunk(30), b.chunk(3)), ScheduledBatch((a.chunk(10),), (b.token(),))]
            for step in (*steps, decode(b), decode(a, b)):
                runner.dispatch(step).read()

    def held():
        gc.collect()
        return runner.bytes_in_use

    traffic()
    after = [held()]
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for _ in range(3):
            traffic()
            after.append(held())
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert compilations == []
    # What a step kept would add up at each turn; what other tests left behind may go or come once.
    assert sum(later == before for before, later in pairwise(after)) >= 2, after


def test_the_pool_is_written_in_place(runner):
    """Its bytes are the caller's, and no operation of the program copies an array of its shape."""
    pool = sum(a.nbytes for a in runner._pages)
    places = "|".join(",".join(map(str, a.shape)) for a in runner._pages)
    copied = re.compile(rf"\[({places})\]\S* copy(-start)?\(")
    for program in (*runner.programs.decode.values(), *runner.programs.prefill.values()):
        text = program.as_text()
        assert re.search(rf"\[({places})\]", text)
        assert program.memory_analysis().alias_size_in_bytes == pool
        assert [line for line in text.splitlines() if copied.search(line)] == []


def test_a_cache_that_cannot_be_packed_is_refused_by_name(frame, arrays):
    packed = SERVE.model_copy(update={"cache_format": "fp8"})
    with pytest.raises(ConfigError, match=r"kv_lora_rank=512.*serve\.cache_format=compute"):
        Runner(frame, arrays, packed, num_ids=NUM_IDS)


@pytest.mark.parametrize("num", [0, 1])
def test_modules_that_do_not_draft_are_left_out(num):
    """A rule of precision may name what is left out."""
    frame = Frame(model_config("mla_moe_mtp"))
    kept, arrays = with_modules(frame, weights_of(frame), num=num)
    assert set(arrays.params) == {s.path for s in describe(kept.cfg) if s.kind == "param"}
    assert kept.cfg.mtp_depth == num


def test_more_drafts_than_modules_are_refused():
    asked = SERVE.model_copy(update={"draft_tokens": 3})
    with pytest.raises(ConfigError, match=r"draft_tokens=3.*Use serve\.draft_tokens=2"):
        check_drafts(asked, model_config("mla_moe_mtp"))


def spoil(runner, *, but=()):
    """Fill every page with NaN, some apart."""
    kept = np.isin(np.arange(runner.num_pages), list(but))

    def spoiled(pool):
        by_layer = np.array(pool).reshape(-1, runner.num_pages, *pool.shape[1:])
        by_layer[:, ~kept] = np.nan
        return jax.device_put(by_layer.reshape(pool.shape), pool.sharding)

    runner._pages = jax.tree.map(spoiled, runner._pages)
