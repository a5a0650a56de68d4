"""Flags of torch launchers on `jaxfound train`: CONFIG under another name, or a way out."""

import logging
import re
from pathlib import Path

import pytest

from jaxfound.cli.launcher_flags import native_args
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
