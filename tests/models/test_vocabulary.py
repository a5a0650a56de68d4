"""Rows that pad the vocabulary never win, never count, and ids outside it are never a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.precision import PrecisionConfig
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.execution import Execution
from jaxfound.models.layers.embedding import NEG_INF, picked_rows
from jaxfound.training.objective import objective_of, terms_of, token_counts
from tests.models.tiny import (
    forward,
    jit,
    model_config,
    on_device,
    packed_batch,
    run_config,
    tokens_of,
    weights_of,
)

VOCAB = 61


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def padded(request):
    """A frame of 64 rows for 61 ids, the padding rows larger than any real one."""
    frame = Frame(model_config("gqa", tie_embeddings=request.param))
    params, buffers = weights_of(frame)
    params["embedding.table"] = params["embedding.table"].at[VOCAB:].set(50.0)
    if not request.param:
        params["head.kernel"] = params["head.kernel"].at[:, VOCAB:].set(50.0)
    return frame, Arrays(params, buffers)


@pytest.fixture(scope="module")
def exact(padded):
    """The same model with 61 rows."""
    frame, (params, buffers) = padded
    cfg = frame.cfg.model_copy(update={"vocab_multiple": 1})
    cut = dict(params, **{"embedding.table": params["embedding.table"][:VOCAB]})
    if "head.kernel" in cut:
        cut["head.kernel"] = cut["head.kernel"][:, :VOCAB]
    return Frame(cfg), Arrays(cut, buffers)


def loss_and_gradients(frame, arrays):
    cfg = run_config(frame.cfg)
    batch = on_device(packed_batch([[9, 7], [16]], length=16))

    def loss(params):
        terms = terms_of(frame.bind(params, arrays.buffers), batch, cfg=cfg)
        return objective_of(terms, token_counts(batch, num_depths=0), cfg=cfg)

    return jit(jax.value_and_grad(loss))(arrays.params)


def test_padded_ids_have_no_probability(padded):
    frame, arrays = padded
    logits = forward(frame.bind(*arrays), jnp.asarray(tokens_of(2, 16)))
    assert frame.cfg.padded_vocab_size == logits.shape[-1] == 64
    assert (logits[..., VOCAB:] == NEG_INF).all()
    assert (logits[..., :VOCAB] > NEG_INF / 2).all()
    assert (jax.nn.softmax(logits, axis=-1)[..., VOCAB:] == 0).all()


def test_loss_and_gradients_are_those_of_the_vocabulary_without_padding(padded, exact):
    loss, grads = loss_and_gradients(*padded)
    expected, expected_grads = loss_and_gradients(*exact)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    table = grads["embedding.table"]
    np.testing.assert_allclose(
        table[:VOCAB], expected_grads["embedding.table"], rtol=1e-4, atol=1e-6
    )
    assert not table[VOCAB:].any()
    assert not grads.get("head.kernel", jnp.zeros((1, 64)))[:, VOCAB:].any()


@pytest.mark.parametrize("token", [-1, -VOCAB, VOCAB, 63, 64, 2**31 - 1])
def test_an_id_outside_the_vocabulary_embeds_as_not_a_number(padded, token):
    frame, arrays = padded
    rows = frame.bind(*arrays).embedding(jnp.array([[0, token, VOCAB - 1]]))
    np.testing.assert_array_equal(np.isnan(rows).all(axis=-1), [[False, True, False]])
    np.testing.assert_array_equal(np.isnan(rows).any(axis=-1), [[False, True, False]])


def test_gradients_of_a_frequent_token_are_added_up_in_float32():
    rng = np.random.default_rng(0)
    # As frequent as letters of a text: the first has every fifth place.
    share = 1 / (1 + np.arange(VOCAB))
    ids = rng.choice(VOCAB + 1, (4, 2048), p=np.append(0.9 * share / share.sum(), 0.1))
    grad = (rng.standard_normal((*ids.shape, 8)) + 0.3).astype(jnp.bfloat16)
    in_bfloat16 = Execution(precision=PrecisionConfig(compute="bfloat16"))
    table = jnp.zeros((VOCAB, 8), jnp.float32)
    rows, pull = jax.vjp(lambda table: picked_rows(table, jnp.asarray(ids), in_bfloat16), table)
    assert rows.dtype == jnp.bfloat16
    assert (np.isnan(rows).all(-1) == (ids == VOCAB)).all()
    exact = np.zeros((VOCAB + 1, 8))
    np.add.at(exact, ids, grad.astype(np.float64))
    (found,) = jit(pull)(jnp.asarray(grad))
    # Added up in bfloat16, the first row would be off by 3 % on average.
    np.testing.assert_allclose(np.asarray(found), exact[:VOCAB], rtol=1e-5, atol=1e-3)
