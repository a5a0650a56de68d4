import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.resources.metrics import MetricsWriter, read_metrics, repair


def write_steps(path, steps, *, resumed_from=None, **fields):
    with MetricsWriter(path, clock=lambda: 12.5) as writer:
        if resumed_from is not None:
            writer.write("resume", step=resumed_from)
        for step in steps:
            writer.write("train", step=step, **fields)


def test_every_record_is_one_json_object_with_event_step_and_time(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, [1], loss=2.5, note="é\n")
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text()) == {
        "event": "train",
        "step": 1,
        "time_s": 12.5,
        "loss": 2.5,
        "note": "é\n",
    }


def test_a_record_is_in_the_file_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write("train", step=1)
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [1]
    writer.close()
    writer.close()


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
@pytest.mark.parametrize("kind", [float, np.float32])
def test_a_number_that_json_has_no_word_for_is_valid_json_and_comes_back(
    tmp_path, value, word, kind
):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1], loss=kind(value), parts={"list": [kind(value)]})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["loss"] == word
    (record,) = read_metrics(path)
    assert str(record["loss"]) == str(record["parts"]["list"][0]) == str(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True), ((1, None), [1, None])],
)
def test_host_scalars_are_written_as_plain_values(tmp_path, value, plain):
    write_steps(tmp_path / "m.jsonl", [1], value=value)
    (record,) = read_metrics(tmp_path / "m.jsonl")
    assert record["value"] == plain


@pytest.mark.parametrize("value", [jnp.float32(1), object(), b"bytes"])
def test_a_value_that_is_no_plain_data_is_refused_and_leaves_no_half_line(tmp_path, value):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer, pytest.raises(TypeError, match="line of JSON"):
        writer.write("train", step=1, loss=value)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", ['{"event": "tr', '{"event": "train", "step": 3}', "\0" * 5000])
def test_a_torn_last_line_is_passed_over_and_removed_on_open(tmp_path, torn, caplog):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1, 2])
    with path.open("a") as file:
        file.write(torn)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_steps(path, [3, 4])
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    assert [(r.message, r.bytes) for r in caplog.records] == [("metrics.torn_line", len(torn))]


@pytest.mark.parametrize(
    ("content", "left"),
    [("", 0), ("a\n", 2), ("a", 0), ("a\n" + "b" * 200_000, 2), ("b" * 200_000, 0)],
)
def test_repair_keeps_whole_lines_of_any_length(tmp_path, content, left):
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    assert repair(path) == len(content) - left
    assert path.read_text() == content[:left]


def test_records_that_a_resume_repeats_are_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1, 2, 3, 4], loss=1.0)
    write_steps(path, [3, 4, 5, 6], resumed_from=2, loss=2.0)
    write_steps(path, [6, 7], resumed_from=5, loss=3.0)
    train = [r for r in read_metrics(path) if r["event"] == "train"]
    assert [(r["step"], r["loss"]) for r in train] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
        (6, 3.0),
        (7, 3.0),
    ]
    marked = list(read_metrics(path, superseded="mark"))
    assert len(marked) == 12
    assert [r["step"] for r in marked if r["superseded"]] == [3, 4, 6]


def test_a_resume_from_the_start_supersedes_everything_before_it(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1, 2, 3])
    write_steps(path, [1], resumed_from=0)
    assert [(r["event"], r["step"]) for r in read_metrics(path)] == [("resume", 0), ("train", 1)]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"step": 1}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1])
    with path.open("a") as file:
        file.write(line + "\n")
    write_steps(path, [2])
    with pytest.raises(ValueError, match=r"m\.jsonl:2 is not"):
        list(read_metrics(path))
