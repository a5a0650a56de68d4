"""Curves of runs that read the same batches: what is paired, and what is refused."""

import json
import math

import numpy as np
import pytest

from jaxfound.cli.main import main
from jaxfound.config.load import save
from jaxfound.config.schema import ConfigError
from jaxfound.resources.metrics import MetricsWriter
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.training.curves import check_alike, differences, paired, read_curve
from tests.training.tiny import tiny

STEPS = 120
NOISE = np.random.default_rng(0).normal(0.0, 0.3, STEPS)


def written(folder, *changes, above=0.0, wobble=0.0, data="bins", steps=range(1, STEPS + 1)):
    """The folder of a run whose losses are those of all, and a share above them."""
    there = RunDirectory(folder)
    folder.mkdir()
    save(tiny(folder, *changes), there.config)
    own = np.random.default_rng(len(folder.name)).normal(0.0, 1.0, STEPS)
    with MetricsWriter(there.metrics) as metrics, MetricsWriter(there.starts) as starts:
        starts.write("start", step=0, data=data, device="cpu")
        for step in steps:
            loss = (2.0 + 5.0 / step + NOISE[step - 1]) * (1 + above) + wobble * own[step - 1]
            metrics.write("train", step=step, loss=float(loss), tokens_per_s=100.0)
    return folder


def test_the_difference_of_a_step_is_free_of_what_its_text_is_like(tmp_path):
    base = written(tmp_path / "base")
    other = written(tmp_path / "other", above=0.001)
    (found,) = paired([read_curve(base), read_curve(other)], last=50)
    assert found.steps == 50
    assert found.relative == pytest.approx(0.001)
    # The text of 50 steps alone moves a mean by 2 %.
    assert 0.0009 < found.low < 0.001 < found.high < 0.0011


def test_an_interval_is_as_wide_as_what_steps_differ_in(tmp_path):
    runs = [written(tmp_path / name, wobble=0.02) for name in ("base", "again!")]
    (found,) = paired([read_curve(path) for path in runs], last=100)
    expected = math.sqrt(2) * 0.02 / math.sqrt(100) / found.base
    assert found.low < found.relative < found.high
    assert 2 * expected < found.high - found.low < 6 * expected


def test_only_steps_that_both_recorded_are_compared_up_to_the_shorter_end(tmp_path):
    base = written(tmp_path / "base", steps=range(1, STEPS + 1))
    other = written(tmp_path / "other", steps=range(2, 101, 2), above=0.01)
    (found,) = paired([read_curve(base), read_curve(other)], last=60)
    # Steps 42, 44 … 100.
    assert found.steps == 30


def test_runs_that_read_other_tokens_are_refused_with_what_differs(tmp_path):
    base = read_curve(written(tmp_path / "base"))
    seed = read_curve(written(tmp_path / "seed", "seed=5"))
    with pytest.raises(ConfigError, match=r"seed read other batches than base: seed=5 for"):
        check_alike([base, seed])
    bins = read_curve(written(tmp_path / "bins", data="others"))
    with pytest.raises(ConfigError, match="bins others for bins"):
        check_alike([base, bins])


@pytest.mark.parametrize(
    ("steps", "words"), [(range(1, 11), r"recorded 10 of the steps -?\d+ to 10"), ((), "no losses")]
)
def test_too_short_records_are_refused(steps, words, tmp_path):
    paths = [written(tmp_path / name, steps=steps) for name in ("base", "other")]
    with pytest.raises(ConfigError, match=words):
        paired([read_curve(path) for path in paths], last=50)


def test_keys_that_differ_are_named_and_those_of_places_are_not(tmp_path):
    base = read_curve(written(tmp_path / "base"))
    rules = 'precision.rules=[{pattern: "layers.*", format: fp8}]'
    other = read_curve(written(tmp_path / "other", rules))
    ((key, value),) = differences(base.cfg, other.cfg)
    assert key == "precision.rules"
    assert value[0]["format"] == "fp8"


def test_the_command_prints_writes_draws_and_gates(tmp_path, capsys):
    paths = [
        written(tmp_path / name, above=above) for name, above in (("base", 0), ("near", 0.004))
    ]
    out, png = tmp_path / "curves.json", tmp_path / "curves.png"

    def run(*options):
        with pytest.raises(SystemExit) as left:
            main(["curves", *map(str, paths), "--last", "50", *options])
        return left.value.code, capsys.readouterr().out

    code, said = run("--out", str(out), "--png", str(png))
    assert not code
    assert "+0.400%" in said
    assert png.stat().st_size > 10_000
    record = json.loads(out.read_text())
    assert len(record["runs"]["near"]["losses"]) == STEPS
    assert record["runs"]["near"]["starts"][0]["data"] == "bins"
    assert not run("--within", "0.005")[0]
    code, said = run("--within", "0.003")
    assert code == 1
    assert "near is +0.400% from base" in said
