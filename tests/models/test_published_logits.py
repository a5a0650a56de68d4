"""The decoder computes what the published models compute: logits of small hub checkpoints.

The right values are those of transformers in float32, checked in float64. Cases S02, S03, S06,
S07 and S09; `transformers/` adds rules that none of them has: DeepSeek-V2's router with YaRN, and
Llama with each way to longer contexts.
"""

import json
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import empty_cache
from tests.models.published import (
    DATA,
    load_published,
    published,
    read_config,
    read_folder,
    read_logits,
    tensor,
    with_mtp,
    write_folder,
)
from tests.models.tiny import extend, forward, jit

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
# Folders of both.
MORE = {
    "deepseek in fp8 with cut blocks": "S06/ds_fp8",
    "deepseek with tied embeddings": "S07/ds_tied",
    "deepseek-v2: softmax, best expert of a group, yarn": "transformers/deepseek_v2",
    "llama 3 frequencies": "transformers/llama3",
    "llama with yarn": "transformers/llama_yarn",
}
WHOLE_ROWS = CHECKPOINTS | {name: (folder, folder) for name, folder in MORE.items()}
# Folder, and the tokens of a prefill before the others come one at a time.
ONE_BY_ONE = {
    "llama": ("S09/llama_headdim24", 0),
    "deepseek": ("S02/ds_default", 5),
    # The prefill ends before YaRN's original length of 64, and decoding goes on beyond it.
    "deepseek with yarn": ("S03/ds_yarn", 60),
}
# The cases' own tolerance; the decoder is within 3e-5, the rounding of the stored weights 3e-4.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


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


@pytest.mark.parametrize(("config", "weights"), WHOLE_ROWS.values(), ids=list(WHOLE_ROWS))
def test_logits_are_the_published_ones(config, weights):
    check_whole_rows(load_published(published(config, weights)), *sequences_of(config))


@pytest.mark.parametrize(("name", "prefill"), ONE_BY_ONE.values(), ids=list(ONE_BY_ONE))
def test_tokens_one_by_one_through_the_cache_have_the_published_logits(name, prefill):
    """S02, S03: at every position, in the form that the cache of latents asks for."""
    sequences, expected = sequences_of(name)
    model, batch = load_published(published(name)), padded(sequences)
    rows, length = batch.shape
    cache = empty_cache(model.cfg, batch=rows, num_slots=length, dtype=jnp.float32)
    begins, parts = [*([0] if prefill else []), *range(prefill, length)], []
    for begin, end in pairwise([*begins, length]):
        positions = jnp.broadcast_to(jnp.arange(begin, end)[None], (rows, end - begin))
        logits, cache = extend(model, batch[:, begin:end], cache, positions)
        parts.append(logits)
    logits = np.concatenate(parts, axis=1)
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(logits[row, : len(sequence)], expected[row], **CLOSE)


@jit
def with_the_extra_layer(model, tokens, following):
    """The main model's normalised state and logits, and the logits of the extra layer."""
    row = model.row(tokens, None, None)
    final = model.hidden(tokens, row).final
    state, _ = model.mtp[0](final, model.embedding(following), row)
    return final, model.logits(final), model.logits(state)


@pytest.fixture(scope="module")
def extra():
    """S02 with an extra layer: a sequence of 33, and what the model makes of it."""
    sequences, expected = sequences_of("S02/ds_default")
    tokens = jnp.asarray([sequences[2]], jnp.int32)
    following = jnp.roll(tokens, -1, axis=1)
    final, logits, ahead = with_the_extra_layer(load_published(with_mtp()), tokens, following)
    # The last token has no following one.
    return sequences[2], expected[2], final[0], logits[0], ahead[0, :-1]


def test_an_extra_layer_changes_nothing_before_it(extra):
    """S02: the logits are those of the model without."""
    without, beside = (read_config(f"S02/{name}") for name in ("ds_default", "ds_mtp_extra"))
    assert beside.pop("num_nextn_predict_layers") == 1
    assert beside == {k: v for k, v in without.items() if k != "num_nextn_predict_layers"}
    _, expected, _, logits, _ = extra
    np.testing.assert_allclose(logits, expected, **CLOSE)


def test_an_extra_layer_computes_what_it_does_as_a_model_of_its_own(extra, tmp_path):
    """DeepSeek-V3, equations 21 to 23: what joins the layer by hand, then it as the only layer."""
    sequence, _, final, _, ahead = extra
    tensors, config = read_folder(with_mtp()), read_config("S02/ds_mtp_extra")
    layer = {
        name.removeprefix("model.layers.3."): one
        for name, one in tensors.items()
        if name.startswith("model.layers.3.")
    }

    def norm(x, name):
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / root * layer[name].array.astype(np.float64)

    table = tensors["model.embed_tokens.weight"].array.astype(np.float64)
    embedded, hidden = table[sequence[1:]], np.asarray(final, np.float64)[:-1]
    joined = np.concatenate([norm(embedded, "enorm.weight"), norm(hidden, "hnorm.weight")], axis=1)
    rows = np.zeros(table.shape, np.float32)
    rows[: len(joined)] = joined @ layer["eh_proj.weight"].array.astype(np.float64).T
    alone = {
        "model.embed_tokens.weight": tensor(rows),
        "model.norm.weight": layer["shared_head.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
        **{
            f"model.layers.0.{name}": one
            for name, one in layer.items()
            if name.partition(".")[0] in ("self_attn", "mlp") or "layernorm" in name
        },
    }
    only = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    model = load_published(write_folder(tmp_path / "alone", config | only, alone))
    expected = forward(model, jnp.arange(len(joined))[None])
    np.testing.assert_allclose(ahead, expected[0], **CLOSE)
