"""What the modules of multi-token prediction read and predict."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models.mtp import look_ahead
from jaxfound.training.objective import ahead_of, terms_of, token_counts
from tests.models.tiny import jit, model_of, on_device, packed_batch, run_config

DOCUMENTS = [[7, 4, 1], [12], [2, 3]]
LENGTH = 12


@pytest.fixture(scope="module")
def batch():
    return packed_batch(DOCUMENTS, length=LENGTH)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_targets_are_those_of_a_plain_loop_over_documents(batch, depth):
    """Depth d at position i is given token i + d and predicts token i + d + 1 of its document."""
    ahead = ahead_of(on_device(batch), depth)
    for row, lengths in enumerate(DOCUMENTS):
        expected, start = {}, 0
        for n in lengths:
            # A document's tokens: its inputs, then the target of its last input.
            document = [*batch.tokens[row, start : start + n], batch.targets[row, start + n - 1]]
            for i in range(n):
                # The packing counts no target beyond the last input.
                if i + depth + 1 < n:
                    expected[start + i] = (document[i + depth], document[i + depth + 1])
            start += n
        assert np.flatnonzero(ahead.counted[row]).tolist() == sorted(expected)
        for position, (token, target) in expected.items():
            assert ahead.tokens[row, position] == token
            assert ahead.targets[row, position] == target


def test_nothing_is_read_from_the_next_document_or_from_padding(batch):
    ahead = ahead_of(on_device(batch), 2)
    same = np.zeros(batch.tokens.shape, bool)
    same[:, :-2] = batch.segment_ids[:, 2:] == batch.segment_ids[:, :-2]
    assert not np.asarray(ahead.tokens)[~(same & (batch.segment_ids > 0))].any()
    assert not np.asarray(ahead.counted)[batch.segment_ids == 0].any()


def test_a_masked_target_counts_at_no_depth():
    ones = jnp.ones((1, 6), jnp.int32)
    counted = jnp.array([[True, True, False, True, True, False]])
    ahead = look_ahead(ones, counted, ones, depth=1)
    assert ahead.counted.tolist() == [[True, False, True, True, False, False]]


def test_each_depth_reads_the_token_before_the_one_it_predicts():
    """The loss of depth d depends on token i + d through the module, not through the decoder."""
    model = model_of("mla_moe_mtp")
    cfg = run_config(model.cfg, rows=1, length=8)
    batch = on_device(packed_batch([[8]], length=8))

    @jit
    def nats(tokens, targets):
        return terms_of(model, batch._replace(tokens=tokens, targets=targets), cfg=cfg).ahead_nats

    counts = token_counts(batch, num_depths=2)
    assert counts.ahead.tolist() == [6.0, 5.0]
    # targets[6] is token 7: the last that depth 1 predicts; both depths predict it, none reads it.
    before = nats(batch.tokens, batch.targets)
    after = nats(batch.tokens, batch.targets.at[0, 6].add(1))
    assert (before != after).all()
    # targets[1] is token 2: depth 1 reads it at 1, depth 2 at 0; only depth 1 predicts it (at 0).
    assert (before != nats(batch.tokens, batch.targets.at[0, 1].add(1))).all()
    # targets[0] is token 1: read by depth 1 at 0, predicted by neither.
    after = nats(batch.tokens, batch.targets.at[0, 0].add(1))
    assert (before != after).all()
