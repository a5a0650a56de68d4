"""`jaxfound bench ledger`: the table, the file, the exit codes."""

import json
from pathlib import Path

import pytest

from jaxfound.cli.main import main

RECORD = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "ledger.json"
CASE = "dense, remat none"


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command: what is printed, what is complained of, the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)

    def call(*args):
        with pytest.raises(SystemExit) as left:
            main(["bench", "ledger", *map(str, args)])
        printed = capsys.readouterr()
        return printed.out, printed.err, left.value.code or 0

    return call


def test_a_record_is_compared_again_without_a_compiler(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.platform.source_commit", lambda: "")
    out = tmp_path / "new" / "ledger.json"
    asked = ("--recorded", RECORD, "--cases", CASE, "--commit", "1234567", "--out", out)
    text, _, code = bench(*asked)
    assert code == 0
    (row,) = json.loads(out.read_text("utf-8"))["rows"]
    assert f"{CASE}: plan {row['error']:+.1%}" in text
    assert f"{row['compiled']['total'] / 1e9:.2f}" in text
    assert json.loads(out.read_text("utf-8"))["commit"] == "1234567"
    assert row["case"]["topology"] == "1:h200"


def test_rows_that_are_not_asked_for_stay(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.platform.source_commit", lambda: "")
    out = tmp_path / "ledger.json"
    before = json.loads(RECORD.read_text("utf-8"))
    out.write_text(json.dumps(before))
    asked = ("--recorded", RECORD, "--cases", CASE, "--out", out)
    assert bench(*asked, "--commit", "1234567")[2] == 0
    after = json.loads(out.read_text("utf-8"))
    assert [row["name"] for row in after["rows"]] == [row["name"] for row in before["rows"]]
    for row, old in zip(after["rows"], before["rows"], strict=True):
        made = "1234567" if row["name"] == CASE else old.get("commit", before["commit"])
        assert row == {**old, "commit": made}
    out.write_text(json.dumps({**before, "jaxlib": "0.1"}))
    _, err, code = bench(*asked)
    assert code == 2
    assert "more rows, of jaxlib 0.1" in err
    assert json.loads(out.read_text("utf-8"))["jaxlib"] == "0.1"


def test_a_ledger_that_is_off_by_too_much_ends_with_one(bench, tmp_path):
    record = json.loads(RECORD.read_text("utf-8"))
    (row,) = [row for row in record["rows"] if row["name"] == CASE]
    row["compiled"]["total"] *= 2
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({**record, "rows": [row]}))
    text, _, code = bench("--recorded", path)
    assert code == 1
    assert "wrong" in text


def test_an_unknown_case_is_one_line_and_exit_2(bench):
    out, err, code = bench("--cases", "fsdp 9")
    assert (out, code) == ("", 2)
    assert err.startswith("error: no case is called 'fsdp 9'")
