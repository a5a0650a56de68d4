"""Stop texts: the pieces join to what a search in the whole text gives, however it is cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.data import ByteTokenizer
from jaxfound.serving.stopping import StoppingText, beginning_of_stop, first_stop

# Few letters, so that stop texts are met, overlap and nearly complete; some of several bytes.
TEXT = st.text(alphabet="ab漢🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="ab漢🙂", min_size=1, max_size=5), max_size=4)


class PieceTokenizer(ByteTokenizer):
    """One id a piece of bytes, so that any cut of a text, also inside a character, is ids."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def pieces_of(raw, cuts):
    edges = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def by_characters(text, stop):
    """The rule in its plain form: read on until any stop text is complete."""
    for end in range(1, len(text) + 1):
        begun = [end - len(one) for one in stop if text[:end].endswith(one)]
        if begun:
            return text[: min(begun)], True
    return text, False


def shown(tokenizer, ids, stop):
    """All pieces up to the end, and whether a stop text made it."""
    there = StoppingText(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(there.push(token))
        if there.stopped:
            break
    pieces.append(there.finish())
    return pieces, there.stopped


@settings(max_examples=200, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_pieces_join_to_the_text_before_the_first_stop_however_it_is_cut(text, stop, cuts):
    there = PieceTokenizer(pieces_of(text.encode(), cuts))
    pieces, stopped = shown(there, range(len(there.pieces)), stop)
    assert ("".join(pieces), stopped) == by_characters(text, stop)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12), STOPS, st.lists(st.integers(0, 200), max_size=12))
def test_bytes_that_are_no_text_join_to_the_decoded_whole(raw, stop, cuts):
    there = PieceTokenizer(pieces_of(raw, cuts))
    pieces, stopped = shown(there, range(len(there.pieces)), stop)
    expected = by_characters(raw.decode("utf-8", errors="replace"), stop)
    assert ("".join(pieces), stopped) == expected


@settings(max_examples=200, deadline=None)
@given(TEXT, STOPS)
def test_what_is_held_is_all_that_may_begin_a_stop_text_and_no_more(text, stop):
    num = beginning_of_stop(text, stop)
    begins = {
        size
        for size in range(1, len(text) + 1)
        if any(one[:size] == text[-size:] and len(one) > size for one in stop)
    }
    assert num == max(begins, default=0)


@pytest.mark.parametrize(
    ("text", "stop", "place"),
    [
        ("river mill b", ["mill b", "ll"], 8),  # "ll" is complete first
        ("river mill", ["ill", "mill"], 6),  # complete together: the longest
        ("river", ["x"], None),
        ("river", [], None),
    ],
)
def test_the_stop_text_that_is_complete_first_wins(text, stop, place):
    assert first_stop(text, stop) == place


def test_text_that_cannot_begin_a_stop_text_is_shown_at_once():
    there = StoppingText(ByteTokenizer(), ["END"])
    assert [there.push(b) for b in b"a E!EN"] == ["a", " ", "", "E!", "", ""]
    assert there.finish() == "EN"
    assert not there.stopped


def test_nothing_follows_a_stop():
    there = StoppingText(ByteTokenizer(), ["b"])
    assert [there.push(b) for b in b"abc"] == ["a", "", ""]
    assert there.stopped
    assert there.finish() == ""
