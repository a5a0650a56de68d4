"""Flat keys of torch launchers: read as native keys, reported once, never guessed."""

import logging
import re
from pathlib import Path

import pytest
import yaml

from jaxfound.config import ConfigError, load, parse, rows, save, trace
from jaxfound.config.aliases import ALIASES
from jaxfound.config.describe import catalog

ROOT = Path(__file__).resolve().parents[2]
S16 = ROOT / "tests" / "data" / "S16"
GUIDE = ROOT / "docs" / "howto" / "coming-from-torch-launchers.md"

BASE = "preset: tiny-dense\ntrain: {steps: 3, batch_size: 8, seq_len: 16}\n"
# The same run in a launcher's words, in another launcher's, and in ours.
FLAT = {
    "hidden_size": 256,
    "num_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 688,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "pipeline_parallel_size": 1,
    "tensor_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "data_parallel_size": 4,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "activation_checkpointing": True,
    "zero_stage": 2,
    "use_flash_attn": True,
    "seq_length": 128,
    "learning_rate": 1e-3,
    "warmup_steps": 10,
    "train_iters": 100,
}
OTHER = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "kv_channels": 32,
    "ffn_hidden_size": 688,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "norm_epsilon": 1e-5,
    "tensor_model_parallel_size": 2,
    "data_parallel_size": 4,
    "zero_stage": 2,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 24,
    "recompute_granularity": "full",
    "sequence_parallel": False,
    "hidden_dropout": 0.0,
    "max_seq_length": 128,
    "lr": 1e-3,
    "lr_warmup_iters": 10,
    "max_steps": 100,
}
NATIVE = {
    "model": {
        "vocab_size": 512,
        "embed_dim": 256,
        "num_layers": 4,
        "num_heads": 8,
        "gqa": {"num_kv_heads": 8, "head_dim": 32},
        "ffn_dim": 688,
        "max_positions": 1024,
        "norm_eps": 1e-5,
    },
    "parallel": {
        "tensor": 2,
        "data": 1,
        "fsdp": 4,
        "zero_stage": 2,
        "num_microbatches": 3,
        "remat": "full",
    },
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
    "train": {"steps": 100, "batch_size": 24, "seq_len": 128},
}


def written(folder, text):
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def flat(values):
    """YAML of flat keys, as a launcher's file has them."""
    return "".join(f"{word}: {str(value).lower()}\n" for word, value in values.items())


def refusal(folder, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "")


def value_at(cfg, key):
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def reports(caplog):
    return [r for r in caplog.records if r.message == "config.alias"]


@pytest.mark.parametrize("words", [FLAT, OTHER], ids=["one launcher", "another"])
def test_a_launchers_file_is_the_native_config_that_says_the_same(tmp_path, words):
    native = parse(NATIVE)
    assert load(written(tmp_path, flat(words))) == native
    assert parse(words) == native
    save(native, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml") == native


def test_words_on_the_command_line_are_the_same_words(tmp_path):
    overrides = [line.replace(": ", "=") for line in flat(FLAT).splitlines()]
    assert load(written(tmp_path, "seed: 0\n"), overrides) == parse(NATIVE)


PLAIN = [word for word, alias in ALIASES.items() if alias.rule == "same"]
# By what a key takes; 4 and 0.5 fit into every key that has a word.
SAMPLES = {"whole number": 4, "number": 0.5, "true or false": True}


@pytest.mark.parametrize("word", PLAIN)
def test_every_plain_word_sets_its_key_and_is_reported_once(tmp_path, caplog, word):
    alias = ALIASES[word]
    (row,) = [row for row in rows() if row.key == alias.key]
    theirs, ours = alias.values[-1] if alias.values else (SAMPLES[row.type],) * 2
    if alias.key == "model.rope.theta":
        theirs = ours = 5.5
    needed = {"steps": 8, "batch_size": 8, "seq_len": 4}
    needed.pop(alias.key.removeprefix("train."), None)
    values = {"preset": "tiny-dense", "train": needed, word: theirs}
    with caplog.at_level(logging.WARNING):
        loaded = trace(written(tmp_path, yaml.safe_dump(values, sort_keys=False)))
    assert value_at(loaded.config, alias.key) == ours
    assert loaded.aliases == {word: f"{alias.key}={ours}"}
    assert loaded.sources[alias.key].endswith(f", {word}")
    (record,) = reports(caplog)
    assert (record.word, record.native) == (word, f"{alias.key}={ours}")


def test_a_file_in_our_own_words_reports_nothing(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        assert trace(written(tmp_path, BASE)).aliases == {}
    assert reports(caplog) == []


def test_an_override_wins_over_the_file_whichever_word_either_used(tmp_path):
    path = written(tmp_path, BASE + "lr: 1e-3\n")
    assert load(path, ["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 1e-4
    assert load(path, ["learning_rate=1e-4"]).optimizer.learning_rate == 1e-4
    assert load(path, ["lr=1e-5", "lr=1e-4"]).optimizer.learning_rate == 1e-4
    path = written(tmp_path, BASE + "optimizer: {learning_rate: 1e-3}\n")
    assert load(path, ["lr=1e-4"]).optimizer.learning_rate == 1e-4


def test_a_word_wins_over_the_preset(tmp_path):
    cfg = load(written(tmp_path, BASE + "num_layers: 2\nnum_attention_heads: 8\n"))
    assert (cfg.model.num_layers, cfg.model.num_heads) == (2, 8)
    # What the preset says of heads stays: nothing is worked out anew.
    assert (cfg.model.gqa.num_kv_heads, cfg.model.gqa.head_dim) == (2, 32)


def test_two_names_of_a_key_may_agree(tmp_path):
    cfg = load(written(tmp_path, BASE + "lr: 1e-3\noptimizer: {learning_rate: 0.001}\n"))
    assert cfg.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        (
            "lr: 1e-3\noptimizer: {learning_rate: 1e-4}\n",
            (),
            "x.yaml:3: lr: 1e-3 is for optimizer.learning_rate, and x.yaml:4 says "
            "optimizer.learning_rate: 1e-4. Keep one",
        ),
        (
            "lr: 1e-3\nlearning_rate: 1e-4\n",
            (),
            "x.yaml:4: learning_rate: 1e-4 is for optimizer.learning_rate, and x.yaml:3 says "
            "lr: 1e-3. Keep one",
        ),
        (
            "",
            ("parallel.tensor=4", "tensor_parallel_size=2"),
            "command line: tensor_parallel_size=2: 2 is for parallel.tensor, and command line "
            "says parallel.tensor: 4. Keep one",
        ),
        (
            "activation_checkpointing: true\nparallel: {remat: none}\n",
            (),
            "x.yaml:3: activation_checkpointing: true is for parallel.remat, and x.yaml:4 says "
            "parallel.remat: none. Keep one",
        ),
        (
            "data_parallel_size: 4\nparallel: {data: 2}\n",
            (),
            "x.yaml:3: data_parallel_size: 4 comes to parallel.data=4, but x.yaml:4 says "
            "parallel.data: 2. Keep one",
        ),
        (
            "zero_stage: 1\nparallel: {zero_stage: 2, fsdp: 2}\n",
            (),
            "x.yaml:3: zero_stage: 1 comes to parallel.zero_stage=1, but x.yaml:4 says "
            "parallel.zero_stage: 2. Keep one",
        ),
        (
            "zero_stage: 3\nparallel: {fsdp: 1}\n",
            (),
            "x.yaml:3: zero_stage: 3 shards over devices, but x.yaml:4 says parallel.fsdp: 1",
        ),
    ],
)
def test_two_names_that_say_different_things_are_both_named(tmp_path, text, overrides, says):
    assert refusal(tmp_path, BASE + text, overrides) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hidden_size: big\n", "hidden_size (model.embed_dim): takes whole number >= 1; got the"),
        ("lr: .nan\n", "lr: .nan is not a finite number"),
        ("gradient_checkpointing: 1\n", "takes true, false, full, selective, none; got 1. In word"),
        ("recompute_granularity: block\n", "takes true, false, full, selective, none; got block."),
        ("lr_scheduler_type: linear\n", "takes cosine, constant, constant_with_warmup, wsd, WSD, "),
        ("torch_dtype: float16\n", "torch_dtype: takes bfloat16, float32; got float16."),
        ("zero_stage: 1\n", "zero_stage: 1 needs a number of devices. parallel.fsdp=N cuts state"),
        ("zero_stage: 3\n", "parallel.zero_stage=1 the optimizer's, 2 also summed gradients, 3 a"),
        ("zero_stage: true\n", "zero_stage: takes 0, 1, 2 or 3; got true"),
        ("zero_stage: 4\n", "zero_stage: takes 0, 1, 2 or 3; got 4"),
        ("use_flash_attn: false\n", "use_flash_attn: takes true; got false."),
        ("data_parallel_size: 0\n", "data_parallel_size: takes whole number >= 1; got 0"),
        ("data_parallel_size: 6\nexpert_parallel_size: 4\n", "which does not divide 6"),
        ("micro_batch_size: 4\n", "micro_batch_size: counts the rows of one device, so the batch"),
        ("micro_batch_size: 3\ndata_parallel_size: 1\n", "= 3 do not divide train.batch_size=8"),
        (
            "micro_batch_size: 3\ngradient_accumulation_steps: 2\n",
            "does not divide train.batch_siz",
        ),
        ("preset: tiny-mla-moe\nnum_key_value_heads: 4\n", "the model has latent attention"),
        ("hiden_size: 64\n", "unknown key. Did you mean hidden_size, which is model.embed_dim her"),
        (
            "parallel: {hidden_size: 64}\n",
            "`hidden_size` is model.embed_dim here, or `hidden_size`",
        ),
        ("model: {num_hidden_layers: 2}\n", "unknown key. Did you mean model.num_layers?"),
    ],
)
def test_what_a_word_cannot_mean_here_is_refused_by_name(tmp_path, text, says):
    base = BASE if "preset" not in text else BASE.partition("\n")[2]
    message = refusal(tmp_path, base + text)
    assert says in message
    assert message.count("\n") == 0


def test_a_refused_word_is_the_only_thing_said(tmp_path):
    """The batch that nobody can work out for another reason is not called missing as well."""
    text = flat({**FLAT, "zero_stage": 4})
    message = refusal(tmp_path, text)
    assert message.startswith("x.yaml:16: zero_stage: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"micro_batch_size": 4, "data_parallel_size": 2}, (8, 1, 2)),
        ({"micro_batch_size": 2, "data_parallel_size": 2}, (8, 2, 2)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 2}, (8, 2, 2)),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 2}, (8, 2, 1)),
        ({"gradient_accumulation_steps": 4}, (8, 4, "auto")),
    ],
)
def test_rows_of_a_device_fit_the_batch_or_make_it(tmp_path, words, expected):
    """rows of one device x micro-batches x devices with rows of their own = the batch."""
    cfg = load(written(tmp_path, BASE + flat(words)))
    found = (cfg.train.batch_size, cfg.parallel.num_microbatches, cfg.parallel.data)
    assert found == expected


def test_replicas_count_every_device_that_has_rows_of_its_own(tmp_path):
    text = BASE + "data_parallel_size: 8\nexpert_parallel_size: 2\nparallel: {fsdp: 2}\n"
    cfg = load(written(tmp_path, text))
    assert (cfg.parallel.data, cfg.parallel.fsdp, cfg.parallel.expert) == (2, 2, 2)


@pytest.mark.parametrize(
    ("stage", "words", "expected"),
    [
        # A launcher counts every replica as a device that shares; stage 0 shares nothing.
        (0, "data_parallel_size: 8\n", (0, 8, 1)),
        (1, "data_parallel_size: 8\n", (1, 1, 8)),
        (2, "data_parallel_size: 3\n", (2, 1, 3)),
        (3, "data_parallel_size: 8\nexpert_parallel_size: 2\n", (3, 1, 4)),
        # Beside a number of devices, that is what the state is cut over.
        (2, "data_parallel_size: 8\nparallel: {fsdp: 4}\n", (2, 2, 4)),
        (0, "data_parallel_size: 8\nparallel: {fsdp: 4}\n", (0, 2, 4)),
    ],
)
def test_a_launchers_stage_cuts_over_its_replicas(tmp_path, stage, words, expected):
    parallel = load(written(tmp_path, BASE + f"zero_stage: {stage}\n{words}")).parallel
    assert (parallel.zero_stage, parallel.data, parallel.fsdp) == expected


def test_a_stage_beside_a_number_of_devices_is_reported_with_it(tmp_path):
    loaded = trace(written(tmp_path, BASE + "zero_stage: 2\nparallel: {fsdp: 4}\n"))
    assert (loaded.config.parallel.fsdp, loaded.config.parallel.data) == (4, "auto")
    assert loaded.aliases == {"zero_stage": "parallel.zero_stage=2, parallel.fsdp=4"}


def test_a_value_worked_out_knows_the_word_it_came_from(tmp_path):
    loaded = trace(written(tmp_path, flat(FLAT)))
    assert loaded.sources["model.gqa.head_dim"].endswith("x.yaml:3, num_attention_heads")
    assert loaded.sources["train.batch_size"].endswith("x.yaml:13, micro_batch_size")
    assert loaded.aliases["num_attention_heads"] == (
        "model.num_heads=8, model.gqa.num_kv_heads=8, model.gqa.head_dim=32"
    )
    assert "no key" in loaded.aliases["use_flash_attn"]
    assert loaded.aliases.keys() == FLAT.keys()


def test_heads_that_do_not_divide_the_width_ask_for_their_own(tmp_path):
    text = flat({**FLAT, "num_attention_heads": 7})
    assert "7 does not divide hidden_size=256" in refusal(tmp_path, text)
    assert load(written(tmp_path, text + "head_dim: 32\n")).model.gqa.head_dim == 32


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("lr_1e-4.yaml", 1e-4),
        ("lr_3E-4.yaml", 3e-4),
        ("eps_1e-06.yaml", 1e-6),
        ("lr_quoted.yaml", 'takes number > 0; got the text "1e-4". Remove the quotes'),
        ("null.yaml", "takes number > 0; got nothing (~)"),
        ("nan.yaml", ".nan is not a finite number"),
    ],
)
def test_a_case_in_a_launchers_word_is_its_number_or_refused_by_it(tmp_path, file, expected):
    text = (S16 / file).read_text()
    word = text.partition(":")[0]
    path = written(tmp_path, text + BASE)
    if isinstance(expected, float):
        assert value_at(load(path), ALIASES[word].key) == expected
        return
    message = refusal(tmp_path, text + BASE)
    assert message.startswith(f"x.yaml:1: {word}")
    assert expected in message


def test_no_word_is_a_key_of_ours_and_each_names_one():
    keys = catalog()
    top = {*keys.children("")}
    assert not top & ALIASES.keys()
    assert {a.key for a in ALIASES.values() if a.key} <= keys.rows.keys()


def test_the_guide_lists_every_word_with_its_key():
    cells = re.findall(r"^\| (`.*?) \| (.*?) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {word: key for words, key in cells for word in re.findall(r"`(\w+)`", words)}
    assert listed.keys() == ALIASES.keys()
    assert all(f"`{a.key}`" in listed[word] for word, a in ALIASES.items() if a.key)
