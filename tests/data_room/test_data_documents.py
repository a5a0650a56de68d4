"""Damaged, empty and odd files: the right count of documents, or a refusal with file and line."""

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxfound.data import DataError
from jaxfound.data.documents import read_documents
from jaxfound.data.source import find_files

S26 = Path(__file__).parent.parent / "data" / "S26"

# file: documents when damaged records are skipped, what is counted, and how `refuse` answers
# (None: nothing is damaged). The counts are those of expected.json.
CASES = {
    "good.jsonl": (20, {}, None),
    "one_short.jsonl": (1, {}, None),
    "bom_crlf.jsonl": (2, {}, None),
    "no_final_newline.jsonl": (2, {}, None),
    "one_long_line.jsonl": (1, {}, None),
    "special_text.jsonl": (1, {}, None),
    "empty_docs.jsonl": (1, {"empty text": 5}, None),
    "empty.jsonl": (0, {}, None),
    "only_newlines.jsonl": (0, {}, None),
    "bad_byte_line3.jsonl": (3, {"not UTF-8": 1}, r":3: not UTF-8: byte 0xff at byte 13"),
    "truncated_last.jsonl": (2, {"not JSON": 1}, r":3: not JSON: Unterminated string"),
    "latin1.txt": (0, {"not UTF-8": 1}, r"latin1\.txt:1: not UTF-8: byte 0xe9 at byte 4"),
    "null_text.jsonl": (1, {"not text": 1}, r":1: not text: 'text' is null"),
    "number_text.jsonl": (0, {"not text": 1}, r":1: not text: 'text' is int"),
    "nul_bytes.jsonl": (1, {"NUL bytes": 1}, r":2: NUL bytes"),
}
REFUSED = {name: case[2] for name, case in CASES.items() if case[2]}


def read(*paths, on_bad_record="skip", text_field="text"):
    dropped = {}
    files = find_files(tuple(map(str, paths)))
    documents = list(
        read_documents(files, text_field=text_field, on_bad_record=on_bad_record, dropped=dropped)
    )
    return documents, {reason: found.count for reason, found in dropped.items()}


def test_the_table_covers_every_file_of_the_case():
    names = json.loads((S26 / "expected.json").read_text())["usable_documents"]
    assert set(names) == set(CASES) | {"wrong_field.jsonl"}


@pytest.mark.parametrize("name", CASES)
def test_skipping_keeps_the_usable_documents_and_counts_the_others(name):
    documents, dropped = read(S26 / name)
    assert (len(documents), dropped) == CASES[name][:2]


@pytest.mark.parametrize("name", sorted(set(CASES) - {"good.jsonl"}))
def test_a_damaged_file_beside_a_good_one_takes_nothing_from_it(name):
    documents, dropped = read(S26 / name, S26 / "good.jsonl")
    assert (len(documents), dropped) == (CASES[name][0] + 20, CASES[name][1])


@pytest.mark.parametrize("name", sorted(set(CASES) - set(REFUSED)))
def test_refusing_lets_undamaged_files_pass(name):
    documents, _ = read(S26 / name, on_bad_record="refuse")
    assert len(documents) == CASES[name][0]


@pytest.mark.parametrize("beside_good", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refusing_names_file_line_fault_and_way_out(name, beside_good):
    paths = [S26 / "good.jsonl"] * beside_good + [S26 / name]
    with pytest.raises(DataError, match=REFUSED[name]) as caught:
        read(*paths, on_bad_record="refuse")
    assert str(S26 / name) in str(caught.value)
    assert "data.on_bad_record=skip" in str(caught.value)


@pytest.mark.parametrize("policy", ["refuse", "skip"])
@pytest.mark.parametrize("beside_good", [False, True])
def test_a_wrong_field_is_refused_always_and_names_the_fields_found(policy, beside_good):
    paths = [S26 / "good.jsonl"] * beside_good + [S26 / "wrong_field.jsonl"]
    with pytest.raises(DataError, match=r"wrong_field\.jsonl:1: .*'text' .*'content'.*text_field"):
        read(*paths, on_bad_record=policy)


def test_another_field_can_hold_the_text():
    documents, _ = read(S26 / "wrong_field.jsonl", text_field="content")
    assert [d.text for d in documents] == ["x"]


@pytest.mark.parametrize("name", ["empty.jsonl", "only_newlines.jsonl", "number_text.jsonl"])
def test_a_source_without_a_usable_document_is_refused_by_name(prepared_from, name):
    with pytest.raises(DataError, match=rf"no usable document in .*{name}"):
        prepared_from(S26 / name, on_bad_record="skip")


def test_what_was_left_out_is_said_with_the_first_place(prepared_from):
    with pytest.raises(DataError, match=r"1 left out \(not UTF-8\), the first at .*latin1.txt:1"):
        prepared_from(S26 / "latin1.txt", on_bad_record="skip")


def test_one_short_document_is_said_to_be_shorter_than_a_row(prepared_from):
    prepared = prepared_from(S26 / "one_short.jsonl")
    assert prepared.manifest.train.documents == 1
    assert prepared.remarks() == [
        "the train split holds 3 tokens in 1 document(s), less than one row of seq_len=64"
    ]


def test_special_text_is_kept_as_it_was_written():
    documents, _ = read(S26 / "special_text.jsonl")
    assert documents[0].text == "before </s> after <s> <|r0|>"


def test_escaped_zero_bytes_are_text_and_raw_ones_are_not():
    documents, dropped = read(S26 / "nul_bytes.jsonl")
    assert documents[0].text == "a\x00b"
    assert dropped == {"NUL bytes": 1}


BAD_LINES = {
    "[1, 2]": "not an object",
    '"text"': "not an object",
    "5": "not an object",
    '{"text": ["a"]}': "not text",
    '{"text": true}': "not text",
    r'{"text": "\ud800"}': "half of a surrogate pair",
    "[" * 100_000: "not JSON",
    '{"text": "a"} {"text": "b"}': "Extra data",
    '{"text": ' + "1" * 5000 + "}": "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[*BAD_LINES.values()])
def test_lines_that_hold_no_text_are_refused_with_their_number(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{BAD_LINES[line]}"):
        read(path, on_bad_record="refuse")
    assert len(read(path)[0]) == 1


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "separators.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c"}\n', "utf-8")
    assert [d.text for d in read(path, on_bad_record="refuse")[0]] == ["a\u2028b\u0085c"]


def test_blank_lines_separate_the_documents_of_a_txt_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\none\r\n two\r\n\r\n \t\nthree")
    documents, _ = read(path)
    assert [(d.text, d.line) for d in documents] == [("one\n two", 2), ("three", 6)]


def test_a_bad_byte_in_a_txt_file_is_placed_on_its_own_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\nthr\xffe\n\nfour\n")
    with pytest.raises(DataError, match=r"a\.txt:4: not UTF-8: byte 0xff at byte 4"):
        read(path, on_bad_record="refuse")
    assert [d.text for d in read(path)[0]] == ["one", "four"]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gz", "xz"])
def test_compressed_files_read_the_same_and_damaged_ones_are_named(tmp_path, pack):
    path = tmp_path / f"a.jsonl.{'gz' if pack is gzip.compress else 'xz'}"
    data = pack((S26 / "good.jsonl").read_bytes())
    path.write_bytes(data)
    assert len(read(path)[0]) == 20
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl"):
        read(path)


def test_parquet_rows_are_documents(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "", "two"], "n": [1, 2, 3, 4]}), path)
    documents, dropped = read(path)
    assert [(d.text, d.line) for d in documents] == [("one", 1), ("two", 4)]
    assert dropped == {"not text": 1, "empty text": 1}
    with pytest.raises(DataError, match=r"a\.parquet:1: .*'body' .*'text', 'n'"):
        read(path, text_field="body")
    pq.write_table(pa.table({"text": pa.array([b"one", b"t\xffo"], pa.binary())}), path)
    with pytest.raises(DataError, match=r"a\.parquet:2: not UTF-8: byte 0xff at byte 2"):
        read(path, on_bad_record="refuse")
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        read(path)


def test_folders_and_patterns_give_their_files_once_and_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.jsonl", "notes.md", ".hidden.txt"):
        (tmp_path / name).write_text('{"text": "x"}')
    found = find_files((str(tmp_path / "b*"), str(tmp_path)))
    assert [f.path.name for f in found] == ["b.txt", "a.txt", "c.jsonl"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.jsonl", "names nothing: no such file"),
        ("absent*.txt", "names nothing"),
        ("pydoc", r"embedded corpora are \['pydocs'\]"),
        ((), "data.source is empty"),
    ],
)
def test_a_source_that_names_nothing_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        find_files(source)


def test_a_folder_without_text_and_a_file_of_unknown_kind_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match=r"holds no \.txt, \.jsonl, \.parquet file"):
        find_files(str(tmp_path))
    with pytest.raises(DataError, match="of no known kind"):
        find_files(str(tmp_path / "a.csv"))
