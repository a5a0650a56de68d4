"""The decoder computes what the published models compute: logits of small hub checkpoints.

The right values are those of an independent implementation in float32, checked in float64.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import empty_cache
from tests.models.published import DATA, load_published, read_logits
from tests.models.tiny import extend, forward

# Folder of the config and the logits, folder of the weights.
CHECKPOINTS = {
    "llama": ("S09/llama_base", "S09/llama_base"),
    "llama with its own head_dim, eps and theta": ("S09/llama_headdim24", "S09/llama_headdim24"),
    "llama with tied embeddings": ("S07/llama_tied", "S07/llama_tied"),
    "deepseek, neighbours rotate together": ("S02/ds_default", "S02/ds_default"),
    "deepseek, halves rotate together": ("S02/ds_half", "S02/ds_default"),
    "deepseek with a full query matrix": ("S02/ds_no_qlora", "S02/ds_no_qlora"),
    "deepseek with yarn": ("S03/ds_yarn", "S03/ds_yarn"),
}
# The cases' own tolerance; the decoder is within 3e-5, the rounding of the stored weights 3e-4.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=list(CHECKPOINTS))
def case(request):
    config, weights = CHECKPOINTS[request.param]
    sequences = json.loads((DATA / config / "tokens.json").read_text())
    logits = [read_logits(DATA / config / f"logits_{i}.npy.xz") for i in range(len(sequences))]
    return load_published(DATA / config, weights=DATA / weights), sequences, logits


@pytest.fixture(scope="module")
def batch(case):
    """The sequences as one batch, padded at their ends."""
    _, sequences, _ = case
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return jnp.asarray(tokens)


def test_logits_are_the_published_ones(case, batch):
    model, sequences, expected = case
    segments = jnp.asarray(np.stack([np.arange(batch.shape[1]) < len(s) for s in sequences]))
    logits = forward(model, batch, segments.astype(jnp.int32))
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(logits[row, : len(sequence)], expected[row], **CLOSE)


def test_cached_logits_are_the_published_ones(case, batch):
    """A prefill of five tokens, then the rest appended: the absorbed form, past YaRN's length."""
    model, sequences, expected = case
    cache = empty_cache(model.cfg, batch=len(sequences), num_slots=100, dtype=jnp.float32)
    parts = []
    for begin, end in ((0, 5), (5, batch.shape[1])):
        positions = jnp.broadcast_to(jnp.arange(begin, end)[None], (len(sequences), end - begin))
        logits, cache = extend(model, batch[:, begin:end], cache, positions)
        parts.append(logits)
    logits = jnp.concatenate(parts, axis=1)
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(logits[row, : len(sequence)], expected[row], **CLOSE)
