"""Documents packed into a row never see each other, and padding weighs nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.precision import PrecisionConfig
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.training.batches import documents_of, most_documents
from jaxfound.training.objective import ahead_of, objective_of, terms_of, token_counts
from pallas_kernels import hardware
from tests.models.tiny import (
    forward,
    jit,
    model_config,
    model_of,
    on_device,
    packed_batch,
    run_config,
    tokens_of,
    weights_of,
)

LENGTH = 16
# Row 0: two documents and no padding; row 1: two documents and 3 padding tokens; row 2: nothing.
DOCUMENTS = [[7, 9], [6, 7], []]
PATHS = ["gqa", "mla", "mla_moe_yarn", "mla_moe_mtp"]


@pytest.fixture(scope="module", params=PATHS)
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def batch():
    return on_device(packed_batch(DOCUMENTS, length=LENGTH))


@jit
def every_output(model, batch):
    """Logits of the next token, then those of every further depth."""
    row = model.row(batch.tokens, batch.positions, batch.segment_ids)
    hidden = model.hidden(batch.tokens, row)
    outputs, state = [model.logits(hidden.final)], hidden.final
    for i, module in enumerate(model.mtp):
        state, _ = module(state, model.embedding(ahead_of(batch, i + 1).tokens), row)
        outputs.append(model.logits(state))
    return jnp.stack(outputs)


@pytest.mark.parametrize("changed", [1, 2], ids=["the first document", "the second document"])
def test_changing_a_document_leaves_the_other_bitwise_alone(model, batch, changed):
    other = packed_batch(DOCUMENTS, length=LENGTH, seed=1)
    inside = np.asarray(batch.segment_ids) == changed
    mixed = batch._replace(
        tokens=jnp.where(inside, other.tokens, batch.tokens),
        targets=jnp.where(inside, other.targets, batch.targets),
    )
    before, after = every_output(model, batch), every_output(model, mixed)
    kept = (np.asarray(batch.segment_ids) > 0) & ~inside
    np.testing.assert_array_equal(before[:, kept], after[:, kept])
    assert (np.asarray(before != after)[:, inside]).any()


def test_a_packed_document_has_the_logits_it_has_alone(model, batch):
    packed = every_output(model, batch)[0]
    for row, start, end in ((0, 0, 7), (0, 7, 16), (1, 6, 13)):
        tokens = jnp.zeros((3, LENGTH), jnp.int32)
        tokens = tokens.at[0, : end - start].set(batch.tokens[row, start:end])
        alone = forward(model, tokens)[0, : end - start]
        np.testing.assert_allclose(packed[row, start:end], alone, rtol=2e-5, atol=2e-5)


def test_padding_gives_finite_values(model, batch):
    assert np.isfinite(every_output(model, batch)).all()


# Of the second, no dense layer before those with experts: there is enough to compile.
@pytest.fixture(
    scope="module",
    params=[("gqa", {}), ("mla_moe_mtp", {"num_layers": 1, "num_dense_layers": 0})],
    ids=["gqa", "mla_moe_mtp"],
)
def gradients_and_terms(request):
    name, changes = request.param
    frame = Frame(model_config(name, **changes))
    cfg = run_config(frame.cfg, train={"z_loss_weight": 1e-3, "loss_chunk": 8})
    params, buffers = weights_of(frame)

    @jit
    def of(batch, counts):
        def objective(params):
            terms = terms_of(frame.bind(params, buffers), batch, cfg=cfg)
            return objective_of(terms, counts, cfg=cfg), terms

        return jax.grad(objective, has_aux=True)(params)

    return frame, of


def test_padding_has_no_weight_in_loss_gradient_or_load(gradients_and_terms, batch):
    """Other ids and targets in the padding change nothing: 'no gradient', said exactly."""
    frame, of = gradients_and_terms
    counts = token_counts(batch, num_depths=frame.cfg.mtp_depth)
    other = tokens_of(3, LENGTH, seed=5)
    padding = batch.segment_ids == 0
    filled = batch._replace(
        tokens=jnp.where(padding, other, batch.tokens),
        targets=jnp.where(padding, other, batch.targets),
    )
    (grads, terms), (others, other_terms) = of(batch, counts), of(filled, counts)
    for path, grad in grads.items():
        assert np.isfinite(grad).all(), path
        # Sums over tokens round differently once a padded row's own numbers change place.
        np.testing.assert_allclose(grad, others[path], rtol=1e-5, atol=1e-7, err_msg=path)
    for ours, theirs in zip(jax.tree.leaves(terms), jax.tree.leaves(other_terms), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient(gradients_and_terms, batch):
    frame, of = gradients_and_terms
    empty = jax.tree.map(jnp.zeros_like, batch)
    grads, terms = of(empty, token_counts(empty, num_depths=frame.cfg.mtp_depth))
    assert not any(np.asarray(grad).any() for grad in grads.values())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(terms))


@pytest.mark.parametrize("name", ["gqa", "mla_moe_mtp"])
def test_where_documents_are_joined_a_row_is_one_of_them(name, batch):
    frame = Frame(model_config(name), execution=Execution(documents="joined"))
    model = frame.bind(*weights_of(frame))
    joined = every_output(model, batch)[0]
    np.testing.assert_array_equal(joined[0], forward(model, batch.tokens)[0])
    apart = every_output(model_of(name), batch)[0]
    np.testing.assert_array_equal(joined[0, :7], apart[0, :7])
    assert not np.allclose(joined[0, 7:], apart[0, 7:], atol=1e-3), "the second sees the first"


def test_the_loader_vouches_for_rows_whose_documents_all_have_places():
    cfg = run_config(model_config("gqa"), length=64)
    # Also more than a row so short has by the kernel's default.
    assert documents_of(cfg, most_pieces=64) == "checked"
    assert documents_of(cfg, most_pieces=65) == "runs"
    joined = run_config(model_config("gqa"), length=64, train={"documents": "joined"})
    assert documents_of(joined, most_pieces=9) == "joined"


@pytest.mark.parametrize(
    ("most_pieces", "places"), [(1, 2), (2, 2), (3, 4), (5, 8), (16, 16), (17, 32), (65, None)]
)
def test_attention_has_a_place_for_each_document_of_the_fullest_row(most_pieces, places):
    cfg = run_config(model_config("gqa", max_positions=2048), length=2048)
    assert most_documents(cfg, most_pieces=most_pieces) == places


@pytest.mark.parametrize("places", [2, 16])
def test_attention_on_an_h200_keeps_statistics_for_as_many_documents_as_have_places(places, batch):
    execution = Execution(precision=PrecisionConfig(), documents="checked", most_documents=places)
    frame = Frame(model_config("gqa"), execution=execution)

    def loss(params, buffers, batch):
        model = frame.bind(params, buffers)
        row = model.row(batch.tokens, batch.positions, batch.segment_ids)
        return model.hidden(batch.tokens, row).final.sum()

    with hardware.target("NVIDIA H200"):
        traced = jax.jit(jax.grad(loss)).trace(*frame.shapes(), batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    heads, (rows, length) = frame.cfg.num_heads, batch.tokens.shape
    assert f"tensor<{rows}x{places}x{heads}x{length}xf32>" in text
