"""Another precision is served when it is shown to lose little, and refused otherwise."""

import pytest

from jaxfound.cli.serve_gate import pass_gate, switched
from jaxfound.config import ConfigError
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from tests.cli.test_evaluate import folder  # noqa: F401
from tests.serving.script_server import script_model

FP8 = PrecisionConfig(rules=(PrecisionRule(pattern="*", format="fp8"),))
GATE = {"data": "text.jsonl", "max_drop": 0.01, "step": None}


@pytest.fixture
def runs(folder, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    return folder / "runs"


def test_only_a_precision_that_is_not_the_models_own_is_a_switch(runs):
    assert switched(runs / "sound", []) is None
    assert switched(runs / "sound", ["precision.compute=float32", "serve.max_rows=2"]) is None
    found = switched(runs / "sound", ["precision.compute=bfloat16"])
    assert found == PrecisionConfig(compute="bfloat16")


def test_what_loses_little_passes_and_is_told(runs, capsys):
    pass_gate(runs / "sound", PrecisionConfig(compute="bfloat16"), **GATE)
    assert "gate passed: the interval ends at +" in capsys.readouterr().out


def test_what_loses_more_is_refused_with_its_figures(runs):
    with pytest.raises(ConfigError, match=r"gate FAILED: the interval begins at \+"):
        pass_gate(runs / "spoilt", FP8, **GATE)


def test_published_weights_have_to_be_a_run_first():
    with pytest.raises(ConfigError, match="jaxfound convert"):
        pass_gate(script_model(), FP8, **GATE)
