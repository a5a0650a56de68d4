"""Logs of many processes become one, in the order in which things happened."""

import json
import logging

import pytest

from jaxfound.cli.main import main
from jaxfound.resources.collect import collect, next_attempt, since
from jaxfound.resources.logs import FULL_FILES, configure_logging
from jaxfound.resources.run_directory import RunDirectory


def write(run, process, *records, attempt=0, suffix="", torn=""):
    path = RunDirectory(run).logs(attempt) / f"process-{process}.jsonl{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def said(at, event, **fields):
    return {"time_s": at, "level": "INFO", "logger": "jaxfound", "event": event, **fields}


def events(found):
    return [line.record["event"] for line in found.lines]


def test_records_are_in_the_order_of_the_first_process_clock(tmp_path):
    write(tmp_path, 0, said(100, "a"), said(103, "d"))
    # This clock is 50 s ahead; what it wrote before it was measured is corrected as well.
    write(
        tmp_path,
        1,
        said(151, "b"),
        said(152, "clock.offset", offset_s=-50, error_s=0.001),
        said(154, "e"),
    )
    found = collect([tmp_path])
    assert events(found) == ["a", "b", "clock.offset", "d", "e"]
    assert [line.at_s for line in found.lines] == [100, 101, 102, 103, 104]
    assert [line.process for line in found.lines] == [0, 1, 1, 0, 1]
    assert events(collect([tmp_path], since_s=102.5)) == ["d", "e"]


def test_a_clock_that_was_measured_again_is_corrected_from_then_on(tmp_path):
    offset = [said(t, "clock.offset", offset_s=o, error_s=0) for t, o in ((10, 1), (20, -5))]
    write(tmp_path, 1, offset[0], said(11, "a"), offset[1], said(21, "b"))
    assert [line.at_s for line in collect([tmp_path]).lines] == [11, 12, 15, 16]


def test_a_line_that_a_kill_cut_short_is_left_out_and_told(tmp_path):
    write(tmp_path, 0, said(1, "a"), torn='{"time_s": 2, "ev')
    write(tmp_path, 0, said(3, "b"), attempt=1)
    found = collect([tmp_path])
    assert events(found) == ["a", "b"]
    assert [(line.attempt, line.process) for line in found.lines] == [(0, 0), (1, 0)]
    assert list(found.torn.values()) == [1]


def test_folders_of_several_hosts_are_one_run(tmp_path):
    write(tmp_path / "one", 0, said(1, "a"), said(3, "c"))
    write(tmp_path / "two", 1, said(2, "b"))
    assert events(collect([tmp_path / "one", tmp_path / "two"])) == ["a", "b", "c"]


def test_a_log_keeps_its_newest_records_within_its_size(tmp_path, handlers_as_before):
    path = RunDirectory(tmp_path).logs(0) / "process-0.jsonl"
    configure_logging("WARNING", json_path=path, json_level="INFO", max_bytes=2000)
    log = logging.getLogger("jaxfound.test")
    for number in range(200):
        log.info("event", extra={"number": number})
    kept = sorted(path.parent.iterdir())
    assert len(kept) == FULL_FILES + 1
    assert all(file.stat().st_size <= 2000 for file in kept)
    numbers = [line.record["number"] for line in collect([tmp_path]).lines]
    assert numbers == list(range(numbers[0], 200)), "older files come first, nothing is lost"
    assert numbers[0] > 0


def test_people_see_warnings_and_the_file_has_all(tmp_path, handlers_as_before, capsys):
    path = tmp_path / "log.jsonl"
    configure_logging("WARNING", json_path=path, json_level="INFO")
    logging.getLogger("jaxfound.test").info("quiet")
    logging.getLogger("jaxfound.test").warning("loud")
    assert "quiet" not in (shown := capsys.readouterr().err)
    assert "loud" in shown
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 910), ("10m", 400), ("0.25h", 100), ("123.5", 123.5)]
)
def test_a_time_is_so_long_ago_or_a_moment(text, seconds):
    assert since(text, now_s=1000) == seconds


def test_a_text_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="neither a time ago"):
        since("yesterday", now_s=0)


def test_attempts_are_numbered_on(tmp_path):
    assert next_attempt(tmp_path / "logs") == 0
    for name in ("attempt-0", "attempt-10", "attempt-x"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert next_attempt(tmp_path / "logs") == 11


def test_the_command_prints_a_line_a_record(tmp_path, capsys, monkeypatch):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    write(tmp_path, 0, said(0.5, "checkpoint.saved", step=4), torn="{")
    with pytest.raises(SystemExit) as ended:
        main(["logs", "collect", str(tmp_path)])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.out == "00:00:00.500 0/0 INFO checkpoint.saved step=4\n"
    assert "1 torn lines" in shown.err
    with pytest.raises(SystemExit) as ended:
        main(["logs", "collect", str(tmp_path / "none")])
    assert ended.value.code == 2
