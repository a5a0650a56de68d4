"""Cross-entropy against closed forms; chunks, masks and padding change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxfound.config.model import ModelConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.embedding import Head
from jaxfound.training.loss import cross_entropy
from tests.models.tiny import jit
from tests.training.tiny import DENSE

B, T, D, V = 2, 13, 16, 259


@pytest.fixture(scope="module")
def problem():
    cfg = ModelConfig.model_validate({**DENSE, "vocab_multiple": 64})
    head = Head(cfg, rngs=nnx.Rngs(0), execution=Execution())
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(keys[0], (B, T, D)),
        "matrix": jax.random.normal(keys[1], (D, cfg.padded_vocab_size)),
        "targets": jax.random.randint(keys[2], (B, T), 0, V),
        "counted": jnp.arange(B * T).reshape(B, T) % 3 > 0,
        "head": head,
    }


def sums(problem, chunk, **changes):
    args = {**problem, **changes}
    return cross_entropy(args.pop("x"), args.pop("matrix"), chunk=chunk, **args)


def test_the_loss_is_the_closed_form_over_real_ids(problem):
    logits = np.asarray(problem["x"], np.float64) @ np.asarray(problem["matrix"], np.float64)
    logits = logits[..., :V]
    log_z = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.asarray(problem["targets"])[..., None], -1)[..., 0]
    counted = np.asarray(problem["counted"])
    found = sums(problem, 0)
    assert float(found.nats) == pytest.approx(((log_z - picked) * counted).sum(), rel=1e-5)
    assert float(found.log_z_squared) == pytest.approx((log_z**2 * counted).sum(), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 13, 50])
def test_chunks_give_the_same_loss_and_gradients(problem, chunk):
    def loss(x, matrix, size):
        return sums(problem, size, x=x, matrix=matrix).nats

    both = jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    whole = both(problem["x"], problem["matrix"], 0)
    cut = both(problem["x"], problem["matrix"], chunk)
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_no_array_of_all_logits_exists_when_chunked(problem):
    def loss(x, matrix):
        return sums(problem, 2, x=x, matrix=matrix).nats

    text = str(jax.make_jaxpr(jax.grad(loss))(problem["x"], problem["matrix"]))
    assert f"[{B},{T},320]" not in text
    assert f"[{B},2,320]" in text


def test_targets_that_do_not_count_change_nothing(problem):
    other = jnp.where(problem["counted"], problem["targets"], 7)
    assert float(sums(problem, 4, targets=other).nats) == float(sums(problem, 4).nats)


def test_a_batch_without_a_target_gives_zero_and_no_nan(problem):
    none = jnp.zeros_like(problem["counted"])
    loss = jit(jax.value_and_grad(lambda x: sums(problem, 4, x=x, counted=none).nats))
    value, grad = loss(problem["x"])
    assert float(value) == 0
    assert not np.asarray(grad).any()


def test_rows_that_pad_the_vocabulary_get_no_gradient(problem):
    grad = jit(jax.grad(lambda m: sums(problem, 4, matrix=m).nats))(problem["matrix"])
    assert np.asarray(grad)[:, V:].max() == 0
    assert np.asarray(grad)[:, :V].any()
