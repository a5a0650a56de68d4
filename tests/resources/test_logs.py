import json
import logging

import pytest

from jaxfound.resources.logs import StderrHandler, configure_logging

pytestmark = pytest.mark.usefixtures("handlers_as_before")


LOG = logging.getLogger("jaxfound.resources.test")


def test_people_see_the_event_and_its_fields_on_one_line(capsys):
    configure_logging("INFO")
    LOG.info("checkpoint.saved", extra={"step": 4, "total_s": 0.123456, "dir": "a b"})
    line = capsys.readouterr().err
    assert line.endswith("INFO checkpoint.saved step=4 total_s=0.1235 dir='a b'\n")
    assert line.count("\n") == 1


def test_the_json_file_has_one_object_a_record_with_all_digits(tmp_path, capsys):
    path = tmp_path / "logs" / "run.jsonl"
    configure_logging("INFO", json_path=path)
    LOG.warning("a.b", extra={"loss": float("nan"), "x": 0.123456789, "where": tmp_path})
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        LOG.exception("it.failed")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.pop("time_s") > 0
    assert first == {
        "level": "WARNING",
        "logger": "jaxfound.resources.test",
        "event": "a.b",
        "loss": "NaN",
        "x": 0.123456789,
        "where": str(tmp_path),
    }
    assert "ZeroDivisionError" in second["exception"]


def test_the_level_hides_what_is_below_it(capsys):
    configure_logging("WARNING")
    LOG.info("quiet")
    LOG.warning("loud")
    assert "quiet" not in (said := capsys.readouterr().err)
    assert "loud" in said


def test_a_second_call_replaces_the_first_and_keeps_the_handlers_of_others(tmp_path, capsys):
    before = logging.getLogger().handlers[:]
    configure_logging("INFO", json_path=tmp_path / "a.jsonl")
    configure_logging("INFO", json_path=tmp_path / "b.jsonl")
    LOG.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert not (tmp_path / "a.jsonl").exists()
    assert (tmp_path / "b.jsonl").read_text().count("once") == 1
    assert logging.getLogger().handlers[: len(before)] == before


def test_other_packages_are_heard_from_warning_up(capsys):
    configure_logging("DEBUG")
    logging.getLogger("absl").info("chatter")
    logging.getLogger("absl").warning("trouble")
    said = capsys.readouterr().err
    assert "chatter" not in said
    assert "trouble" in said


def test_importing_puts_up_no_handler():
    assert not any(isinstance(h, StderrHandler) for h in logging.getLogger().handlers)


def test_a_word_that_is_no_level_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("LOUD")
