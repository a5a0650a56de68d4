"""What the server refuses (case S24): every wrong field by name, and the next request is served."""

import json

import pytest
from starlette.testclient import TestClient

from tests.serving.scripted import (
    CHAT,
    DATA,
    GREEDY,
    RIVER,
    complete,
    events,
    scripted_app,
    served_model,
)

REQUESTS = json.loads((DATA / "S24" / "requests.json").read_text("utf-8"))


@pytest.mark.parametrize("case", REQUESTS, ids=lambda c: c["name"])
def test_a_bad_request_is_refused_and_the_next_one_is_served(client, case):
    answer = client.post("/v1/completions", content=case["body"].encode("utf-8", "surrogatepass"))
    served = case["expect"].startswith("200")
    assert answer.status_code == (200 if served else 404 if "unknown" in case["name"] else 400)
    if not served:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
    assert complete(client)["choices"][0]["text"] == RIVER


def test_the_refusal_of_a_long_request_names_all_three_numbers(client):
    answer = client.post("/v1/completions", json={**GREEDY, "max_tokens": 127})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for number in ("128", "2", "127", "126"):
        assert number in error["message"]
    assert complete(client, max_tokens=126)["choices"][0]["finish_reason"] == "stop"


# Each row: what is changed, the field that the refusal names.
WRONG = [
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": 101}, "temperature"),
    ({"n": 17}, "n"),
    ({"n": 1.0}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 513}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"prompt": [True, 5]}, "prompt"),
    ({"prompt": [[5], "a"] * 40}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"temprature": 0.5}, "temprature"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("changes", "param"), WRONG, ids=lambda v: str(v)[:40])
def test_a_wrong_field_is_named(client, changes, param):
    answer = client.post("/v1/completions", json={**GREEDY, **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_an_unknown_field_is_answered_with_the_nearest(client):
    answer = client.post("/v1/completions", json={**GREEDY, "temprature": 0.5})
    assert "temperature" in answer.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(client):
    complete(
        client,
        user="u",
        metadata={"a": "b"},
        suffix=None,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias=None,
        stop=None,
        best_of=1,
        seed=-1,
    )


BROKEN = [
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "x": {"y": 1, "y": 2}}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 40 + b"1" + b"}" * 41,
    b'{"prompt": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}",
    b'{"prompt": "a"} {}',
    b'{"prompt": "a", "user": "\\udc00"}',
    b'{"prompt": "a", "\\ud800": 1}',
    b"\xef\xbb\xbf{}",
    b"\x00",
]


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: repr(raw[:40]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_not_strict_json_is_refused(client, path, raw):
    answer = client.post(path, content=raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_json"


CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"max_completion_tokens": 5}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt": "a"}, "prompt"),
    ({"messages": [{"role": "user", "content": "word " * 500}]}, "prompt"),
]


@pytest.mark.parametrize(("changes", "param"), CHATS, ids=lambda v: str(v)[:40])
def test_a_wrong_chat_is_named(client, changes, param):
    answer = client.post("/v1/chat/completions", json={**CHAT, **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_model_without_a_template_says_so():
    _, app = scripted_app(served_model(template=None))
    answer = TestClient(app).post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "chat_template"


def test_what_the_engine_refuses_is_400_or_503_before_anything_is_sent(there):
    front, client = there
    assert client.post("/v1/completions", json={**GREEDY, "prompt": [5] * 13}).status_code == 400
    front.max_open = 3
    try:
        for body in ({**GREEDY, "n": 4}, {**GREEDY, "n": 4, "stream": True}):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert answer.headers["retry-after"] == "1"
            # All or nothing: those that had been taken were given back.
            assert not front.open
    finally:
        front.max_open = 100
    assert len(complete(client, n=4)["choices"]) == 4


@pytest.mark.parametrize(
    ("reason", "code"),
    [("timeout", "timeout"), ("cancelled", "cancelled"), ("error", "engine_error")],
)
def test_a_request_that_is_broken_off_is_told_as_503_or_as_an_event(reason, code):
    front, app = scripted_app()
    client = TestClient(app)
    front.stopped = reason
    for body in (GREEDY, {**GREEDY, "stream": True}, {**GREEDY, "n": 3}):
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    front.stopped = None
    outputs = front.outputs

    def broken(request):
        first, *_ = outputs(request)
        return iter([first, type(first)(request.id, finish_reason=reason, error="it broke")])

    front.outputs = broken
    first, error = events(client.post("/v1/completions", json={**GREEDY, "stream": True}))
    assert first["choices"][0]["text"] == " ri"
    assert error["error"]["code"] == code
    assert not front.open


def test_health_follows_the_engine():
    front, app = scripted_app()
    client = TestClient(app)
    assert client.get("/health").status_code == 200
    front.draining = True
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json=GREEDY).status_code == 503
    front.draining, front.healthy = False, False
    assert client.get("/health").json() == {"status": "dead"}


def test_a_key_is_asked_for_where_there_is_one():
    _, app = scripted_app(api_key="secret-ü")
    client = TestClient(app)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-ü".encode()}):
        answer = client.post("/v1/completions", json=GREEDY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/tokenizer_info", headers=headers).status_code == 401
        assert client.get("/v1/nothing", headers=headers).status_code == 401
    headers = {"authorization": b"Bearer " + "secret-ü".encode()}
    assert client.post("/v1/completions", json=GREEDY, headers=headers).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200


def test_a_long_body_is_refused_after_it_was_read(client):
    answer = client.post("/v1/completions", json={**GREEDY, "prompt": "a" * 30_000})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_long"
    complete(client)
