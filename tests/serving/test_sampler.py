"""Sampling: what may be drawn, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import ConfigError
from jaxfound.serving.sampler import Sampling, inside_top_p, sample

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))


def drawn(sampling, num=400, logits=LOGITS):
    keys = jax.random.split(jax.random.key(0), num)
    one = jax.vmap(lambda key: sample(logits, key, sampling=sampling)[0])
    return np.asarray(jax.jit(one)(keys))


def test_zero_temperature_takes_the_most_likely_token():
    assert set(drawn(Sampling(temperature=0.0), num=5)) == {0}


def test_frequencies_follow_the_softmax():
    counts = np.bincount(drawn(Sampling(temperature=1.0), num=4000), minlength=4) / 4000
    # Five standard deviations of 4,000 draws.
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.125, 0.125], atol=0.04)


def test_top_k_keeps_the_k_most_likely():
    assert set(drawn(Sampling(temperature=1.0, top_k=2))) == {0, 1}


def test_a_top_k_above_the_vocabulary_is_everything():
    assert set(drawn(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {0}), (0.5, {0}), (0.6, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    assert set(np.flatnonzero(inside_top_p(LOGITS, top_p)[0])) == kept


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=5.0), Sampling(temperature=5.0, top_k=3), Sampling(top_p=0.999)],
)
def test_a_padded_id_is_never_drawn(sampling):
    padded = jnp.concatenate([LOGITS, jnp.full((1, 4), -1e30)], axis=1)
    assert drawn(sampling, logits=padded).max() < 4


def test_a_seed_gives_the_same_draws():
    key = jax.random.key(3)
    first = sample(LOGITS, key, sampling=Sampling())
    assert int(first[0]) == int(sample(LOGITS, key, sampling=Sampling())[0])


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
    ],
)
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Sampling(**values)
