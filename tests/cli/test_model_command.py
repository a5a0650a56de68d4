"""`jaxfound model` prints exact counts of a preset or a YAML, and the names there are."""

import pytest

from jaxfound.cli.main import main
from jaxfound.config import PRESETS

PRINTED = {
    "smollm2-135m": ["134,515,008", "23,040", "in short: 134.52 M"],
    "llama3-8b": ["8,030,261,248", "131,072", "in short: 8.03 B"],
    "deepseek-v2-lite": [
        "15,706,484,224",
        "2,661,150,208",
        "15.71 B, of which a token uses 2.66 B",
    ],
    "deepseek-v3": [
        *("671,026,404,352", "37,552,282,624", "11,610,067,968", "70,272"),
        "671.03 B, of which a token uses 37.55 B; multi-token prediction 11.61 B apart",
    ],
    "50b": ["50,034,023,424", "196,608", "in short: 50.03 B"],
}


def printed(monkeypatch, capsys, *args):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["model", *map(str, args)])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PRINTED)
def test_a_preset_is_counted_to_the_last_parameter(monkeypatch, capsys, name):
    out = printed(monkeypatch, capsys, name)
    assert [text for text in PRINTED[name] if text not in out] == []


def test_without_a_name_the_presets_are_listed(monkeypatch, capsys):
    assert printed(monkeypatch, capsys).strip() == f"presets: {', '.join(PRESETS)}"


def test_a_launchers_yaml_is_counted_as_the_native_one(monkeypatch, capsys, tmp_path):
    flat = "hidden_size: 576\nnum_layers: 30\nnum_attention_heads: 9\nnum_key_value_heads: 3\n"
    flat += "intermediate_size: 1536\nvocab_size: 49152\ntie_word_embeddings: true\n"
    flat += "train_iters: 1\nseq_length: 128\nglobal_batch_size: 1\n"
    (tmp_path / "flat.yaml").write_text(flat)
    out = printed(monkeypatch, capsys, tmp_path / "flat.yaml")
    assert "134,515,008" in out


def test_every_parameter_is_listed_with_its_shape(monkeypatch, capsys):
    out = printed(monkeypatch, capsys, "deepseek-v3", "--params")
    assert "layers.ffn.experts.gate" in out
    assert "(58, 256, 7168, 2048)" in out
