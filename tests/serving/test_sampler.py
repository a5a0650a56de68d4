"""The sampler: each filter against its plain meaning, frequencies, and draws that stay apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import ConfigError
from jaxfound.serving.sampler import (
    LEVELS,
    MAX_TOP,
    History,
    Sampling,
    adjusted,
    counted,
    empty_history,
    empty_rows,
    history_of,
    inside,
    level_of,
    row_of,
    sample_rows,
)
from tests.serving import plain_sampler

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
VOCAB = 40
# Draws of a batch; one number, so that few programs are compiled.
NUM = 4000

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "warm": Sampling(temperature=1.0),
    "hot": Sampling(temperature=7.0),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "top-k then top-p": Sampling(temperature=2.0, top_k=9, top_p=0.6),
    "min-p": Sampling(temperature=1.5, min_p=0.2),
    "min-p of the best": Sampling(temperature=1.5, min_p=1.0),
    "all filters": Sampling(temperature=3.0, top_k=12, top_p=0.9, min_p=0.05),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "presence": Sampling(temperature=1.0, presence_penalty=1.5),
    "frequency": Sampling(temperature=1.0, frequency_penalty=-0.4),
    "bias": Sampling(temperature=1.0, logit_bias=((3, 4.0), (0, -100.0))),
    "greedy, penalised": Sampling(temperature=0.0, repetition_penalty=3.0, presence_penalty=2.0),
    "all": Sampling(
        temperature=1.2,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((7, 2.0),),
    ),
}


def stacked(samplings):
    return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *map(row_of, samplings))


def histories(pairs):
    rows = [history_of(prompt, drawn, vocab_size=VOCAB) for prompt, drawn in pairs]
    return jax.tree.map(lambda *each: jnp.asarray(np.stack(each)), *rows)


@pytest.fixture(scope="module")
def rows():
    """Logits, what each row's tokens were, and how each row draws: one row a kind of sampling."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (len(SAMPLINGS), VOCAB)).astype(np.float32)
    pairs = [rng.integers(0, VOCAB, (2, 12)).tolist() for _ in SAMPLINGS]
    return logits, pairs, list(SAMPLINGS.values())


_sample = jax.jit(sample_rows, static_argnames=("num_ids", "level", "num_top"))


def drawn(logits, samplings, index, *, history=None, level=None, num_ids=VOCAB):
    draws = _sample(
        jnp.asarray(logits),
        stacked(samplings),
        jnp.asarray(index, jnp.int32),
        history=history,
        num_ids=num_ids,
        level=level or level_of(samplings),
    )
    return np.asarray(draws.tokens)


def draw_many(sampling, *, logits=LOGITS, num_ids=None, history=None):
    """Draws 0 … NUM-1 of one request over the same logits, each a row of one batch."""
    each = lambda value: jnp.broadcast_to(jnp.asarray(value), (NUM, *np.shape(value)))
    rows = jax.tree.map(each, row_of(sampling))
    if history is None:
        history = empty_history(1, vocab_size=logits.shape[-1])
    draws = _sample(
        each(logits[0]),
        rows,
        jnp.arange(NUM),
        history=jax.tree.map(lambda part: each(part[0]), history),
        num_ids=num_ids or logits.shape[-1],
        level=level_of([sampling]),
    )
    return np.asarray(draws.tokens)


def test_biases_and_penalties_give_the_logits_of_their_plain_meaning(rows):
    logits, pairs, samplings = rows
    found = adjusted(jnp.asarray(logits), stacked(samplings), histories(pairs), num_ids=VOCAB)
    for row, (prompt, past), how, got in zip(logits, pairs, samplings, found, strict=True):
        expected = plain_sampler.adjusted(row, prompt, past, how)
        # float32 of the device against float64.
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6, atol=1e-5)


def test_filters_keep_the_tokens_of_their_plain_meaning(rows):
    logits, _, samplings = rows
    for row, how in zip(logits, samplings, strict=True):
        if how.temperature == 0:
            continue
        scaled = jnp.asarray(row)[None] / how.temperature
        kept = inside(scaled, top_k=jnp.array([how.top_k]), top_p=jnp.float32([how.top_p]))[0]
        assert set(np.flatnonzero(kept)) == plain_sampler.kept(row / how.temperature, how)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_frequencies_follow_the_plain_distribution(name, rows):
    logits, pairs, samplings = rows
    at = list(SAMPLINGS).index(name)
    expected = plain_sampler.probabilities(logits[at], *pairs[at], samplings[at])
    found = draw_many(
        samplings[at],
        logits=jnp.asarray(logits[at : at + 1]),
        history=histories(pairs[at : at + 1]),
    )
    counts = np.bincount(found, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Chi-square over the tokens that are expected at least 5 times, the rest as one more.
    often = expected * NUM >= 5
    seen = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often] * NUM, expected[~often].sum() * NUM)
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    # Mean `freedom`, variance twice that: five standard deviations.
    assert statistic <= freedom + 5 * np.sqrt(2 * max(freedom, 1))


def test_a_row_draws_the_same_alone_and_beside_others_at_every_level(rows):
    logits, pairs, samplings = rows
    history = histories(pairs)
    index = np.arange(len(samplings)) * 3
    together = drawn(logits, samplings, index, history=history)
    order = np.random.default_rng(1).permutation(len(samplings))
    shuffled = drawn(
        logits[order],
        [samplings[i] for i in order],
        index[order],
        history=histories([pairs[i] for i in order]),
    )
    np.testing.assert_array_equal(shuffled, together[order])
    for i, how in enumerate(samplings):
        own = LEVELS.index(level_of([how]))
        past = History(*(part[i : i + 1] for part in history))
        for level in LEVELS[own:]:
            alone = drawn(logits[i : i + 1], [how], index[i : i + 1], history=past, level=level)
            assert alone[0] == together[i], (how, level)


def test_draws_depend_on_the_seed_and_on_their_number():
    logits = jnp.zeros((1, VOCAB))
    seeds = [draw_many(Sampling(temperature=1.0, seed=seed), logits=logits)[:8] for seed in (1, 2)]
    again = draw_many(Sampling(temperature=1.0, seed=1), logits=logits)[:8]
    assert len(set(seeds[0].tolist())) > 4
    assert not np.array_equal(seeds[0], seeds[1])
    np.testing.assert_array_equal(seeds[0], again)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_a_small_seed_is_the_key_of_jax(seed):
    words = jax.random.key_data(jax.random.key(seed))
    np.testing.assert_array_equal(row_of(Sampling(seed=seed)).key, words)


def test_all_64_bits_of_a_seed_count_and_a_negative_one_wraps():
    keys = {tuple(row_of(Sampling(seed=seed)).key) for seed in (1, 1 + 2**32, 1 - 2**63, -1)}
    assert len(keys) == 4
    assert tuple(row_of(Sampling(seed=-1)).key) == tuple(row_of(Sampling(seed=2**64 - 1)).key)


def test_a_top_k_above_the_vocabulary_is_everything():
    assert set(draw_many(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {0}), (0.5, {0}), (0.6, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    found = inside(LOGITS, top_k=jnp.array([0]), top_p=jnp.float32([top_p]))
    assert set(np.flatnonzero(found[0])) == kept


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_id_that_only_pads_the_vocabulary_is_never_drawn(name, rows):
    logits, pairs, samplings = rows
    at, num_ids = list(SAMPLINGS).index(name), VOCAB - 8
    spoilt = logits[at : at + 1].copy()
    spoilt[:, num_ids:] = 500.0
    how = samplings[at]
    found = draw_many(
        how, logits=jnp.asarray(spoilt), num_ids=num_ids, history=histories(pairs[at : at + 1])
    )
    assert found.min() >= 0
    assert found.max() < num_ids


def test_a_bias_of_an_id_that_only_pads_the_vocabulary_changes_nothing():
    how = Sampling(temperature=0.0, logit_bias=((VOCAB - 1, 1000.0),))
    assert drawn(jnp.zeros((1, VOCAB)), [how], [0], num_ids=VOCAB - 1)[0] == 0


def test_a_temperature_near_zero_takes_the_most_likely_token():
    logits = jnp.array([[30.0, 80.0, 79.0, 10.0]])
    assert set(draw_many(Sampling(temperature=1e-37), logits=logits)) == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_whose_logits_are_not_finite_draws_minus_one_and_its_neighbour_goes_on(level, bad):
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 5], logits[1, 7] = bad, 100.0
    how = [Sampling(temperature=1.0)] * 2
    np.testing.assert_array_equal(drawn(logits, how, [0, 0], level=level), [-1, 7])


def test_logprobs_are_those_of_the_model_itself(rows):
    logits, pairs, samplings = rows
    num_ids = VOCAB - 4
    draws = _sample(
        jnp.asarray(logits),
        stacked(samplings),
        jnp.zeros(len(samplings), jnp.int32),
        history=histories(pairs),
        num_ids=num_ids,
        level="sorted",
        num_top=MAX_TOP,
    )
    real = logits[:, :num_ids].astype(np.float64)
    logprobs = real - np.log(np.exp(real).sum(-1, keepdims=True))
    numbers = np.arange(len(samplings))
    tol = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(draws.logprobs, logprobs[numbers, draws.tokens], **tol)
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :MAX_TOP]
    np.testing.assert_array_equal(draws.top_tokens, best)
    np.testing.assert_allclose(draws.top_logprobs, np.take_along_axis(logprobs, best, -1), **tol)


def test_a_history_counts_what_rows_draw():
    history = empty_history(3, vocab_size=5)
    for tokens, draws in (([1, 2, 3], [True, True, False]), ([1, 4, -1], [True, True, True])):
        history = counted(history, jnp.array(tokens), jnp.array(draws))
    expected = [[0, 2, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(history.num_drawn, expected)
    found = history_of([0, 0, 3], [2, 4], vocab_size=5)
    np.testing.assert_array_equal(found.in_prompt, [1, 0, 0, 1, 0])
    np.testing.assert_array_equal(found.num_drawn, [0, 0, 1, 0, 1])


def test_empty_rows_are_greedy():
    logits = np.random.default_rng(2).normal(size=(4, VOCAB)).astype(np.float32)
    draws = _sample(
        jnp.asarray(logits),
        empty_rows(4),
        jnp.zeros(4, jnp.int32),
        history=empty_history(4, vocab_size=VOCAB),
        num_ids=VOCAB,
        level="sorted",
    )
    np.testing.assert_array_equal(draws.tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    ("sampling", "level"),
    [
        (Sampling(temperature=0.0, top_k=4, top_p=0.5, min_p=0.5), "greedy"),
        (Sampling(), "random"),
        (Sampling(min_p=0.1), "shaped"),
        (Sampling(temperature=0.0, presence_penalty=0.1), "shaped"),
        (Sampling(logit_bias=((1, 1.0),)), "shaped"),
        (Sampling(top_p=0.9), "sorted"),
        (Sampling(top_k=5, repetition_penalty=1.1), "sorted"),
    ],
)
def test_the_level_is_the_lowest_that_does_what_is_asked(sampling, level):
    assert level_of([Sampling(temperature=0.0), sampling]) == level


def test_no_row_is_greedy_and_no_seed_is_not_taken():
    assert level_of([]) == "greedy"
    with pytest.raises(ValueError, match="seed is None"):
        row_of(Sampling(seed=None))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -101.0},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": tuple((i, 1.0) for i in range(301))},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
    ],
)
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Sampling(**values)
