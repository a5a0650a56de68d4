"""The tokenizer in a GGUF file's metadata: the same ids as the tokenizer.json it stands for."""

import json

import pytest
import tokenizers

from jaxfound.data import DataError, TokenizerFile
from jaxfound.data.chat import chat_ids
from jaxfound.data.gguf_tokenizer import gguf_tokenizer, tokenizer_files

SPECIALS = ["<|end|>", "<|im|>", "<name>"]
TEXTS = (
    "year 2024, 12345.67!",
    "  two  spaces\n\n\ttab",
    "漢字 né 🙂",
    "I'm we'll <|im|> x=1 // y",
)


def smol(path):
    """A trained BPE that cuts digits one by one, as a tokenizer.json."""
    pre = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIALS,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the year 2024, the year 2025. I'm // two  spaces"] * 9, trainer)
    tokenizer.save(str(path))
    return json.loads(path.read_text("utf-8"))


def metadata_of(document):
    """What llama.cpp's converter writes for that file."""
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    kinds = {"<|end|>": 3, "<|im|>": 3, "<name>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }


@pytest.fixture
def metadata(tmp_path):
    return metadata_of(smol(tmp_path / "tokenizer.json"))


def test_ids_and_text_are_those_of_the_tokenizer_it_was_made_from(tmp_path, metadata):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im|>", "eos_token": "<|end|>"})
    )
    right = TokenizerFile(tmp_path / "tokenizer.json")
    found = gguf_tokenizer(metadata, place="model.gguf")
    assert (found.bos_id, found.eos_id, found.vocab_size) == (1, 0, right.vocab_size)
    assert (found.name, found.prompt_start) == ("model.gguf", ())
    for text in TEXTS:
        ids = found.encode(text).tolist()
        assert ids == right.encode(text).tolist()
        assert found.decode(ids) == text


def test_digits_are_cut_only_where_the_file_says_so(metadata):
    digits = gguf_tokenizer(metadata, place="a").encode("202 20").size
    metadata["tokenizer.ggml.merges"].append("2 0")
    metadata["tokenizer.ggml.tokens"].append("20")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert gguf_tokenizer(metadata, place="a").encode("202 20").size == digits
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert gguf_tokenizer(metadata, place="a").encode("202 20").size < digits


def test_the_chat_template_of_the_file_is_used(metadata):
    found = gguf_tokenizer(metadata, place="model.gguf")
    ids = chat_ids(found, [{"role": "user", "content": "the"}]).tolist()
    assert ids == [1, *found.encode("the").tolist(), 0]


def test_the_files_written_to_a_folder_are_the_same_tokenizer(tmp_path, metadata):
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in tokenizer_files(metadata, place="model.gguf").items():
        (folder / name).write_bytes(content)
    found = TokenizerFile(folder / "tokenizer.json")
    right = gguf_tokenizer(metadata, place="model.gguf")
    assert found.fingerprint == right.fingerprint
    assert found.chat is not None
    assert found.prompt_start == right.prompt_start == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", r"tokenizer\.ggml\.model is 'llama'; only `gpt2`"),
        ("pre", "llama-bpe", r"pre is 'llama-bpe', a rule .* known are gpt-2, smollm"),
        ("pre", None, r"pre is None"),
        ("tokens", None, r"tokens is not a list of texts"),
        ("tokens", ["a", "a"], r"holds a token twice"),
        ("token_type", [1], r"token_type is not one number a token"),
        ("merges", ["a  b"], r"the merge 'a  b' is not of two known tokens"),
        ("merges", ["zz yy"], r"the merge 'zz yy' is not"),
        ("eos_token_id", 10_000, r"eos_token_id is 10000; the file has \d+ tokens"),
    ],
)
def test_what_would_give_wrong_ids_is_refused_by_name(metadata, key, value, message):
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(DataError, match=message) as caught:
        gguf_tokenizer(metadata, place="model.gguf")
    assert str(caught.value).startswith("model.gguf: ")
