"""No token is lost, none is doubled, and no segment holds two documents."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.data import ByteTokenizer
from jaxfound.data.loader import positions_of
from jaxfound.data.packing import FEW_BINS, LIMIT_COST, assign, choose_held_out, cut
from jaxfound.data.writer import write_split

BOS, EOS, PAD = 256, 257, 258
S26 = Path(__file__).parent.parent / "data" / "S26"

texts = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12)


def whole(text):
    return [BOS, *text, EOS]


def write(folder, contents, *, seq_len, packing):
    """Write the split that `contents` (bytes each) come to; return its arrays and counts."""
    documents = [whole(text) for text in contents]
    lengths = np.array([len(d) for d in documents])
    pieces = cut(lengths, documents=np.arange(len(documents)), seq_len=seq_len)
    counts = write_split(
        folder,
        pieces=pieces,
        bin_of_piece=assign(pieces.length, seq_len=seq_len, packing=packing),
        tokens=np.concatenate(documents).astype(np.uint16),
        lengths=lengths,
        seq_len=seq_len,
        pad_id=PAD,
    )
    arrays = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    return arrays, counts


@settings(max_examples=40, deadline=None)
@given(texts, st.integers(2, 24), st.sampled_from(["packed", "padded"]))
def test_every_next_token_pair_of_the_text_appears_exactly_once(contents, seq_len, packing):
    with tempfile.TemporaryDirectory() as folder:
        arrays, counts = write(Path(folder) / "s", contents, seq_len=seq_len, packing=packing)
    filled = arrays["segment_ids"] > 0
    found = Counter(zip(arrays["tokens"][filled], arrays["targets"][filled], strict=True))
    wanted = Counter(
        pair for text in contents for pair in zip(whole(text), whole(text)[1:], strict=False)
    )
    assert found == wanted
    assert counts.tokens == wanted.total()
    assert (arrays["tokens"][~filled] == PAD).all()
    assert (arrays["targets"][~filled] == PAD).all()


@settings(max_examples=40, deadline=None)
@given(texts, st.integers(2, 24), st.sampled_from(["packed", "padded"]))
def test_a_segment_is_one_stretch_of_the_document_it_names(contents, seq_len, packing):
    with tempfile.TemporaryDirectory() as folder:
        arrays, _ = write(Path(folder) / "s", contents, seq_len=seq_len, packing=packing)
    documents = [bytes_of(whole(text)) for text in contents]
    offsets = arrays["piece_offsets"]
    for row, segments in enumerate(arrays["segment_ids"]):
        named = arrays["piece_documents"][offsets[row] : offsets[row + 1]]
        assert sorted(set(segments.tolist()) - {0}) == list(range(1, len(named) + 1))
        for number, document in enumerate(named, 1):
            slots = np.flatnonzero(segments == number)
            assert (np.diff(slots) == 1).all()
            stretch = [*arrays["tokens"][row, slots], arrays["targets"][row, slots[-1]]]
            assert bytes_of(stretch) in documents[document]
            assert (arrays["targets"][row, slots[:-1]] == arrays["tokens"][row, slots[1:]]).all()


def bytes_of(ids):
    return np.asarray(ids, np.uint16).astype(">u2").tobytes()


@pytest.mark.parametrize(
    ("num_tokens", "pieces"), [(2, 1), (8, 1), (9, 1), (10, 2), (17, 2), (18, 3)]
)
def test_a_document_is_cut_only_when_its_pairs_do_not_fit(num_tokens, pieces):
    found = cut(np.array([num_tokens]), documents=np.array([0]), seq_len=8)
    assert len(found.length) == pieces
    assert found.length.sum() == num_tokens - 1
    assert (found.start[1:] == found.start[:-1] + found.length[:-1]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_packing_never_overfills_and_leaves_at_most_one_bin_half_empty(lengths):
    length_P = np.array(lengths)
    bin_P = assign(length_P, seq_len=32, packing="packed")
    fill = np.bincount(bin_P, weights=length_P)
    assert fill.max() <= 32
    # Two bins that are both half empty would have been one; of many bins one may be at its limit.
    assert (fill <= 16).sum() <= 1 + (len(fill) > FEW_BINS)
    _, first = np.unique(bin_P, return_index=True)
    assert (np.diff(first) > 0).all()


def test_a_few_tiny_documents_do_not_fill_one_row_with_a_hundred():
    rng = np.random.default_rng(0)
    lengths = rng.permuted(np.concatenate([np.full(4000, 256), np.full(300, 2)]))
    free = assign(lengths, seq_len=256, packing="packed", most_pieces=len(lengths))
    limited = assign(lengths, seq_len=256, packing="packed")
    assert np.bincount(free).max() > 64
    assert np.bincount(limited).max() == 16
    assert limited.max() <= (1 + LIMIT_COST) * (free.max() + 1)
    assert np.bincount(limited, weights=lengths).max() <= 256


def test_rows_of_tiny_documents_alone_are_filled_all_the_same():
    bin_P = assign(np.full(20_000, 2), seq_len=256, packing="packed")
    assert np.bincount(bin_P).min() >= 2
    assert len(np.unique(bin_P)) == -(-20_000 // 128)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=200), st.sampled_from([3, 8, 16]))
def test_exchanges_move_pieces_and_make_no_bins(lengths, limit):
    length_P = np.array(lengths)
    free = assign(length_P, seq_len=32, packing="packed", most_pieces=len(lengths))
    limited = assign(length_P, seq_len=32, packing="packed", most_pieces=limit)
    assert len(limited) == len(lengths)
    assert np.bincount(limited).max() <= limit
    assert np.bincount(limited, weights=length_P).max() <= 32
    if np.bincount(free).max() <= limit:
        assert (limited == free).all()


def test_rows_of_a_text_hold_hardly_more_documents_than_on_average():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 1.5, 6000).astype(int) + 2, 4096)
    free = assign(lengths, seq_len=4096, packing="packed", most_pieces=len(lengths))
    limited = assign(lengths, seq_len=4096, packing="packed")
    assert np.bincount(free).max() > 200
    # Eleven on average, and not one row more.
    assert np.bincount(limited).max() <= 32
    assert limited.max() == free.max()


def test_rows_of_more_than_attention_ever_has_places_for_may_cost_some_padding():
    lengths = np.full(6000, 15)
    free = assign(lengths, seq_len=1024, packing="packed", most_pieces=len(lengths))
    limited = assign(lengths, seq_len=1024, packing="packed")
    assert np.bincount(free).max() == 68
    assert np.bincount(limited).max() <= 64
    assert limited.max() + 1 <= 1.1 * (free.max() + 1)
    assert np.bincount(limited, weights=lengths).max() <= 1024


def test_a_limit_that_is_given_holds_whatever_it_costs():
    bin_P = assign(np.full(9, 2), seq_len=256, packing="packed", most_pieces=4)
    assert np.bincount(bin_P).tolist() == [4, 4, 1]


def test_padding_puts_one_piece_in_each_bin():
    assert assign(np.array([3, 1, 2]), seq_len=8, packing="padded").tolist() == [0, 1, 2]


def test_windows_of_pieces_fill_bins_of_their_own(monkeypatch):
    monkeypatch.setattr("jaxfound.data.packing.WINDOW", 3)
    found = assign(np.array([4, 4, 4, 4, 8, 4]), seq_len=8, packing="packed")
    assert found.tolist() == [0, 0, 1, 2, 3, 2]


def test_rows_written_in_chunks_equal_rows_written_at_once(tmp_path, monkeypatch):
    contents = [bytes([65 + i]) * (i % 7 + 1) for i in range(50)]
    whole_arrays, _ = write(tmp_path / "a", contents, seq_len=8, packing="packed")
    monkeypatch.setattr("jaxfound.data.writer.CHUNK_SLOTS", 24)
    chunked, _ = write(tmp_path / "b", contents, seq_len=8, packing="packed")
    for name, values in whole_arrays.items():
        np.testing.assert_array_equal(values, chunked[name], err_msg=name)


def test_a_line_of_a_hundred_thousand_characters_loses_none(prepared_from):
    bins = prepared_from(S26 / "one_long_line.jsonl", seq_len=64).train
    filled = np.asarray(bins.segment_ids) > 0
    ids = [*bins.tokens[filled].tolist(), int(bins.targets[filled][-1])]
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert ByteTokenizer().decode(ids) == "word " * 20_000


def test_positions_begin_again_in_every_segment_and_are_zero_in_padding():
    segment_ids = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    assert positions_of(segment_ids).tolist() == [[0, 1, 2, 0, 0, 1, 0, 0], list(range(8))]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("num_documents", [2, 3, 20, 1000])
def test_both_splits_get_their_share_and_at_least_one_document(fraction, num_documents):
    hashes = np.random.default_rng(0).integers(0, 2**63, num_documents, np.uint64)
    held_out = choose_held_out(hashes, fraction=fraction)
    assert held_out.sum() == min(max(1, round(fraction * num_documents)), num_documents - 1)


def test_copies_of_a_text_are_on_one_side_and_the_order_does_not_matter():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 8, 100).astype(np.uint64)
    held_out = choose_held_out(hashes, fraction=0.3)
    assert not set(hashes[held_out].tolist()) & set(hashes[~held_out].tolist())
    order = rng.permutation(100)
    assert (choose_held_out(hashes[order], fraction=0.3) == held_out[order]).all()


def test_nothing_is_held_out_of_one_text_or_of_its_copies():
    assert choose_held_out(np.array([7], np.uint64), fraction=0.5) is None
    assert choose_held_out(np.array([7, 7, 7], np.uint64), fraction=0.5) is None
    assert not choose_held_out(np.array([7], np.uint64), fraction=0.0).any()
