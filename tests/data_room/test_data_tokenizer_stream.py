"""Text in pieces: the sum is the whole, no character is sent before it is complete."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxfound.data import ByteTokenizer, TokenizerFile
from jaxfound.data.text_stream import TextStream

S22 = Path(__file__).resolve().parents[1] / "data" / "tokenizers" / "S22"
SCRIPTS = json.loads((S22 / "expected.json").read_text("utf-8"))


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_fallback(path):
    """Words with ▁ for the blank, one token a byte for what has no word; drops the first blank."""
    words = ["▁the", "▁cat", "s", "▁", "</s>"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return TokenizerFile(path / "tokenizer.json")


@pytest.fixture(scope="module")
def blanks(tmp_path_factory):
    return byte_fallback(tmp_path_factory.mktemp("blanks"))


@pytest.fixture(scope="module")
def bpe():
    return TokenizerFile(S22 / "tokenizer.json")


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["prompt"] for script in SCRIPTS])
def test_after_each_id_exactly_the_safe_text_is_out(bpe, script):
    found = pieces(bpe, script["ids"])
    sent = ["".join(found[: n + 1]) for n in range(len(script["ids"]))]
    assert sent == script["longest_safe_prefix_after_each_token"]
    assert "".join(found) == script["text"] == bpe.decode(script["ids"])
    assert not any("\ufffd" in piece for piece in found[:-1])


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_of_whole_text_are_the_text_and_never_a_cut_character(text):
    tokenizer = ByteTokenizer()
    found = pieces(tokenizer, tokenizer.encode(text).tolist())
    assert "".join(found) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_pieces_of_any_bytes_are_what_they_decode_to_at_once(ids):
    tokenizer = ByteTokenizer()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_pieces_of_any_bpe_ids_are_what_they_decode_to_at_once(bpe, ids):
    assert "".join(pieces(bpe, ids)) == bpe.decode(ids)


def test_the_blank_that_a_decoder_drops_is_dropped_once(blanks):
    the, cat, s, end = 256, 257, 258, 260
    ids = [the, cat, end, cat, s, end, end, the]
    assert "".join(pieces(blanks, ids)) == blanks.decode(ids) == "the cat cats the"


def test_a_byte_that_spoils_its_whole_run_takes_nothing_back(blanks):
    # This decoder shows every byte of a run as U+FFFD while its last character is cut.
    ids = list("日本".encode())
    assert pieces(blanks, ids) == ["", "", "日", "", "", "本", ""]
    assert pieces(blanks, ids[:5]) == ["", "", "日", "", "", "\ufffd\ufffd"]


def test_a_stream_looks_back_only_a_few_ids(bpe):
    longest = []

    class Watched(ByteTokenizer):
        def decode(self, ids):
            longest.append(len(ids))
            return super().decode(ids)

    text = "é日🙂a" * 50
    assert "".join(pieces(Watched(), list(text.encode()))) == text
    assert max(longest) <= 8
