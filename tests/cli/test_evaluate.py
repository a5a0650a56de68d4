"""`jaxfound evaluate`: what it prints and writes, when it exits with 1, what it refuses."""

import json
import math
import re
from dataclasses import replace

import pytest

from jaxfound.cli.evaluate import finite, gate_line, precision_of
from jaxfound.cli.main import main
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.schema import ConfigError
from jaxfound.models.build import Frame
from jaxfound.training.gap import Gap, name_of
from tests.training.written import (
    STEP,
    config,
    save_run,
    weights,
    with_outlier,
    write_texts,
    written_by,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs `sound` and `spoilt`, and a text that they would write."""
    folder = tmp_path_factory.mktemp("evaluate")
    cfg = config(folder)
    frame = Frame(cfg.model)
    arrays = weights(frame)
    write_texts(folder / "text.jsonl", written_by(frame, arrays))
    write_texts(folder / "empty.jsonl", [" "])
    save_run(config(folder, "name=sound"), arrays)
    save_run(config(folder, "name=spoilt"), with_outlier(arrays))
    return folder


@pytest.fixture
def evaluate(folder, monkeypatch, capsys):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    monkeypatch.chdir(folder)

    def run(*args):
        """The exit code, and what was printed."""
        with pytest.raises(SystemExit) as left:
            main(["evaluate", *map(str, args)])
        printed = capsys.readouterr()
        return left.value.code, printed.out + printed.err

    return run


def test_two_precisions_are_printed_written_and_passed(evaluate, folder):
    code, said = evaluate(
        "runs/sound", "--data", "text.jsonl", "--versus", "bfloat16", "--max-drop", 0.01,
        "--out", "new/found.json",
    )  # fmt: skip
    assert code == 0, said
    assert f"step {STEP}: 768 tokens of 48 documents, 720 bytes" in said
    assert "gate passed: the interval ends at +" in said
    assert "(bootstrap over 48 documents)" in said
    found = json.loads((folder / "new" / "found.json").read_text())
    assert (found["format_version"], found["model"], found["data"]) == (
        1, "runs/sound", "text.jsonl",
    )  # fmt: skip
    a, b, gap = found["a"], found["b"], found["gap"]
    assert (a["precision"], b["precision"]) == ("float32", "bfloat16")
    assert f"{a['loss']:.5f}" in said
    assert a["perplexity"] == pytest.approx(math.exp(a["loss"]))
    assert a["bits_per_byte"] == pytest.approx(a["loss"] * 768 / 720 / math.log(2))
    assert gap["loss_increase"] == pytest.approx(b["loss"] - a["loss"])
    assert gap["low"] < gap["loss_increase"] < gap["high"] < 0.01
    assert f"{gap['agreement']:.3%}" in said
    assert found["gate"] == {"max_drop": 0.01, "verdict": "passed"}


def test_damage_exits_with_1_and_is_written_all_the_same(evaluate, folder):
    args = ("--data", "text.jsonl", "--versus", "fp8", "--max-drop", 0.5, "--out", "bad.json")
    code, said = evaluate("runs/spoilt", *args)
    assert code == 1, said
    assert "gate FAILED: the interval begins at +" in said
    assert json.loads((folder / "bad.json").read_text())["gate"]["verdict"] == "worse"


def test_one_precision_alone_reads_as_much_as_it_was_told_to(evaluate, folder):
    code, said = evaluate(
        "runs/sound", "--data", "text.jsonl", "--precision", "bfloat16,layers.mixer.*=float32",
        "--tokens", 31, "--seq-len", 8, "--out", "one.json", "train.batch_size=4",
    )  # fmt: skip
    assert code == 0, said
    found = json.loads((folder / "one.json").read_text())
    assert found["a"]["precision"] == "bfloat16,layers.mixer.*=float32"
    assert (found["b"], found["gap"], found["gate"]) == (None, None, None)
    assert [found[f"num_{key}"] for key in ("documents", "bytes", "tokens", "pieces")] == [
        3, 45, 48, 6,
    ]  # fmt: skip
    assert "KL" not in said


DATA = ("--data", "text.jsonl")
REFUSED = {
    # Named although there is no such run: formats come first.
    "format": (
        ("runs/nowhere", *DATA, "--precision", "bfloat8"),
        "'bfloat8' is no format. Did you",
    ),
    "format of b": (("runs/nowhere", *DATA, "--versus", "int4"), "--versus=int4: 'int4' is no"),
    "format of a rule": (("runs/nowhere", *DATA, "--versus", "fp8,a.*=fp4"), "'fp4' is no format"),
    "rule": (("runs/sound", *DATA, "--versus", "bfloat16,layers.mixr.*=fp8"), "'layers.mixr.*'"),
    "no second": (("runs/sound", *DATA, "--max-drop", "1"), "name the second with --versus"),
    "no run": (("runs/nowhere", *DATA), "runs/nowhere is not a run"),
    "no checkpoint": (("runs/sound", *DATA, "--step", "9"), "no committed step 9"),
    "no data": (("runs/sound", "--data", "none.jsonl"), "'none.jsonl' names nothing"),
    "no document": (("runs/sound", "--data", "empty.jsonl"), "no usable document in empty.jsonl"),
    "too long": (("runs/sound", *DATA, "--seq-len", "65"), "model.max_positions=64"),
    "override": (("runs/sound", *DATA, "train.seq_lem=8"), "train.seq_len"),
}


@pytest.mark.parametrize(("args", "says"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_measured_is_one_error(evaluate, args, says):
    code, said = evaluate(*args)
    assert (code, says in said) == (2, True), said
    # Warnings may stand before it.
    assert len(re.findall(r"^error: ", said, re.MULTILINE)) == 1


def rules(*pairs):
    return tuple(PrecisionRule(pattern=p, format=f) for p, f in pairs)


PRECISIONS = {
    "float32": PrecisionConfig(compute="float32"),
    "compute=bfloat16": PrecisionConfig(compute="bfloat16"),
    "fp8": PrecisionConfig(rules=rules(("*", "fp8"))),
    "fp8, *.mixer.out=bfloat16": PrecisionConfig(
        rules=rules(("*.mixer.out", "bfloat16"), ("*", "fp8"))
    ),
    "float32,a.*=fp8,*.b=bfloat16": PrecisionConfig(
        compute="float32", rules=rules(("a.*", "fp8"), ("*.b", "bfloat16"))
    ),
}


@pytest.mark.parametrize(("text", "means"), PRECISIONS.items())
def test_a_list_is_a_format_for_the_rest_and_rules_in_their_order(text, means):
    assert precision_of(text, option="--precision") == means
    assert precision_of(name_of(means), option="--precision") == means


def test_a_list_without_rules_is_refused():
    with pytest.raises(ConfigError, match=r"'layers' is no rule. A list is FORMAT,PATTERN=FORMAT"):
        precision_of("bfloat16,layers", option="--precision")


GAP = Gap(0.0, 0.001, 0.02, "documents", 30, 1.0, 0.0, 0.0, 0, 0.0, ())


def test_a_gate_says_why_it_failed():
    unsure = gate_line(GAP, 0.01, verdict=GAP.verdict(0.01))
    assert "ends at +2.00e-02, beyond 0.01" in unsure
    assert "more text" in unsure
    broken = replace(GAP, low=math.nan, high=math.nan)
    assert "not a number" in gate_line(broken, 0.01, verdict=broken.verdict(0.01))


def test_what_json_cannot_hold_becomes_null():
    assert finite({"a": [math.inf, 1.5], "b": {"c": math.nan, "d": "x"}}) == {
        "a": [None, 1.5],
        "b": {"c": None, "d": "x"},
    }
