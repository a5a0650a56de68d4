"""What a file and a command line say is what the run sees, or it is refused by name."""

from pathlib import Path

import pytest

from jaxfound.config import PRESETS, ConfigError, load, parse, save, trace

S16 = Path(__file__).resolve().parent.parent / "data" / "S16"

# The cases' stand-in keys, and the keys of the same kind here.
KEYS = {
    "learning_rate": "optimizer.learning_rate",
    "steps": "train.steps",
    "tied_embeddings": "model.tie_embeddings",
    "rms_norm_eps": "model.norm_eps",
    "seed": "seed",
}
BASE = "preset: tiny-dense\ntrain.batch_size: 4\ntrain.seq_len: 16\ntrain.steps: 50\n"


def nested(lines):
    """Return YAML for `dotted.key: text` lines, the lines of one section kept together."""
    tree = {}
    for line in lines.strip().splitlines():
        key, _, value = line.partition(":")
        section, _, name = key.rpartition(".")
        tree.setdefault(section, []).append(f"{name}:{value}")
    out = list(tree.pop("", []))
    for section, below in tree.items():
        out += [f"{section}:", *(f"  {line}" for line in below)]
    return "\n".join(out) + "\n"


def write(folder, lines, name="run.yaml"):
    path = folder / name
    path.write_text(nested(lines))
    return path


def without(lines, key):
    return "".join(f"{line}\n" for line in lines.splitlines() if not line.startswith(key + ":"))


def value_at(cfg, key):
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def wrapped(file):
    """Return this project's key and the lines of a case, written with that key."""
    text = (S16 / file).read_text()
    standin = text.partition(":")[0]
    key = KEYS[standin]
    return key, without(BASE, key) + text.replace(standin, key)


READ = [
    ("lr_1e-4.yaml", 1e-4),
    ("lr_3E-4.yaml", 3e-4),
    ("steps_1e3.yaml", 1000),
    ("flag_off.yaml", False),
    ("eps_1e-06.yaml", 1e-6),
]


@pytest.mark.parametrize(("file", "expected"), READ)
def test_a_value_in_a_file_is_what_the_run_sees(tmp_path, file, expected):
    key, lines = wrapped(file)
    value = value_at(load(write(tmp_path, lines)), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(("file", "expected"), READ)
def test_a_value_is_the_same_from_a_file_an_override_and_a_saved_config(tmp_path, file, expected):
    key, lines = wrapped(file)
    text = (S16 / file).read_text().partition(":")[2].strip()
    from_file = load(write(tmp_path, lines))
    from_override = load(write(tmp_path, BASE, "base.yaml"), [f"{key}={text}"])
    assert from_override == from_file
    save(from_override, tmp_path / "saved.yaml")
    restored = load(tmp_path / "saved.yaml")
    assert restored == from_file
    assert value_at(restored, key) == expected


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("lr_quoted.yaml", 'takes number > 0; got the text "1e-4". Remove the quotes'),
        ("steps_float.yaml", "takes whole number >= 1; got 10.5"),
        ("flag_str.yaml", 'takes true or false; got the text "False". Remove the quotes'),
        ("octal.yaml", "010 starts with a zero"),
        (
            "null.yaml",
            "takes number > 0; got nothing (~). Give a value, or remove the key for the default",
        ),
        ("dup_key.yaml", "given twice, first in"),
        ("nan.yaml", ".nan is not a finite number"),
    ],
)
def test_a_value_with_two_readings_is_refused_with_key_file_and_line(tmp_path, file, says):
    key, lines = wrapped(file)
    path = write(tmp_path, lines)
    with pytest.raises(ConfigError) as refusal:
        load(path)
    name = key.rpartition(".")[2]
    numbers = [i for i, line in enumerate(path.read_text().splitlines(), 1) if f"{name}:" in line]
    assert str(refusal.value).startswith(f"{path}:{numbers[-1]}: {key}: {says}")
    assert "\n" not in str(refusal.value)


def test_a_key_given_twice_names_both_lines(tmp_path):
    _, lines = wrapped("dup_key.yaml")
    path = write(tmp_path, lines)
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert str(refusal.value) == f"{path}:6: train.steps: given twice, first in {path}:5"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate=1e-4", 1e-4),
        ("tied_embeddings=False", False),
        ("steps=1e3", 1000),
        ("learning_rate=abc", "takes number > 0; got the word abc"),
        ("tied_embeddings=0", "takes true or false; got 0"),
        ("steps=", "no value after `=`"),
        ("steps=-5", "takes whole number >= 1; got -5"),
    ],
)
def test_an_override_is_read_or_refused_by_the_same_rules(tmp_path, override, expected):
    standin = override.partition("=")[0]
    key = KEYS[standin]
    typed = override.replace(standin, key)
    path = write(tmp_path, BASE)
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refusal:
            load(path, [typed])
        assert str(refusal.value) == f"command line: {typed}: {expected}"
    else:
        assert value_at(load(path, [typed]), key) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),
        ("1.5E+2", 150.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("3", 3.0),
        ("1_000", 1000.0),
        ("0x10", 16.0),
        ("0o10", 8.0),
        ("+2", 2.0),
    ],
)
def test_every_form_of_a_number_is_that_number(tmp_path, text, expected):
    cfg = load(write(tmp_path, BASE), [f"optimizer.clip_norm={text}"])
    assert cfg.optimizer.clip_norm == expected


@pytest.mark.parametrize("text", ["1:30", "0b1", "1__0", "nan", "inf", "1e", "e4", "None", "٣"])
def test_what_only_resembles_a_number_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="takes number >= 0; got the word"):
        load(write(tmp_path, BASE), [f"optimizer.clip_norm={text}"])


@pytest.mark.parametrize("text", [".inf", "-.inf", ".NaN", "1e400", "1e-400", "9" * 5000, "00.1"])
def test_a_number_that_would_change_its_value_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"optimizer\.clip_norm=") as refusal:
        load(write(tmp_path, BASE), [f"optimizer.clip_norm={text}"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "yes", "on", "On", "YES"])
def test_every_yes_is_true(tmp_path, word):
    assert load(write(tmp_path, BASE), [f"model.moe.normalize_weights={word}"]) == load(
        write(tmp_path, BASE)
    )


@pytest.mark.parametrize("word", ["false", "False", "FALSE", "no", "off", "Off", "NO"])
def test_every_no_is_false(tmp_path, word):
    cfg = load(write(tmp_path, BASE), [f"model.moe.normalize_weights={word}"])
    assert cfg.model.moe.normalize_weights is False


def test_the_file_wins_over_its_preset_and_an_override_over_both(tmp_path):
    path = write(tmp_path, BASE + "model.num_layers: 6\nmodel.ffn_dim: 100\n")
    cfg = load(path, ["model.ffn_dim=200", "model.gqa.head_dim=16"])
    assert (cfg.model.num_layers, cfg.model.ffn_dim) == (6, 200)
    assert cfg.model.embed_dim == PRESETS["tiny-dense"]["embed_dim"]
    assert (cfg.model.gqa.num_kv_heads, cfg.model.gqa.head_dim) == (2, 16)


def test_of_two_overrides_of_one_key_the_later_wins(tmp_path):
    path = write(tmp_path, BASE)
    assert load(path, ["train={steps: 3}", "train.steps=4"]).train.steps == 4
    assert load(path, ["train.steps=4", "train={steps: 3}"]).train.steps == 3


def test_a_section_as_an_override_is_merged_into_the_file(tmp_path):
    cfg = load(write(tmp_path, BASE), ["train={steps: 3, log_every: 1}"])
    assert (cfg.train.steps, cfg.train.log_every, cfg.train.batch_size) == (3, 1, 4)


def test_a_list_as_an_override_replaces_the_whole_list(tmp_path):
    path = write(tmp_path, BASE + "precision.rules: [{pattern: a, format: fp8}]\n")
    cfg = load(path, ['precision.rules=[{pattern: "b.*", format: bfloat16}]'])
    assert [(rule.pattern, rule.format) for rule in cfg.precision.rules] == [("b.*", "bfloat16")]


def test_an_override_changes_the_preset_under_the_same_file(tmp_path):
    path = write(tmp_path, BASE + "model.num_layers: 6\n")
    cfg = load(path, ["preset=tiny-mla-moe"])
    assert (cfg.preset, cfg.model.mixer, cfg.model.num_layers) == ("tiny-mla-moe", "mla", 6)


def test_a_preset_that_would_change_nothing_is_refused(tmp_path):
    save(load(write(tmp_path, BASE)), tmp_path / "saved.yaml")
    with pytest.raises(
        ConfigError, match=r"changes nothing: .*saved\.yaml gives every key of model"
    ):
        load(tmp_path / "saved.yaml", ["preset=tiny-mla-moe"])


def test_presets_of_the_caller_are_read_as_the_built_in_ones(tmp_path):
    path = write(tmp_path, BASE.replace("tiny-dense", "mine"))
    presets = {"mine": {**PRESETS["tiny-dense"], "num_layers": 1}}
    assert load(path, presets=presets).model.num_layers == 1


def test_plain_data_reads_as_the_file_that_says_the_same(tmp_path):
    data = {"preset": "tiny-dense", "train": {"batch_size": 4, "seq_len": 16, "steps": 50}}
    assert parse(data) == load(write(tmp_path, BASE))


@pytest.mark.parametrize("head", ["\ufeff", "---\n", "# words\n", "%YAML 1.2\n---\n"])
def test_the_head_of_a_file_does_not_matter(tmp_path, head):
    plain = write(tmp_path, BASE)
    other = tmp_path / "other.yaml"
    other.write_bytes((head + plain.read_text()).replace("\n", "\r\n").encode())
    assert load(other) == load(plain)


def test_every_value_knows_its_source(tmp_path):
    path = write(tmp_path, BASE)
    sources = trace(path, ["train={steps: 3}"]).sources
    assert sources["train.steps"] == "command line"
    assert sources["train.seq_len"] == f"{path}:4"
    assert sources["model.num_layers"] == "preset tiny-dense"
    assert sources["optimizer.eps"] == "default"
