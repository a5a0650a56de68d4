"""`jaxfound config` lists every key, or prints the effective config and its sources."""

import pytest
import typer
from typer.testing import CliRunner

from jaxfound.cli.config import config_command
from jaxfound.config import ConfigError, load, rows

TEXT = "preset: tiny-dense\ntrain: {steps: 3, batch_size: 4, seq_len: 16}\n"


@pytest.fixture
def app():
    app = typer.Typer(add_completion=False)
    app.command("config")(config_command)
    return app


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    return path


def test_without_a_file_every_key_is_listed_within_100_columns(app):
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in result.output
    first_words = {line.split()[0] for line in lines if line[:1].strip()}
    assert {row.key for row in rows()} <= first_words


def test_with_a_file_each_value_is_printed_with_its_source(app, path):
    result = CliRunner().invoke(app, [str(path), "train.steps=9", "seed=1"])
    assert result.exit_code == 0, result.output
    found = dict(
        line.strip().split("  # ") for line in result.output.splitlines() if "  # " in line
    )
    sources = {text.strip(): source for text, source in found.items()}
    assert sources["steps: 9"] == "command line"
    assert sources["batch_size: 4"] == f"{path}:2"
    assert sources["embed_dim: 128"] == "preset tiny-dense"
    assert sources["eps: 1.0e-08"] == "default"


def test_what_is_printed_loads_as_the_same_config(app, path, tmp_path):
    result = CliRunner().invoke(app, [str(path), "train.steps=9"])
    (tmp_path / "y.yaml").write_text(result.output)
    assert load(tmp_path / "y.yaml") == load(path, ["train.steps=9"])


def test_a_config_that_cannot_be_run_is_an_error_for_the_caller(app, path):
    result = CliRunner().invoke(app, [str(path), "train.stps=9"])
    assert isinstance(result.exception, ConfigError)
    assert "Did you mean train.steps?" in str(result.exception)
