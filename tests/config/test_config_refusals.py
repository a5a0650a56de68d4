"""A config that cannot be run is refused with file, line, key, and the nearest valid name."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfound.config import PRESETS, ConfigError, RunConfig, load, parse
from jaxfound.config.aliases import ALIASES

S16 = Path(__file__).resolve().parent.parent / "data" / "S16"
S17 = Path(__file__).resolve().parent.parent / "data" / "S17"

TRAIN = "train: {steps: 3, batch_size: 4, seq_len: 16}\n"
BASE = "preset: tiny-dense\n" + TRAIN


def refusal(tmp_path, text, overrides=()):
    """Return the lines of the refusal of BASE and `text`, without the folder."""
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"
RAW = [
    ("case.yaml", f"1: Learning_Rate: unknown key. `learning_rate` lives at {RATE}"),
    ("empty_section.yaml", "1: optimizer: a section needs keys below it; got nothing."),
    ("hyphen.yaml", "1: num-layers: unknown key. `num_layers` lives at model.num_layers"),
    ("list_for_map.yaml", "1: optimizer: a section needs keys below it; got the list [adamw]."),
    ("not_a_map.yaml", "1: a config file is keys and values, `train: {steps: 100}`; got the list"),
    ("tabs.yaml", "2: `lr: 1`: a tab indents this line. Indent with spaces"),
    ("typo_nested.yaml", f"2: optimizer.weight_decy: unknown key. Did you mean {DECAY}?"),
    ("typo_top.yaml", f"1: learning_rat: unknown key. Did you mean {RATE}?"),
    ("wrong_level.yaml", f"1: weight_decay: unknown key. `weight_decay` lives at {DECAY}"),
]


@pytest.mark.parametrize(("file", "says"), RAW)
def test_a_file_with_a_key_that_does_not_exist_is_refused_as_it_is(file, says):
    with pytest.raises(ConfigError) as caught:
        load(S17 / file)
    assert str(caught.value).startswith(f"{S17 / file}:{says}")


@pytest.mark.parametrize(("file", "says"), RAW)
def test_the_same_key_in_a_complete_file_is_the_only_thing_refused(tmp_path, file, says):
    lines = refusal(tmp_path, (S17 / file).read_text())
    if file not in ("not_a_map.yaml", "tabs.yaml"):
        lines = refusal(tmp_path, (S17 / file).read_text() + BASE)
    assert len(lines) == 1
    assert lines[0].startswith(f"x.yaml:{says}")


def standin(file):
    return file.read_text().partition(":")[0]


# A launcher's word is read instead: test_aliases.py has those files.
UNKNOWN = [p.name for p in sorted(S16.glob("*.yaml")) if standin(p) not in ALIASES]


@pytest.mark.parametrize("file", UNKNOWN)
def test_a_stand_in_key_is_refused_by_name(file):
    with pytest.raises(ConfigError) as caught:
        load(S16 / file)
    assert str(caught.value).startswith(f"{S16 / file}:1: {standin(S16 / file)}: ")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learning_rat=0.001", "unknown key. Did you mean optimizer.learning_rate?"),
        (
            "optimizer.weight_decy=0.1",
            "unknown key. Did you mean optimizer.weight_decay?",
        ),
        ("weight_decay=0.1", "unknown key. `weight_decay` lives at optimizer.weight_decay"),
        ("num-layers=2", "unknown key. `num_layers` lives at model.num_layers"),
        ("model.num-layers=2", "unknown key. Did you mean model.num_layers?"),
        ("Learning_Rate=0.001", "unknown key. `learning_rate` lives at optimizer.learning_rate"),
        ("optimizer.lr=1", "unknown key. Did you mean optimizer.learning_rate?"),
        ("num_microbatch=2", "unknown key. Did you mean parallel.num_microbatches?"),
        ("modle.num_layers=2", "modle: unknown key. Did you mean model?"),
        ("parallel.zzz=2", "unknown key. The keys of parallel are pipeline, data, fsdp, expert, "),
        ("train.steps.x=2", "train.steps: takes whole number >= 1; got {x: 2}"),
        ("precision.rules.0.format=fp8", "precision.rules: takes list of {pattern, format}; got"),
        ("optimizer=", "no value after `=`"),
        ("optimizer=~", "a section needs keys below it; got nothing (~)"),
        ("optimizer=[adamw]", "a section needs keys below it; got the list [adamw]"),
        ("optimizer", "an override is KEY=VALUE"),
        ("=3", "an override is KEY=VALUE"),
        ("name=#x", "no value after `=`, only a comment"),
        ("name={", "`{`: not YAML"),
        ("name=42", "takes text matching ^[A-Za-z0-9][A-Za-z0-9._-]*$; got 42. Quote it if"),
        ("data.packing=pakced", "takes one of packed, padded; got the word pakced. Did you mean"),
        ("parallel.data=0", "takes whole number >= 1 or auto; got 0"),
        ("format_version=2", "takes 1; got 2"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused_as_typed(tmp_path, override, says):
    (line,) = refusal(tmp_path, BASE, [override])
    assert line.startswith(f"command line: {override}: {says}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: &m {num_layers: 2}", "3: `model: &m {num_layers: 2}`: not YAML: &m: anchors and"),
        ("model: *m", "3: `model: *m`: not YAML: *m: anchors and aliases are not read"),
        ("seed: !!int 3", "3: `seed: !!int 3`: not YAML: the tag tag:yaml.org,2002:int is not"),
        ("model: {<<: {num_layers: 2}}", "3: model.<<: merge keys are not read"),
        ("model.num_layers: 3", "3: model.num_layers: keys are nested here: write `model: {num_"),
        ("[a]: 3", "3: a key is one word"),
        ("seed: 1\n---\nseed: 2", "4: `---`: not YAML: expected a single document"),
        ("seed: [1", "4: not YAML: while parsing a flow sequence"),
        ("seed: a: b", "3: `seed: a: b`: not YAML: mapping values are not allowed here"),
        ("seed: '1", "4: not YAML: while scanning a quoted scalar"),
        ("seed: \x07", "3: the character U+0007 is not allowed in YAML"),
        ('name: "\\ud800"', "3: name: half of a surrogate pair is not a character"),
        ("seed: " + "[" * 40, f"3: `seed: {'[' * 40}`: not YAML: more than 16 levels"),
        ('precision: {rules: [{"\\ud800": 1}]}', "3: precision.rules[0]: a key is one word"),
        ("on: 3", "3: on: unknown key."),
        ("data: {source: [a, 3]}", "3: data.source: takes text or list of text; got [a, 3]"),
        ("preset: tiny-dens", "3: preset: given twice, first in x.yaml:1"),
        (
            "precision:\n  rules:\n  - {pattern: a, format: fp9}",
            "5: precision.rules[0].format: takes one of float32, bfloat16, fp8,"
            " fp8_weights; got the word fp9."
            " Did you mean fp8?",
        ),
        (
            "precision:\n  rules:\n  - {pattern: a, format: fp8}\n  - {patern: a, format: fp8}",
            "6: precision.rules[1].patern: unknown key. Did you mean precision.rules[].pattern?",
        ),
        (
            "precision:\n  rules:\n  - {pattern: a, pattern: b, format: fp8}",
            "5: precision.rules[0].pattern: given twice, first in x.yaml:5",
        ),
        ("precision: {rules: [5]}", "3: precision.rules[0]: takes {pattern, format}; got 5"),
    ],
)
def test_what_is_not_a_config_is_refused_with_its_line(tmp_path, text, says):
    lines = refusal(tmp_path, BASE + text + "\n")
    assert any(line.startswith(f"x.yaml:{says}") for line in lines), lines


def test_an_unknown_preset_names_the_nearest_and_all(tmp_path):
    (line,) = refusal(tmp_path, "preset: tiny-dens\n" + TRAIN)
    assert line == (
        "x.yaml:1: preset: no preset is called tiny-dens. Did you mean tiny-dense? "
        f"The presets are {', '.join(PRESETS)}"
    )


def test_all_that_is_wrong_is_said_at_once_in_the_order_of_the_file(tmp_path):
    text = (
        "seed: x\npreset: tiny-dense\nnum-layers: 2\nmodel: {gqa: ~}\n"
        "train: {steps: 0, batch_size: 1}\n"
    )
    lines = refusal(tmp_path, text, ["train.stps=3", "optimizer.eps=0"])
    assert [line.split(": ")[:2] for line in lines] == [
        ["x.yaml:1", "seed"],
        ["x.yaml:3", "num-layers"],
        ["x.yaml:4", "model.gqa"],
        ["x.yaml:5", "train.steps"],
        ["command line", "train.stps=3"],
        ["command line", "optimizer.eps=0"],
        ["x.yaml", "train.seq_len"],
    ]


def test_a_missing_section_says_what_to_give(tmp_path):
    (line,) = refusal(tmp_path, TRAIN)
    assert line == (
        f"x.yaml: model: missing; name a preset ({', '.join(PRESETS)}), or give "
        "model.vocab_size, model.embed_dim, model.num_layers, model.num_heads, model.ffn_dim"
    )


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        (
            "parallel: {num_microbatches: 3}",
            (),
            "x.yaml:3: train.batch_size=4 rows cannot be cut into parallel.num_microbatches=3",
        ),
        (
            "",
            ["parallel.num_microbatches=3"],
            "command line: parallel.num_microbatches=3: train.batch_size=4 rows cannot be cut",
        ),
        (
            "model: {gqa: {num_kv_heads: 3}}",
            (),
            "x.yaml:3: model: gqa.num_kv_heads=3 does not divide num_heads=4",
        ),
        (
            "model: {moe: {num_groups: 3}}",
            (),
            "x.yaml:3: model.moe: num_groups=3 does not divide num_experts=8",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_named_where_they_are_given(
    tmp_path, text, overrides, says
):
    (line,) = refusal(tmp_path, BASE + text, overrides)
    assert line.startswith(says)
    assert "pydantic" not in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "x.yaml: the file is empty"),
        ("# only words\n", "x.yaml: the file is empty"),
        ("~\n", "x.yaml:1: a config file is keys and values, `train: {steps: 100}`; got nothing"),
        ("run\n", "x.yaml:1: a config file is keys and values, `train: {steps: 100}`; got run"),
        (b"seed: 1\nname: \xff\n", "x.yaml:2: byte 0xff is not UTF-8 text"),
        (b"\xff\xfes\x00", "x.yaml:1: byte 0xff is not UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(tmp_path, content, says):
    (line,) = refusal(tmp_path, content)
    assert line.startswith(says)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize("version", ["2", "0", '"1"', "true", "1.0", "~"])
def test_an_unknown_version_is_refused_before_anything_else(tmp_path, version):
    (line,) = refusal(tmp_path, f"format_version: {version}\nnew_key: 3\n")
    assert line.startswith(f"x.yaml:1: format_version: {version} is not a version")
    assert "known: 1" in line


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"optimizer": {"weight_decy": 1}}, "saved: optimizer.weight_decy: unknown key. Did you"),
        ({"optimizer": {"eps": None}}, "saved: optimizer.eps: takes number > 0; got nothing"),
        ({"optimizer": {"eps": float("nan")}}, "saved: optimizer.eps: .nan is not a finite number"),
        ({"optimizer": {"eps": "1e-4"}}, "saved: optimizer.eps: takes number > 0; got the word"),
        ({"optimizer": {"eps": 1j}}, "a config holds words, numbers, lists and mappings; got com"),
        ({3: 4}, "saved: 3: unknown key."),
    ],
)
def test_plain_data_is_refused_as_a_file_is(data, says):
    base = {"preset": "tiny-dense", "train": {"steps": 3, "batch_size": 4, "seq_len": 16}}
    with pytest.raises(ConfigError) as caught:
        parse({**base, **{str(k): v for k, v in data.items()}}, place="saved")
    assert str(caught.value).startswith(says)


PIECES = [
    *("preset: tiny-dense", "train: {steps: 3}", "model:", "rules", "\n", "\n  ", "\t", "- ", ": "),
    *("{", "}", "[", "]", ",", "'", '"', "#", "|", ">", "&a ", "*a", "!t ", "? ", "%", "@", "---"),
    *("...", "<<", "~", "010", "1e3", ".nan", "0x", "\\", "\x00", "\x85", "é", "🙂"),
]


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), override=st.text(max_size=8))
def test_any_text_is_a_config_or_a_refusal(tmp_path_factory, pieces, override):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("".join(pieces), encoding="utf-8")
    try:
        outcome = load(path, [override, f"train.steps={override}"])
    except ConfigError as error:
        outcome = error
    assert isinstance(outcome, RunConfig) or str(outcome)
