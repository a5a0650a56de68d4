"""A model whose greedy texts are fixed and whose padded ids would win (cases S08, S21, S22)."""

import json

import pytest

from jaxfound.config.serve import ServeConfig
from jaxfound.serving import Engine, Sampling
from jaxfound.serving.request import Request
from tests.models.published import DATA, published
from tests.serving.fake_runner import run

PADDED = json.loads((DATA / "S08" / "expected.json").read_text("utf-8"))
SCRIPTED = json.loads((DATA / "S21" / "expected.json").read_text("utf-8"))
CHARACTERS = json.loads((DATA / "S22" / "expected.json").read_text("utf-8"))
NUM_IDS = PADDED["tokenizer_size"]
GREEDY = Sampling(temperature=0.0)
SERVE = ServeConfig(
    page_size=4, num_pages=64, max_rows=8, max_length=32, token_budget=32, prefill_rows=4
)


@pytest.fixture(scope="module")
def engine():
    tokenizer = str(DATA / "S08" / "script_model_padded")
    return Engine.load(published("S08/script_model_padded"), SERVE, tokenizer=tokenizer)


def pieces(engine, prompt, **fields):
    """Outputs of one greedy request, after ids as the weights want them to begin."""
    fields = {"max_tokens": 20} | fields
    ids = (*engine.start, *engine.tokenizer.encode(prompt).tolist())
    return run(engine, [Request("r", ids, sampling=GREEDY, **fields)])["r"]


def text_of(outputs):
    return "".join(output.text for output in outputs)


def test_greedy_text_passes_over_ids_that_only_pad_the_vocabulary(engine):
    assert engine.tokenizer.vocab_size == NUM_IDS < PADDED["model_vocab"]
    outputs = pieces(engine, PADDED["prompt"])
    assert [token for output in outputs for token in output.tokens] == PADDED["right_ids"]
    assert text_of(outputs) == PADDED["right_text"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 50.0},
        {"temperature": 50.0, "min_p": 0.001, "presence_penalty": 1.0},
    ],
)
def test_an_id_that_only_pads_the_vocabulary_is_never_drawn(engine, sampling):
    each = [Sampling(seed=seed, **sampling) for seed in range(200)]
    found = engine.generate(
        [PADDED["prompt"]] * len(each), max_tokens=1, sampling=each, ignore_eos=True
    )
    ids = [token for one in found for token in one.tokens]
    assert len(ids) == 200
    assert max(ids) < NUM_IDS


def test_an_id_that_only_pads_the_vocabulary_has_no_probability(engine):
    (found,) = engine.generate(
        [PADDED["prompt"]], max_tokens=4, sampling=Sampling(temperature=0.0), logprobs=20
    )
    for one in found.logprobs:
        assert one.top[0] == (one.token, one.logprob)
        assert max(token for token, _ in one.top) < NUM_IDS
        assert one.logprob > -0.01


@pytest.mark.parametrize("case", SCRIPTED["stop_cases"], ids=lambda case: case["name"])
def test_text_ends_where_a_stop_text_begins(engine, case):
    outputs = pieces(engine, case["prompt"], stop=tuple(case["stop"]))
    right = case.get("acceptable_text", [case.get("text")])
    assert text_of(outputs) in right
    assert outputs[-1].finish_reason == case["finish_reason"]
    assert outputs[-1].num_completion_tokens == sum(len(output.tokens) for output in outputs)
    # The whole text that is made at once ends there too.
    (whole,) = engine.generate([case["prompt"]], max_tokens=20, sampling=GREEDY, stop=case["stop"])
    assert whole.text == text_of(outputs)


@pytest.mark.parametrize("case", SCRIPTED["length_cases"], ids=lambda case: case["text"])
def test_text_ends_with_its_last_id(engine, case):
    outputs = pieces(engine, case["prompt"], max_tokens=case["max_tokens"])
    assert [token for output in outputs for token in output.tokens] == case["ids"]
    assert text_of(outputs) == case["text"]
    assert outputs[-1].finish_reason == case["finish_reason"]


@pytest.mark.parametrize("case", CHARACTERS, ids=lambda case: case["prompt"])
def test_a_character_is_shown_when_its_last_id_is_there(engine, case):
    outputs = pieces(engine, case["prompt"])
    shown = [text_of(outputs[: n + 1]) for n in range(len(case["ids"]))]
    assert shown == case["longest_safe_prefix_after_each_token"]
    assert text_of(outputs) == case["text"]
    marks = [output for output in outputs[:-1] if "\ufffd" in output.text]
    assert marks == []
    assert ("\ufffd" in outputs[-1].text) == case["text_has_replacement_char"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_character_that_max_tokens_cuts_ends_as_a_mark(engine, max_tokens):
    emoji = CHARACTERS[0]
    outputs = pieces(engine, emoji["prompt"], max_tokens=max_tokens)
    assert text_of(outputs) == engine.tokenizer.decode(emoji["ids"][:max_tokens])
    assert "\ufffd" in outputs[-1].text
    assert text_of(outputs[:-1]) == ""


def test_scripts_that_run_together_do_not_mix(engine):
    scripts = list(SCRIPTED["scripts"].values())
    prompts = [script["prompt"] for script in scripts] * 3
    found = engine.generate(prompts, max_tokens=20, sampling=GREEDY)
    assert [one.text for one in found] == [script["text"] for script in scripts] * 3
    assert {one.finish_reason for one in found} == {"stop"}
