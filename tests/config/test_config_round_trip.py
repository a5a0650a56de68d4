"""A saved config loads as an equal one, whatever its values are."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.config import PRESETS, ConfigError, load, parse, save, to_yaml

BASE = {"preset": "tiny-dense", "train": {"steps": 50, "batch_size": 4, "seq_len": 16}}

TRICKY = ["010", "1e3", "off", "~", "null", "", " a", "a: b", "#x", "1_0", ".nan", "0x1", "<<", "=",
          "2024-01-01", "1:30", "a\nb", "\x85", "\u2028", "\t", "\x00", "\x7f", "\ufeff", "🙂", "é",
          "'", '"', "\\", "- a", "[a]", "{a", "!x", "&x", "*x", "%x", "@x", "|", ">", "y" * 500,
          "a " * 200]  # fmt: skip


def round_trip(cfg, folder):
    path = folder / "saved.yaml"
    save(cfg, path)
    return load(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("round_trip")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_preset_loads_equal_and_saves_the_same_text(folder, preset):
    cfg = parse({**BASE, "preset": preset})
    restored = round_trip(cfg, folder)
    assert restored == cfg
    assert to_yaml(restored) == to_yaml(cfg)


@settings(max_examples=30, deadline=None)
@given(
    eps=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**31 - 1),
)
def test_numbers_survive_to_the_last_bit(folder, eps, seed):
    cfg = parse({**BASE, "seed": seed, "optimizer": {"eps": eps}})
    assert cfg.optimizer.eps == eps
    restored = round_trip(cfg, folder)
    assert (restored.seed, restored.optimizer.eps) == (seed, eps)
    assert restored == cfg


@settings(max_examples=30, deadline=None)
@given(text=st.text(min_size=1), texts=st.lists(st.text(), min_size=1, max_size=3))
def test_texts_survive_letter_by_letter(folder, text, texts):
    cfg = parse({**BASE, "runs_dir": text, "data": {"source": texts}})
    assert cfg.data.source == tuple(texts)
    assert round_trip(cfg, folder) == cfg


@pytest.mark.parametrize("text", TRICKY)
def test_a_text_that_looks_like_something_else_stays_text(folder, text):
    cfg = parse({**BASE, "data": {"source": text, "prepared_dir": text}})
    restored = round_trip(cfg, folder)
    assert (restored.data.source, restored.data.prepared_dir) == (text, text)


def test_rules_survive_in_their_order(folder):
    rules = [{"pattern": "on", "format": "fp8"}, {"pattern": "*", "format": "float32"}]
    cfg = parse({**BASE, "precision": {"rules": rules}})
    assert round_trip(cfg, folder) == cfg


def test_a_saved_config_says_its_version_and_every_section(folder):
    tree = yaml.safe_load(to_yaml(parse(BASE)))
    assert tree["format_version"] == 1
    assert tree["model"]["num_layers"] == 4
    assert tree["optimizer"]["eps"] == 1e-8


def test_an_unknown_key_in_a_saved_config_is_refused(folder):
    path = folder / "saved.yaml"
    save(parse(BASE), path)
    path.write_text(path.read_text().replace("weight_decay:", "weight_decy:"))
    with pytest.raises(
        ConfigError, match=r"optimizer\.weight_decy: unknown key\. Did you mean opt"
    ):
        load(path)


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    save(parse(BASE), tmp_path / "a.yaml")
    save(parse({**BASE, "seed": 7}), tmp_path / "a.yaml")
    assert load(tmp_path / "a.yaml").seed == 7
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]
