"""Flags of torch launchers on `jaxfound train`: CONFIG under another name, or a way out."""

import logging
import re
from pathlib import Path

import pytest

from jaxfound.cli.launcher_flags import native_args, native_launch_args
from jaxfound.cli.main import main
from jaxfound.config import ConfigError
from jaxfound.config.aliases import FLAGS

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "coming-from-torch-launchers.md"
REFUSED = [name for name, flag in FLAGS.items() if flag.train]


@pytest.mark.parametrize(
    "args", [["--model_config", "a.yaml"], ["--model-config=a.yaml"]], ids=["apart", "joined"]
)
def test_a_model_config_is_config_and_is_reported_once(caplog, args):
    with caplog.at_level(logging.WARNING):
        assert native_args(["train.steps=3", *args, "--prompt", "x"]) == [
            "a.yaml", "train.steps=3", "--prompt", "x",
        ]  # fmt: skip
    (record,) = caplog.records
    assert (record.message, record.word) == ("config.alias", args[0].partition("=")[0])
    assert record.native == "CONFIG=a.yaml"


def test_native_arguments_stay_as_they_are(caplog):
    args = ["a.yaml", "model_config=3", "nnodes", "--prompt", "--", "--prompt=nnodes"]
    assert native_args(args) == args
    assert caplog.records == []


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("spelt", ["--{}", "--{}=2"])
def test_a_flag_about_processes_is_refused_by_name_with_the_way_out(name, spelt):
    for word in (name, name.replace("_", "-")):
        with pytest.raises(ConfigError, match=rf"^--{word}: `train` .*Remove it"):
            native_args(["a.yaml", spelt.format(word), "8"])


@pytest.mark.parametrize("args", [["--model_config"], ["--model_config=a", "--model_config=b"]])
def test_a_model_config_without_one_file_is_refused(args):
    with pytest.raises(ConfigError, match="--model_config takes one file"):
        native_args(args)


def test_the_command_says_it_in_one_line_before_anything_else(monkeypatch, capsys):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level, **_: None)
    with pytest.raises(SystemExit) as left:
        main(["train", "nowhere.yaml", "--nnodes", "3", "--rdzv_endpoint", "node01:29500"])
    printed = capsys.readouterr()
    assert (left.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("error: --nnodes: `train` uses the devices of the host")


def test_the_guide_lists_every_flag():
    listed = re.findall(r"`--(\w+)", GUIDE.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(FLAGS)


OURS = ["--nnodes", "2", "--node-rank", "1", "--coordinator", "node01:29500"]


@pytest.mark.parametrize(
    "args",
    [
        ["--nnodes=2", "--node_rank=1", "--rdzv_endpoint=node01:29500"],
        ["--nnodes", "2", "--node-rank", "1", "--master_addr", "node01", "--master_port", "29500"],
        ["--rdzv_backend=c10d", "--nnodes=2", "--rdzv-id", "7", "--node_rank", "1", *OURS[4:]],
    ],
)
@pytest.mark.parametrize("dashes", [["--"], []])
def test_launch_takes_a_launchers_flags_about_processes(args, dashes):
    command = ["train", "a.yaml", "train.steps=3", "--prompt", "x"]
    assert native_launch_args([*args, *dashes, *command]) == [*OURS, *dashes, *command]


def test_every_flag_that_train_refuses_is_taken_by_launch(caplog):
    for name in REFUSED:
        found = native_launch_args([f"--{name}=7", "--master_addr=a", "--master_port=7", "train"])
        assert found[-1] == "train"


def test_one_process_for_each_gpu_has_one_name():
    for word in ("gpu", "auto", "gpus"):
        args = native_launch_args([f"--nproc_per_node={word}", "train", "a.yaml"])
        assert args[:2] == ["--nproc-per-node", "gpus"]


def test_what_follows_the_command_is_the_commands_own():
    args = ["--nnodes", "2", "--", "train", "--model_config", "a.yaml"]
    assert native_launch_args(args) == ["--nnodes", "2", "--", "train", "a.yaml"]
    with pytest.raises(ConfigError, match="--nnodes: `train`"):
        native_launch_args(["train", "a.yaml", "--nnodes=3"])


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--nnodes=1:4"], "does not change while it runs"), (["--master_addr=a"], "belong together")],
)
def test_launch_refuses_what_says_nothing_here(args, named):
    with pytest.raises(ConfigError, match=named):
        native_launch_args([*args, "train", "a.yaml"])
