"""The decoder computes what the published models compute: logits of small hub checkpoints.

The right values are those of transformers in float32, checked in float64. Cases S02, S03, S06,
S07 and S09; `transformers/` adds rules that none of them has: DeepSeek-V2's router with YaRN, and
Llama with each way to longer contexts.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import empty_cache
from tests.models.published import DATA, load_published, published, read_logits
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
# One pass over whole rows; what the cache does is the same for them.
MORE = {
    "deepseek in fp8 with cut blocks": "S06/ds_fp8",
    "deepseek with tied embeddings": "S07/ds_tied",
    "deepseek-v2: softmax, best expert of a group, yarn": "transformers/deepseek_v2",
    "llama 3 frequencies": "transformers/llama3",
    "llama with yarn": "transformers/llama_yarn",
}
# The cases' own tolerance; the decoder is within 3e-5, the rounding of the stored weights 3e-4.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=list(CHECKPOINTS))
def case(request):
    config, weights = CHECKPOINTS[request.param]
    model = load_published(published(config, weights))
    return model, *sequences_of(config)


@pytest.fixture(scope="module")
def batch(case):
    return padded(case[1])


def sequences_of(config):
    sequences = json.loads((DATA / config / "tokens.json").read_text())
    return sequences, [
        read_logits(DATA / config / f"logits_{i}.npy.xz") for i in range(len(sequences))
    ]


def padded(sequences):
    """The sequences as one batch, padded at their ends."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return jnp.asarray(tokens)


def check_whole_rows(model, sequences, expected):
    batch = padded(sequences)
    segments = jnp.asarray(np.stack([np.arange(batch.shape[1]) < len(s) for s in sequences]))
    logits = forward(model, batch, segments.astype(jnp.int32))
    for row, sequence in enumerate(sequences):
        found = logits[row, : len(sequence), : model.cfg.vocab_size]
        np.testing.assert_allclose(found, expected[row], **CLOSE)


def test_logits_are_the_published_ones(case):
    check_whole_rows(*case)


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


@pytest.mark.parametrize("name", MORE.values(), ids=list(MORE))
def test_logits_of_other_rules_are_the_published_ones(name):
    check_whole_rows(load_published(published(name)), *sequences_of(name))


def test_decoding_token_by_token_gives_the_logits_of_the_whole_row():
    """S02: one token at a time through the cache, at every position."""
    sequences, expected = sequences_of("S02/ds_default")
    model = load_published(published("S02/ds_default"))
    tokens = jnp.asarray([sequences[2]], jnp.int32)
    cache = empty_cache(model.cfg, batch=1, num_slots=100, dtype=jnp.float32)
    for position in range(tokens.shape[1]):
        here = jnp.full((1, 1), position)
        logits, cache = extend(model, tokens[:, position : position + 1], cache, here)
        np.testing.assert_allclose(logits[0, 0], expected[2][position], **CLOSE)
