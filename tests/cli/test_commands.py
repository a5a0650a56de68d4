"""The command line end to end: exit codes, one-line errors, signals (cases S12, S16, S17)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxfound.cli.main import main
from jaxfound.config import save
from jaxfound.resources.metrics import read_metrics
from jaxfound.training.run import run_directory
from tests.training.tiny import tiny

DATA = Path(__file__).resolve().parent.parent / "data"
COMMAND = [sys.executable, "-m", "jaxfound.cli.main"]


ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def jaxfound(*args, cwd):
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, which imports nothing anew: its exit code and output."""
    monkeypatch.chdir(tmp_path)
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level, **_: None)

    def run(*args):
        with pytest.raises(SystemExit) as left:
            main([str(arg) for arg in args])
        return left.value.code or 0, capsys.readouterr()

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    save(tiny(tmp_path, "train.steps=4", "train.eval_batches=2"), path)
    return path


def test_a_run_trains_samples_reports_and_says_when_there_is_nothing_left(config, here, tmp_path):
    trained = jaxfound("train", config, "--prompt", "d0", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "finished at step 4" in trained.stdout
    assert "held-out loss" in trained.stdout
    assert "sample:" in trained.stdout
    records = [r["event"] for r in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")]
    assert records.count("train") == 4
    assert "planned and measured, by 3 steps" in trained.stdout
    assert (tmp_path / "runs" / "tiny" / "planned.json").exists()
    assert {"eval", "checkpoint", "finished", "sample"} <= set(records)

    code, again = here("train", config)
    assert (code, "nothing to do" in again.out) == (0, True), again.err

    code, reported = here("report", "runs/tiny")
    assert code == 0, reported.err
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text("utf-8")
    assert "Planned and measured" in page

    code, said = here("generate", "runs/tiny", "d0", "--max-tokens", 5)
    assert code == 0, said.err
    assert said.out.startswith("d0")


REFUSED = [
    (("train", "missing.yaml"), "missing.yaml"),
    (("train", "tiny.yaml", "train.stepz=3"), "train.steps"),
    (("train", "tiny.yaml", "optimizer.learning_rate=abc"), "optimizer.learning_rate"),
    (("train", "tiny.yaml", "parallel.expert=2"), "parallel.expert=2"),
    (("train", "tiny.yaml", "parallel.tensor=3"), "tensor=3"),
    (("train", "tiny.yaml", "data.source=nothing.jsonl"), "nothing.jsonl"),
    (("generate", "nowhere", "d0"), "is not a run"),
    (("model", "tiny-mla-mo"), "tiny-mla-moe"),
    (("train", str(DATA / "S17" / "typo_nested.yaml")), "weight_decay"),
]


@pytest.mark.parametrize(("args", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be_done_is_one_error_and_exit_code_2(config, here, args, named):
    code, said = here(*args)
    assert code == 2
    assert said.err.startswith("error: ")
    assert named in said.err


def test_an_error_of_the_installed_command_has_no_traceback(tmp_path):
    found = jaxfound("train", "missing.yaml", cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
    ids=lambda s: s.name,
)
def test_a_signal_saves_and_exits_cleanly_and_the_run_goes_on(tmp_path, number):
    cfg = tiny(tmp_path, "train.steps=100000", "checkpoint.every=0", "optimizer.warmup_steps=0")
    save(cfg, tmp_path / "long.yaml")
    args = [*COMMAND, "train", "long.yaml", "--prompt", ""]
    process = subprocess.Popen(
        args, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    metrics = run_directory(cfg).metrics
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (
        metrics.exists() and any(r["event"] == "train" for r in read_metrics(metrics))
    ):
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{number.name}: saved step" in out
    stopped = [r for r in read_metrics(metrics) if r["event"] == "stopped"]
    assert [int(r["step"]) for r in stopped] == [
        int(p.name) for p in run_directory(cfg).checkpoints.iterdir()
    ]
