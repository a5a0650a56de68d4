"""`jaxfound bench checkpoints`: the tables, the file, the exit code."""

import json

import pytest

from jaxfound.cli.main import main
from jaxfound.training.checkpoint_record import SAVE_LIMIT

SMALL = ("--state-gib", 2**-14, "--rounds", 1, "--commit", "1234567")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command: what is printed and the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    monkeypatch.setattr("jaxfound.resources.platform.source_commit", lambda: "")

    def call(*args):
        with pytest.raises(SystemExit) as left:
            main(["bench", "checkpoints", *map(str, args)])
        return capsys.readouterr().out, left.value.code or 0

    return call


def test_saves_are_timed_beside_plain_ones_and_the_verdict_is_the_exit_code(bench, tmp_path):
    out = tmp_path / "new" / "checkpoints.json"
    text, code = bench("--only", "saves", *SMALL, "--folder", tmp_path, "--out", out)
    record = json.loads(out.read_text("utf-8"))
    saves = record["saves"]
    assert (record["format_version"], saves["commit"]) == (1, "1234567")
    assert saves["state"] == {
        "bytes": 2**16 * 2,
        "leaves": 32,
        "leaf": [1, 1024],
        "dtype": "float32",
    }
    medians = {name: times["blocked_s"]["median"] for name, times in saves["savers"].items()}
    ours = medians.pop("jaxfound")
    assert saves["share"] == pytest.approx(ours / min(medians.values()))
    assert saves["is_kept"] == (saves["share"] < SAVE_LIMIT)
    assert code == (0 if saves["is_kept"] else 1)
    assert f"blocked {saves['share']:.1%} of a plain save" in text
    # What was saved is gone.
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.multiprocess
def test_steps_are_timed_beside_uploads_and_the_other_measurement_stays(bench, tmp_path):
    out = tmp_path / "checkpoints.json"
    out.write_text(json.dumps({"saves": {"commit": "older"}}))
    sizes = ("--steps", 8, "--every", 8, "--step-ms", 5)
    text, code = bench("--only", "steps", *SMALL, *sizes, "--out", out)
    record = json.loads(out.read_text("utf-8"))
    steps = record["steps"]
    assert record["saves"] == {"commit": "older"}
    # A direct save takes 8.4 steps of 5 ms or more.
    due_s = steps["state"]["bytes"] / steps["rate_bps"]
    assert steps["direct"]["longest_s"] > due_s > 1.04 * 8 * 0.005
    assert steps["median_ratio"] == pytest.approx(
        steps["tiers"][0]["median_s"] / steps["none"][0]["median_s"]
    )
    worst = max(steps["median_ratio"], steps["p99_ratio"])
    assert steps["is_kept"] == (worst <= steps["limit"] and not steps["skipped"])
    assert code == (0 if steps["is_kept"] else 1)
    assert f"p99 {steps['p99_ratio'] - 1:+.1%}" in text
