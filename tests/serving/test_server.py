"""The server over a scripted engine (cases S21, S22): the forms of answers, whole and in pieces."""

import json

import pytest
from starlette.testclient import TestClient

from tests.serving.scripted import (
    CHAT,
    CONTEXT,
    DATA,
    EXPECTED,
    GREEDY,
    RIVER,
    complete,
    events,
    scripted_app,
)

CHARACTERS = json.loads((DATA / "S22" / "expected.json").read_text("utf-8"))


def stream(client, path="/v1/completions", **body):
    return events(client.post(path, json={**body, "stream": True}))


def test_a_completion_has_the_form_that_clients_read(client):
    found = complete(client)
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == "m"
    assert found["choices"] == [
        {"index": 0, "text": RIVER, "logprobs": None, "finish_reason": "stop"}
    ]
    assert found["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
        "queue_s": 0.25,
    }


def test_pieces_of_a_stream_join_to_the_whole_and_end_with_reason_and_usage(client):
    options = {"include_usage": True}
    *news, usage = stream(client, **GREEDY, stream_options=options)
    assert "".join(e["choices"][0]["text"] for e in news) == RIVER
    assert [e["choices"][0]["finish_reason"] for e in news] == [None] * (len(news) - 1) + ["stop"]
    assert all(e["usage"] is None for e in news)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert len({e["id"] for e in (*news, usage)}) == 1


def test_a_stream_without_options_says_nothing_of_usage(client):
    assert all("usage" not in e for e in stream(client, **GREEDY))


@pytest.mark.parametrize("case", EXPECTED["stop_cases"], ids=lambda c: c["name"])
def test_stop_texts_are_never_sent(client, case):
    body = {**GREEDY, "prompt": case["prompt"], "stop": case["stop"]}
    allowed = case.get("acceptable_text", [case.get("text")])
    (whole,) = complete(client, **body)["choices"]
    streamed = "".join(e["choices"][0]["text"] for e in stream(client, **body))
    assert whole["text"] in allowed
    assert streamed == whole["text"]
    assert whole["finish_reason"] == case["finish_reason"]


@pytest.mark.parametrize("case", EXPECTED["length_cases"], ids=lambda c: str(c["max_tokens"]))
def test_max_tokens_ends_with_length_and_counts(client, case):
    found = complete(client, max_tokens=case["max_tokens"])
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (case["text"], "length")
    assert found["usage"]["completion_tokens"] == case["max_tokens"]


@pytest.mark.parametrize("case", CHARACTERS, ids=lambda c: c["text"])
def test_characters_of_several_tokens_are_sent_whole(client, case):
    found = stream(client, **{**GREEDY, "prompt": case["prompt"]})
    pieces = [e["choices"][0]["text"] for e in found]
    assert "".join(pieces) == case["text"]
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_several_prompts_and_choices_come_in_order_with_seeds_of_their_own(there):
    front, client = there
    front.asked.clear()
    found = complete(client, prompt=["<|r0|>", "<|r5|>"], n=2, temperature=1, seed=7)
    assert [c["index"] for c in found["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in found["choices"]] == [RIVER, RIVER, " window", " window"]
    assert [r.sampling.seed for r in front.asked] == [7, 8, 7, 8]
    # A prompt is counted once, however many continue it.
    assert found["usage"]["prompt_tokens"] == 4
    assert found["usage"]["completion_tokens"] == 2 * 8 + 2 * 3


def test_several_choices_stream_side_by_side(client):
    found = stream(client, **{**GREEDY, "prompt": ["<|r0|>", [0, 397]]})
    texts = ["", ""]
    for each in found:
        (choice,) = each["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [RIVER, " window"]
    # Both run at once: the second has begun before the first has ended.
    order = [e["choices"][0]["index"] for e in found]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)


def test_without_a_seed_the_engine_chooses_one(there):
    front, client = there
    front.asked.clear()
    complete(client, n=2)
    assert [r.sampling.seed for r in front.asked] == [None, None]


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "seed": -5,
}


def test_every_field_of_sampling_reaches_the_engine(there):
    front, client = there
    front.asked.clear()
    complete(client, **SAMPLING, logit_bias={"7": -100, "5": 2})
    (asked,) = front.asked
    assert {name: getattr(asked.sampling, name) for name in SAMPLING} == SAMPLING
    assert asked.sampling.logit_bias == ((5, 2.0), (7, -100.0))


@pytest.mark.parametrize(("body", "expected"), [({}, 1.0), ({"temperature": 1e-7}, 0.0)])
def test_temperature_is_openais_default_and_next_to_nothing_is_nothing(there, body, expected):
    front, client = there
    front.asked.clear()
    answer = client.post("/v1/completions", json={"prompt": "<|r0|>", **body})
    assert answer.status_code == 200
    assert front.asked[0].sampling.temperature == expected


def test_echo_with_logprobs_tells_of_the_prompt_and_where_each_token_begins(client):
    (choice,) = complete(client, echo=True, logprobs=2, max_tokens=2)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "<|r0|> river"
    assert found["tokens"] == ["<s>", "<|r0|>", " ri", "ver"]
    assert found["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert found["top_logprobs"][0] is None
    assert [max(top.values()) for top in found["top_logprobs"][1:]] == [-0.25] * 3
    assert all(len(top) == 2 for top in found["top_logprobs"][1:])
    assert found["text_offset"] == [0, 0, 6, 9]
    (streamed, *more) = stream(client, **GREEDY, echo=True, logprobs=2)
    assert streamed["choices"][0]["text"] == "<|r0|>"
    assert streamed["choices"][0]["logprobs"]["tokens"] == ["<s>", "<|r0|>"]
    assert more[0]["choices"][0]["logprobs"]["text_offset"] == [6]


def test_a_token_of_a_cut_character_has_a_name_of_its_own(client):
    (choice,) = complete(client, prompt="<|r1|>", logprobs=0)["choices"]
    names = choice["logprobs"]["tokens"][:4]
    assert len(set(names)) == 4
    assert all("\ufffd" not in name for name in names)


def test_a_chat_has_the_form_that_clients_read(there):
    front, client = there
    front.asked.clear()
    answer = client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 1})
    found = answer.json()
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    # The script of a prompt that is not in the case: its ids, backwards.
    prompt = front.asked[0].prompt
    words = [front.tokenizer.decode([token]) for token in prompt[:-4:-1]]
    assert choice["message"]["content"] == "".join(words)
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == words
    assert [row["top_logprobs"][0]["logprob"] for row in rows] == [-0.25] * 3
    assert [bytes(row["bytes"]).decode() for row in rows] == words
    assert front.tokenizer.decode(prompt) == "user: hi\n"
    assert prompt[0] == front.tokenizer.bos_id
    assert prompt.count(front.tokenizer.bos_id) == 1


def test_a_chat_streams_its_role_first_and_its_reason_last(client):
    first, *news, last = stream(client, "/v1/chat/completions", **CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"]["content"] for e in news)
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_a_chat_without_a_limit_may_fill_the_context(there):
    front, client = there
    front.asked.clear()
    client.post("/v1/chat/completions", json={k: v for k, v in CHAT.items() if k != "max_tokens"})
    (asked,) = front.asked
    assert len(asked.prompt) + asked.max_tokens == CONTEXT


def test_parts_of_text_are_one_message(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}]}
    assert (
        client.post("/v1/chat/completions", json=body).json()["choices"]
        == client.post("/v1/chat/completions", json=CHAT).json()["choices"]
    )


def test_models_are_listed_and_found(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", CONTEXT)
    assert client.get("/v1/models/m").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_unknown_routes_and_methods_are_errors_of_the_same_form(client):
    for answer, status in (
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/completions"), 405),
        (client.post("/v1/embeddings", json={}), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_the_tokenizer_goes_both_ways(client):
    asked = {"prompt": "<|r0|> river", "return_token_strs": True}
    found = client.post("/tokenize", json=asked).json()
    assert found["tokens"] == [0, 392, 349, 348]
    assert found["token_strs"] == ["<s>", "<|r0|>", " ri", "ver"]
    assert (found["count"], found["max_model_len"]) == (4, CONTEXT)
    bare = client.post("/tokenize", json={"prompt": " river", "add_special_tokens": False}).json()
    assert bare["tokens"] == [349, 348]
    # A client asks for the id of a token by its name; within a text it is text.
    for text, ids in (("</s>", [1]), ("</s> river", [30, 17, 85, 32, 349, 348])):
        body = {"prompt": text, "add_special_tokens": False}
        assert client.post("/tokenize", json=body).json()["tokens"] == ids
    assert client.post("/detokenize", json={"tokens": [349, 348]}).json() == {"prompt": " river"}
    chat = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"][0] == 0
    info = client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["vocab_size"]) == ("<s>", "</s>", 400)
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize("body", [{"tokens": [400]}, {"tokens": "a"}, {"tokens": [True]}, {}])
def test_ids_that_are_none_have_no_text(client, body):
    assert client.post("/detokenize", json=body).status_code == 400


def test_metrics_tell_of_answers_tokens_and_times():
    _, app = scripted_app()
    client = TestClient(app)
    client.post("/v1/completions", json=GREEDY)
    client.post("/v1/completions", json={})
    text = client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    route = 'route="/v1/completions"'
    assert lines[f'jaxfound_http_responses_total{{{route},status="200"}}'] == "1.0"
    assert lines[f'jaxfound_http_responses_total{{{route},status="400"}}'] == "1.0"
    assert lines['jaxfound_requests_total{finish_reason="stop"}'] == "1.0"
    assert lines["jaxfound_generation_tokens_total"] == "8.0"
    assert lines["jaxfound_time_to_first_token_seconds_count"] == "1.0"
    assert lines["jaxfound_inter_token_latency_seconds_count"] == "7.0"
    assert lines["jaxfound_request_queue_seconds_sum"] == "0.25"
    assert lines["jaxfound_requests_running"] == "0.0"
