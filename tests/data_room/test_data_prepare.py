"""Prepared data is published whole, found again, made anew when damaged, and never mixed up."""

import json
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxfound.config.train import DataConfig
from jaxfound.data import ByteTokenizer, DataError, TokenizerFile, open_prepared, prepare
from jaxfound.data import source as source_module
from jaxfound.data.publish import STALE_S, publish, workspace
from jaxfound.data.source import CORPORA, check_corpus, find_files

TEXTS = [f"document {i} says {'word ' * (i % 9)}" for i in range(40)]


def modified(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_preparing_again_changes_nothing_and_returns_the_same(prepared_from):
    first = prepared_from(TEXTS, eval_fraction=0.2)
    before = modified(first.path.parent)
    second = prepared_from(TEXTS, eval_fraction=0.2)
    assert second.path == first.path
    assert second.manifest == first.manifest
    assert modified(first.path.parent) == before


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 32},
        {"packing": "padded"},
        {"eval_fraction": 0.3},
        {"on_bad_record": "skip"},
        {"source": [*TEXTS, "one more"]},
        {"source": TEXTS[::-1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_the_bins_gives_them_another_folder(prepared_from, change):
    first = prepared_from(TEXTS, eval_fraction=0.2)
    second = prepared_from(**{"source": TEXTS, "eval_fraction": 0.2, **change})
    assert second.path != first.path
    assert open_prepared(first.path).manifest == first.manifest


def test_the_place_of_the_text_does_not_decide_the_bins(prepared_from, tmp_path):
    first = prepared_from(TEXTS)
    moved = (tmp_path / "texts.jsonl").rename(tmp_path / "moved.jsonl")
    assert prepared_from(moved).path == first.path


def test_the_manifest_counts_what_the_arrays_hold(prepared_from):
    prepared = prepared_from(TEXTS, eval_fraction=0.25, seq_len=16)
    manifest = prepared.manifest
    assert (manifest.train.documents, manifest.eval.documents) == (30, 10)
    for counts, bins in ((manifest.train, prepared.train), (manifest.eval, prepared.eval)):
        assert (counts.bins, counts.slots) == (bins.num_bins, bins.tokens.size)
        assert counts.tokens == np.count_nonzero(bins.segment_ids)
        assert counts.pieces == len(bins.piece_documents)
        assert counts.padding_share == 1 - counts.tokens / bins.tokens.size
    seen = {d for bins in (prepared.train, prepared.eval) for d in bins.piece_documents.tolist()}
    assert seen == set(range(40))
    assert manifest.tokenizer_fingerprint == ByteTokenizer.fingerprint
    assert prepared.place(3).endswith("texts.jsonl:4")


def test_no_eval_split_exists_when_nothing_is_held_out(prepared_from):
    prepared = prepared_from(TEXTS)
    assert prepared.eval is None
    assert prepared.manifest.train.documents == 40


def test_too_few_documents_to_hold_one_out_is_refused_with_the_way_out(prepared_from):
    with pytest.raises(DataError, match=r"texts.jsonl has 1 usable document.*eval_fraction=0$"):
        prepared_from(["only one"], eval_fraction=0.05)


def test_large_vocabularies_are_stored_in_four_bytes(prepared_from, tmp_path):
    vocab = {"</s>": 0, "word": 70_000, "<unk>": 2}
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json")
    bins = prepared_from(["word"], tokenizer=tokenizer, seq_len=4).train
    assert bins.tokens.dtype == np.uint32
    assert bins.targets[0].tolist() == [70_000, 0, 0, 0]
    assert prepared_from(["word"], seq_len=4).train.tokens.dtype == np.uint16


def test_text_that_a_tokenizer_cannot_encode_follows_the_policy(prepared_from, tmp_path):
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"texts.jsonl:2: not encodable: .*'</s>'"):
        prepared_from(["a", "a</s>"], tokenizer=tokenizer)
    prepared = prepared_from(["a", "a</s>"], tokenizer=tokenizer, on_bad_record="skip")
    assert prepared.manifest.dropped["not encodable"].count == 1


DAMAGE = {
    "a truncated array": lambda p: os.truncate(p / "train" / "tokens.npy", 200),
    "a missing array": lambda p: (p / "train" / "targets.npy").unlink(),
    "a flipped byte": lambda p: flip(p / "train" / "segment_ids.npy"),
    "a damaged manifest": lambda p: (p / "manifest.json").write_text('{"format_version": 1'),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "another version": lambda p: (p / "manifest.json").write_text('{"format_version": 99}'),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_bins_are_refused_by_name_and_made_anew(prepared_from, damage, caplog):
    prepared = prepared_from(TEXTS)
    DAMAGE[damage](prepared.path)
    with pytest.raises(DataError, match=str(prepared.path)):
        open_prepared(prepared.path)
    again = prepared_from(TEXTS)
    assert again.manifest == prepared.manifest
    assert "data.damaged" in caplog.text
    assert [p.name for p in prepared.path.parent.iterdir()] == [prepared.path.name]


def test_a_failed_preparation_leaves_nothing_behind(prepared_from, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    with pytest.raises(DataError):
        prepared_from(tmp_path / "bad.jsonl")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_with_the_way_out(prepared_from, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write prepared data.*set data\.prepared_dir"):
        prepared_from(TEXTS, prepared_dir=str(tmp_path / "file" / "inside"))


def test_what_a_killed_preparation_left_is_removed_when_it_is_old(tmp_path):
    old, new = tmp_path / ".making-a-1", tmp_path / ".making-b-2"
    for folder in (old, new):
        folder.mkdir()
    past = time.time() - STALE_S - 60
    os.utime(old, (past, past))
    with workspace(tmp_path / "final"):
        pass
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("is_whole", [True, False])
def test_publishing_over_a_folder_keeps_a_good_one_and_replaces_a_bad_one(tmp_path, is_whole):
    final = tmp_path / "final"
    final.mkdir()
    (final / "who").write_text("first")
    with workspace(final) as work:
        (work / "who").write_text("second")
        publish(work, final, is_whole=lambda path: is_whole)
    assert (final / "who").read_text() == ("first" if is_whole else "second")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


PREPARE_IN_A_PROCESS = """
import sys
from jaxfound.config.train import DataConfig
from jaxfound.data import ByteTokenizer, prepare
cfg = DataConfig(source=sys.argv[1], prepared_dir=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(prepare(cfg, seq_len=32, tokenizer=ByteTokenizer()).manifest.to_json())
"""


@pytest.mark.multiprocess
def test_processes_that_prepare_at_one_time_all_get_the_same(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS * 20))
    command = [sys.executable, "-c", PREPARE_IN_A_PROCESS, str(path), str(tmp_path / "prepared")]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    # Imports take longest: all wait until the last has done with them.
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 3
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert answers[0]
    assert len(set(answers)) == 1
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_the_embedded_corpus_is_the_recorded_text():
    check_corpus("pydocs")
    text = lzma.decompress(CORPORA["pydocs"].path.read_bytes()).decode()
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == 7157
    assert [r["id"] for r in records] == sorted(r["id"] for r in records)
    assert len({r["text"] for r in records}) == 7157
    assert sum(len(r["text"].encode()) for r in records) == 1_976_257


def test_the_corpus_comes_with_its_licence_and_its_origin():
    folder = CORPORA["pydocs"].path.parent
    licence = (folder / "LICENSE-PSF.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    readme = (folder / "README.md").read_text()
    assert CORPORA["pydocs"].sha256 in readme
    assert "CPython 3.12.1" in readme


def test_a_changed_corpus_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "pydocs.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"text": "other"}\n'))
    changed = source_module.Corpus(path, CORPORA["pydocs"].sha256)
    monkeypatch.setitem(CORPORA, "pydocs", changed)
    with pytest.raises(DataError, match="SHA-256"):
        find_files("pydocs")


def test_the_corpus_prepares_with_the_default_config(tmp_path):
    cfg = DataConfig(prepared_dir=str(tmp_path))
    prepared = prepare(cfg, seq_len=128, tokenizer=ByteTokenizer())
    manifest = prepared.manifest
    assert manifest.train.documents + manifest.eval.documents == 7157
    assert manifest.eval.documents == round(0.05 * 7157)
    assert manifest.train.padding_share < 0.01
    assert manifest.dropped == {}
    assert Path(prepared.path).parent == tmp_path
