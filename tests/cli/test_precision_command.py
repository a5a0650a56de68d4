"""`jaxfound precision`: a planted outlier is ranked first, and the rules keep it from fp8."""

import json

import pytest
import yaml

from jaxfound.cli.main import main
from jaxfound.cli.precision import yaml_of
from jaxfound.config import load, save
from jaxfound.config.layer_formats import check_precision
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from tests.training.written import STEP, config, save_run, weights, write_texts, written_by

LAYERS, SPOILT, MAX_DROP = 4, 2, 0.05


def precision(*args):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as left:
        main(["precision", *map(str, args)])
    return left.value.code


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with an outlier in one layer, which its float32 model does not read."""
    folder = tmp_path_factory.mktemp("precision")
    cfg = config(folder, f"model.num_layers={LAYERS}")
    frame = Frame(cfg.model)
    arrays = weights(frame)
    write_texts(folder / "text.jsonl", written_by(frame, arrays))
    kernels = {
        path: arrays.params[path].at[SPOILT, 0].set(1e6)
        for path in ("layers.ffn.gate.kernel", "layers.ffn.up.kernel")
    }
    save_run(cfg, Arrays({**arrays.params, **kernels}, arrays.buffers))
    save(cfg, folder / "tiny.yaml")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What the command writes as numbers; its rules are in rules.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
        code = precision(
            folder / "tiny.yaml", "--data", folder / "text.jsonl", "--max-drop", MAX_DROP,
            "--out", folder / "new" / "rules.yaml", "--json", folder / "numbers.json",
        )  # fmt: skip
    assert code == 0
    return json.loads((folder / "numbers.json").read_text())


def test_the_layer_with_the_outlier_is_ranked_first_and_the_rules_keep_it_from_fp8(found, folder):
    first, *others = found["layers"]
    assert first["name"] == f"layers.{SPOILT}.*"
    assert len(others) == LAYERS - 1
    assert first["rise"]["loss_increase"] > 1.0
    assert max(trial["rise"]["loss_increase"] for trial in others) < 0.2
    written = (folder / "new" / "rules.yaml").read_text()
    assert written.startswith("# ")
    values = yaml.safe_load(written)["precision"]
    assert values == found["rules"]
    rules = PrecisionConfig.model_validate(values, strict=False)
    formats = {n: rules.format_of("layers.ffn.gate", n) for n in range(LAYERS)}
    assert formats[SPOILT] == "float32"
    assert "fp8" in formats.values()
    check_precision(rules, describe(load(folder / "tiny.yaml").model))


def test_the_rules_keep_the_loss_where_fp8_everywhere_does_not(found):
    assert found["rise"]["high"] <= MAX_DROP
    assert found["all_fp8"]["rise"]["low"] > MAX_DROP
    assert (found["step"], found["compute"]) == (STEP, "float32")


def test_the_operations_that_read_the_outlier_are_ranked_first(found):
    operations = found["operations"]
    assert {trial["name"] for trial in operations[:2]} == {"layers.ffn.gate", "layers.ffn.up"}
    rises = [trial["rise"]["loss_increase"] for trial in operations]
    assert rises[1] > 10 * rises[2]


def test_of_the_dearest_layer_each_operation_is_tried_alone(found):
    products = [trial["name"] for trial in found["products"]]
    assert len(products) == 7
    assert set(products[:2]) == {f"layers.{SPOILT}.ffn.gate", f"layers.{SPOILT}.ffn.up"}


def test_the_numbers_show_why(found):
    numbers = {(n["path"], n["layer"], n["operand"]): n for n in found["operands"]}
    assert len(numbers) == 7 * LAYERS * 3
    for layer in range(LAYERS):
        gate = numbers["layers.ffn.gate", layer, "weight"]
        is_spoilt = layer == SPOILT
        # All but the 32 of 16 x 32 weights that are the outlier.
        assert gate["underflow"] == pytest.approx(15 / 16 if is_spoilt else 0, abs=0.01)
        assert gate["outlier_channels"] == is_spoilt
        assert (gate["outlier_ratio"] > 1e6) == is_spoilt
        if is_spoilt:
            assert (gate["outlier"], gate["largest"]) == (0, 1e6)
    assert all(n["blocks"] and n["largest"] > 0 for n in found["operands"])


def test_rules_are_written_as_a_config_reads_them(tmp_path):
    rules = (
        PrecisionRule(pattern="*.mixer.out", format="float32"),
        PrecisionRule(pattern="layers.0-3.*", format="bfloat16"),
        PrecisionRule(pattern="layers.*", format="fp8"),
    )
    policy = PrecisionConfig(compute="bfloat16", rules=rules)
    path = tmp_path / "config.yaml"
    save(config(tmp_path), path)
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(values | yaml.safe_load(yaml_of(policy))))
    assert load(path).precision == policy
    assert yaml_of(PrecisionConfig()) == "precision:\n  compute: bfloat16\n"


def test_a_config_without_trained_weights_is_refused(tmp_path, capsys):
    save(config(tmp_path), tmp_path / "tiny.yaml")
    assert precision(tmp_path / "tiny.yaml", "--data", "text.jsonl") == 2
    said = capsys.readouterr().err
    assert "has no weights yet" in said
    assert "train.init_from" in said
