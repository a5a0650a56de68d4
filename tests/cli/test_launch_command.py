"""`jaxfound launch`: what it refuses, what it writes, what it shows."""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from jaxfound.cli.console import open_console
from jaxfound.cli.launch import LINES, watch
from jaxfound.cli.main import main
from jaxfound.resources.launch.agent import Kind, Told

THIRD = ("--nnodes", "3", "--node-rank", "2")
CONFIG = "configs/tiny-dense.yaml"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line; return its exit code and what it printed."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)

    def run(*args):
        with pytest.raises(SystemExit) as left:
            main(args)
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--nnodes", "3", "--", "train", CONFIG], "needs --node-rank"),
        ([*THIRD, "--coordinator", "localhost:1", "train", CONFIG], "never meet"),
        (["--min-nodes", "2", "train", CONFIG], "do not agree on whom to leave out"),
        (["tarin", CONFIG], "one of train CONFIG, slurm CONFIG, jobset CONFIG"),
        (["--nproc-per-node", "none", "train", CONFIG], "--nproc-per-node none is not a number"),
        (["train", CONFIG, "train.stepz=3"], "train.steps"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(run, args, named):
    code, out, err = run("launch", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert named in err


def test_a_batch_script_is_printed(run):
    code, text, _ = run("launch", "--nnodes", "3", "slurm", CONFIG, "train.steps=90")
    assert code == 0
    assert "#SBATCH --nodes=3\n" in text
    assert f"-- train {CONFIG} train.steps=90\n" in text


def test_a_manifest_is_printed(run):
    code, out, _ = run("launch", "--nnodes", "2", "--image", "here/it:1", "jobset", CONFIG)
    assert code == 0
    (job,) = yaml.safe_load(out)["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 2
    assert "image: here/it:1\n" in out


def test_a_script_for_a_config_that_is_wrong_is_not_written(run):
    assert run("launch", "slurm", CONFIG, "train.stepz=9")[0] == 2


def test_what_an_agent_tells_is_shown_and_its_code_is_ours(capsys):
    told = [
        Told("line", {"text": "WARNING of process 0"}),
        Told("ended", {"attempt": 0, "process": 1, "code": 75, "log": "x.log", "tail": "the end"}),
        Told("over", {"code": 75, "why": "made no progress"}),
    ]
    assert watch(iter(told), console=open_console()) == 75
    printed = capsys.readouterr()
    assert printed.err == "WARNING of process 0\n"
    assert (
        "process 1 of attempt 0 ended with 75 (made no progress); log: x.log\nthe end\n"
        in printed.out
    )


def test_there_is_a_line_for_everything_that_an_agent_tells():
    assert {*LINES, "line"} == set(get_args(Kind))
    assert Path(CONFIG).exists()
