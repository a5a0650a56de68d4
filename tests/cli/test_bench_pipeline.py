"""`jaxfound bench pipeline`: the table, the file, the refusals."""

import json
import re
from contextlib import nullcontext

import pytest

from jaxfound.cli.main import main
from jaxfound.config import save
from jaxfound.training.pipeline_record import EXPLAINED
from tests.training.tiny import tiny


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny config: what is printed, what is complained of, the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    path = tmp_path / "tiny.yaml"
    save(tiny(tmp_path, "parallel.data=1"), path)

    def call(*args):
        with pytest.raises(SystemExit) as left:
            main(["bench", "pipeline", "--config", str(path), *map(str, args)])
        printed = capsys.readouterr()
        return printed.out, printed.err, left.value.code or 0

    return call


@pytest.mark.multidevice
def test_a_table_and_a_file_hold_every_layout(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.platform.source_commit", lambda: "")
    # How long the compiler takes is no test's business.
    monkeypatch.setattr("pallas_kernels.deviceless.without_cache", nullcontext)
    out = tmp_path / "new" / "pipeline.json"
    asked = ("parallel.pipeline=2", "parallel.num_microbatches=4", "--schedules", "gpipe")
    text, _, code = bench(*asked, "--rounds", 2, "--out", out, "--commit", "1234567")
    assert code == 0
    record = json.loads(out.read_text("utf-8"))
    assert (record["format_version"], record["commit"]) == (1, "1234567")
    assert record["versions"].keys() >= {"python", "jax"}
    assert [row["name"] for row in record["rows"]] == ["alone", "gpipe", "fsdp=2"]
    for row in record["rows"]:
        (line,) = re.finditer(rf"^ *{row['name']} +([0-9.]+) .*$", text, re.MULTILINE)
        assert line.group(1) == f"{row['step_ms']['median']:.1f}"
        assert f"{row['losses'][0]:.4f}" in line.group(0)
        assert len(row["rounds_ms"]) == 2
    assert f"efficiency: {EXPLAINED['efficiency']}" in text
    assert f"tiny on {record['num_devices']} x {record['device']}" in text
    assert f"written to {out}" in text


def test_what_cannot_be_timed_is_one_line_and_exit_2(bench):
    out, err, code = bench("parallel.pipeline=2", "--schedules", "gpipe,3f3b")
    assert (out, code) == ("", 2)
    assert err.startswith("error: no schedule is called '3f3b'; use some of gpipe")


def test_a_config_without_stages_is_refused(bench):
    _, err, code = bench()
    assert code == 2
    assert "parallel.pipeline=1 has no stages to time" in err
