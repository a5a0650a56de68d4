"""`jaxfound data`: what is printed about the text, and about a batch of it."""

import json

import pytest
from typer.testing import CliRunner

from jaxfound.cli.data import data_app
from jaxfound.data import DataError

TEXTS = ["alpha beta", "gamma\ndelta", "epsilon " * 6, "zeta"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command on a small config, in an empty folder, over four texts and a damaged one."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join([*lines, "{damaged", ""]))
    (tmp_path / "run.yaml").write_text(
        "preset: tiny-dense\n"
        "train: {steps: 1, batch_size: 4, seq_len: 32}\n"
        "data: {source: texts.jsonl, on_bad_record: skip, eval_fraction: 0.25}\n"
    )

    def invoke(command, *more):
        result = CliRunner().invoke(data_app, [command, "run.yaml", *more])
        if result.exception is not None:
            raise result.exception
        # What a test before this one made of logging is on stderr.
        return result.stdout

    return invoke


def row_of(output, heading):
    [line] = [line for line in output.splitlines() if line.startswith(heading)]
    return line.removeprefix(heading).split()


def test_prepare_prints_counts_and_what_was_left_out_and_where(run):
    output = run("prepare")
    assert row_of(output, "documents") == ["3", "1"]
    assert "left out: 1 (not JSON), the first at texts.jsonl:5" in output
    assert "in runs/.data/" in output
    assert run("prepare") == output


def test_prepare_takes_overrides_and_says_when_a_batch_repeats_its_rows(run):
    output = run("prepare", "data.eval_fraction=0", "train.batch_size=16")
    assert row_of(output, "documents") == ["4"]
    assert "note: a batch of 16 rows sees all 3 rows 5.33 times" in output


def test_prepare_says_when_the_model_has_too_few_ids(run):
    output = run("prepare", "model.vocab_size=200")
    assert "byte has 259 ids, model.vocab_size=200 is smaller" in output


def test_show_prints_segments_their_place_and_where_a_document_goes_on(run):
    shown = run("show", "data.eval_fraction=0", "data.order=sequential", "--rows", "3")
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "row 0"
    assert "1: slots 0-10, texts.jsonl:1" in lines
    assert "⟨bos⟩alpha beta⟨eos⟩" in lines
    assert "⟨bos⟩gamma⏎delta⟨eos⟩" in lines
    assert any(line.startswith("⟨bos⟩epsilon") and line.endswith("…") for line in lines)
    assert any(line.startswith("…") and line.endswith("⟨eos⟩") for line in lines)
    assert any(line.startswith("padding: ") for line in lines)


def test_show_prints_the_step_that_was_asked_for(run):
    keys = ("data.order=sequential", "train.batch_size=1", "data.eval_fraction=0")
    shown = [run("show", *keys, "--step", str(step)) for step in (0, 1, 3)]
    assert shown[0] != shown[1]
    assert shown[0] == shown[2], "three rows: step 3 is step 0 of the second epoch"


def test_show_prints_each_held_out_row_once(run):
    assert run("show", "--split", "eval").count("texts.jsonl:") == 1


def test_show_refuses_a_split_that_does_not_exist(run):
    with pytest.raises(DataError, match="no documents are held out"):
        run("show", "data.eval_fraction=0", "--split", "eval")
