"""Decoding with a cache gives the logits of the whole-row forward pass, whatever the pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import empty_cache
from jaxfound.models.cache import HeadCache, bytes_a_token, slots_of, write_at
from jaxfound.models.layers.attention import cached_view
from tests.models.tiny import extend, forward, jit, model_config, model_of, tokens_of

# float32 sums in another order: a few units in the last place of logits of size 1 to 10.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
ROWS, LENGTH, SLOTS = 2, 14, 24


@pytest.fixture(scope="module", params=["gqa", "mla", "mla_moe_yarn"])
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def rows(model):
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))
    return tokens, forward(model, tokens)


def empty(model, *, num_slots=SLOTS):
    return empty_cache(model.cfg, batch=ROWS, num_slots=num_slots, dtype=model.execution.dtype)


def places(begin, end):
    return jnp.broadcast_to(jnp.arange(begin, end)[None], (ROWS, end - begin))


@pytest.mark.parametrize("pieces", [[9, 1, 1, 1, 1, 1], [9, 5]], ids=str)
def test_pieces_give_the_logits_of_the_whole_row(model, rows, pieces):
    tokens, expected = rows
    cache, begin, parts = empty(model), 0, []
    for size in pieces:
        piece = tokens[:, begin : begin + size]
        logits, cache = extend(model, piece, cache, places(begin, begin + size))
        parts.append(logits)
        begin += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, **CLOSE)


def test_rows_of_different_lengths_decode_side_by_side(model, rows):
    """Prompts of 5 and 9 padded to 9; the padded tail's slots are overwritten by what follows."""
    tokens, expected = rows
    lengths = np.array([5, 9])
    _, cache = extend(model, tokens.at[0, 5:].set(7)[:, :9], empty(model), places(0, 9))
    for step in range(3):
        at = jnp.asarray(lengths + step)
        token = jnp.take_along_axis(tokens, at[:, None], axis=1)
        logits, cache = extend(model, token, cache, at[:, None])
        np.testing.assert_allclose(logits[:, 0], expected[jnp.arange(2), at], **CLOSE)


def test_what_later_slots_hold_changes_nothing(model, rows):
    """Slots beyond a row's length hold what a finished request left there."""
    tokens, expected = rows
    left = jax.tree.map(lambda a: jnp.full_like(a, 1e4), empty(model))
    logits, _ = extend(model, tokens[:, :9], left, places(0, 9))
    np.testing.assert_allclose(logits, expected[:, :9], **CLOSE)


@pytest.mark.parametrize("token", [-1, 61, 64, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_seen_in_its_row_and_in_no_other(model, rows, token):
    tokens, expected = rows
    logits, _ = extend(model, tokens.at[0, 3].set(token)[:, :9], empty(model), places(0, 9))
    assert np.isnan(logits[0, 3:, :61]).all()
    np.testing.assert_allclose(logits[1], expected[1, :9], **CLOSE)


def test_tokens_past_the_last_slot_are_not_written():
    slots = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)))
    after = write_at(slots, jnp.ones((2, 2, 3)), jnp.array([[3, 4], [4, 5]]))
    np.testing.assert_array_equal(after[0], slots[0].at[3].set(1.0))
    np.testing.assert_array_equal(after[1], slots[1])


@pytest.mark.parametrize("name", ["gqa", "mla", "mla_moe_mtp"])
def test_bytes_a_token_are_the_bytes_of_one_slot(name):
    cfg = model_config(name)
    cache = empty_cache(cfg, batch=3, num_slots=5, dtype=jnp.bfloat16)
    assert slots_of(cache) == 5
    held = sum(a.nbytes for a in jax.tree.leaves(cache))
    assert bytes_a_token(cfg) == held / (3 * 5)


def test_keys_and_values_of_every_head_give_what_their_latents_give():
    """A token at a time; slots behind the last token hold noise."""
    model, noise = model_of("mla_moe_yarn"), np.random.default_rng(0)
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))
    mixer, mla = jax.tree.map(lambda a: a[0], model.layers.mixer), model.cfg.mla
    x = model.embedding(tokens)
    expected = jit(lambda mixer, x, view: mixer(x, view))(
        mixer, x, model.row(tokens, None, None).view
    )
    shape = (ROWS, model.cfg.num_heads, SLOTS)
    widths = (mla.qk_head_dim, mla.v_head_dim)
    cache = HeadCache(*(jnp.asarray(noise.normal(size=(*shape, n)), x.dtype) for n in widths))
    step = jit(lambda mixer, x, cache, at: mixer.extend(x, cache, cached_view(at, SLOTS)))
    for i in range(LENGTH):
        out, cache = step(mixer, x[:, i : i + 1], cache, places(i, i + 1))
        np.testing.assert_allclose(out[:, 0], expected[:, i], **CLOSE)
