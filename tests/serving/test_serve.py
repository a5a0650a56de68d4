"""A model behind the whole server, over HTTP (cases S21 to S24)."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxfound.resources.checkpoint import CheckpointError
from jaxfound.serving.open_model import open_model
from tests.serving.script_server import DEADLINE_S, SIZES, running
from tests.serving.scripted import CONTEXT, DATA, EXPECTED, GREEDY, RIVER

REQUESTS = json.loads((DATA / "S24" / "requests.json").read_text("utf-8"))
CHARACTERS = json.loads((DATA / "S22" / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def live():
    with running() as there:
        yield there


def text_of(live, **changes):
    status, answer = live.post({**GREEDY, **changes})
    assert status == 200, answer
    return answer["choices"][0]["text"]


@pytest.mark.parametrize("case", EXPECTED["scripts"].values(), ids=lambda c: c["prompt"])
def test_greedy_text_is_the_script_whole_and_in_pieces(live, case):
    status, answer = live.post({**GREEDY, "prompt": case["prompt"]})
    assert status == 200
    assert answer["choices"][0]["text"] == case["text"]
    assert answer["usage"]["completion_tokens"] == len(case["ids"])
    pieces = [e["choices"][0]["text"] for e in live.stream({**GREEDY, "prompt": case["prompt"]})]
    assert "".join(pieces) == case["text"]


@pytest.mark.parametrize("case", EXPECTED["stop_cases"], ids=lambda c: c["name"])
def test_stop_texts_end_the_answer_whole_and_in_pieces(live, case):
    body = {"prompt": case["prompt"], "stop": case["stop"]}
    found = text_of(live, **body)
    assert found in case.get("acceptable_text", [case.get("text")])
    pieces = [e["choices"][0]["text"] for e in live.stream({**GREEDY, **body})]
    assert "".join(pieces) == found


@pytest.mark.parametrize("case", CHARACTERS, ids=lambda c: c["text"])
def test_nothing_is_sent_that_a_later_token_could_change(live, case):
    sent = ""
    allowed = ["", *case["longest_safe_prefix_after_each_token"], case["text"]]
    for each in live.stream({**GREEDY, "prompt": case["prompt"]}):
        sent += each["choices"][0]["text"]
        assert sent in allowed
    assert sent == case["text"]


def test_every_bad_body_is_refused_and_the_next_request_is_served(live):
    found = {}
    for case in REQUESTS:
        status, answer = live.post(case["body"].encode("utf-8", "surrogatepass"))
        found[case["name"]] = status
        if status != 200:
            assert answer["error"]["message"]
        assert text_of(live) == RIVER
    wanted = {
        c["name"]: 200 if c["expect"].startswith("200") else 404 if "model" in c["name"] else 400
        for c in REQUESTS
    }
    assert found == wanted


def test_log_probabilities_of_an_echo_are_those_of_the_drawn_tokens(live):
    """What the model gave one token after the other, it gives of them as a prompt."""
    body = {**GREEDY, "logprobs": 3, "max_tokens": 6}
    _, drawn = live.post(body)
    there = drawn["choices"][0]["logprobs"]
    ids = [0, 392, *EXPECTED["scripts"]["0"]["ids"][:6]]
    _, scored = live.post({**body, "prompt": ids, "echo": True, "max_tokens": 1})
    echoed = scored["choices"][0]["logprobs"]
    assert echoed["tokens"][2:8] == there["tokens"]
    assert echoed["token_logprobs"][2:8] == pytest.approx(there["token_logprobs"], abs=1e-4)
    assert echoed["token_logprobs"][0] is None
    assert all(max(top.values()) == lp for top, lp in zip(
        there["top_logprobs"], there["token_logprobs"], strict=True
    ))  # fmt: skip


def test_choices_with_a_seed_are_drawn_again_and_differ(live):
    body = {**GREEDY, "temperature": 2.0, "seed": 3, "n": 3, "prompt": "a", "max_tokens": 12}
    (_, first), (_, second) = live.post(body), live.post(body)
    texts = [c["text"] for c in first["choices"]]
    assert texts == [c["text"] for c in second["choices"]]
    assert len(set(texts)) == 3


def until_idle(live):
    end = time.monotonic() + DEADLINE_S
    while (now := live.engine.snapshot()).num_running or now.num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)
    return now


def begin(live, body):
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n"
    there = socket.create_connection(("127.0.0.1", live.port), timeout=DEADLINE_S)
    there.sendall(head.encode() + raw)
    return there


def leave_at_once(live, rng):
    begin(live, {**GREEDY, "stream": rng.random() < 0.5, "n": 2, "ignore_eos": True}).close()


def leave_in_the_middle(live, rng):
    there = begin(live, {**GREEDY, "stream": True, "ignore_eos": True, "max_tokens": 60})
    there.recv(rng.randrange(1, 2000))
    there.close()


def end_as_asked(live, rng):
    extra = rng.choice(
        [
            {},
            {"stop": "mill"},
            {"max_tokens": 1},
            # Exactly sixteen pages, and two that begin alike.
            {"prompt": [7] * 32},
            {"prompt": ["<|r0|>", "<|r0|>"]},
        ]
    )
    assert live.post({**GREEDY, **extra})[0] == 200


def ask_wrongly(live, rng):
    body = rng.choice([b"{", b"[]", b'{"prompt": "a", "top_p": NaN}', b" " * (1 << 21)])
    assert live.post(body)[0] in (400, 413)


def client(live, number, num_requests):
    rng = random.Random(number)
    kinds = (leave_at_once, leave_in_the_middle, end_as_asked, end_as_asked, ask_wrongly)
    for _ in range(num_requests):
        rng.choice(kinds)(live, rng)


def check_soak(live, *, num_requests):
    before = until_idle(live)
    with ThreadPoolExecutor(8) as clients:
        for each in [clients.submit(client, live, n, num_requests) for n in range(8)]:
            each.result()
    now = until_idle(live)
    assert now.pages_in_use == 0
    assert now.pages_free + now.pages_cached == before.pages_free + before.pages_cached
    assert now.num_pages == SIZES["num_pages"]
    # Every page at once, and the right text of a short request after it.
    status, answer = live.post({**GREEDY, "max_tokens": CONTEXT - 2, "ignore_eos": True})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == CONTEXT - 2
    assert text_of(live) == RIVER


def test_pages_return_whatever_three_hundred_clients_do(live):
    check_soak(live, num_requests=38)


@pytest.mark.slow
def test_pages_return_after_three_thousand_clients(live):
    check_soak(live, num_requests=375)


def test_a_queue_that_is_full_is_told_and_empties_again(live):
    # As many as may be open, each as long as the context.
    long = {**GREEDY, "max_tokens": CONTEXT - 2, "ignore_eos": True, "n": 16}
    held = [begin(live, long) for _ in range(2)]
    try:
        end = time.monotonic() + DEADLINE_S
        while live.engine.snapshot().num_running + live.engine.snapshot().num_waiting < 32:
            assert time.monotonic() < end
        status, answer = live.post(GREEDY)
        assert (status, answer["error"]["code"]) == (503, "overloaded")
    finally:
        for there in held:
            there.close()
    until_idle(live)
    # The front counts a request until it has told its end, a moment after the engine is idle.
    while live.post(GREEDY)[0] == 503:
        assert time.monotonic() < end
    assert text_of(live) == RIVER


def test_what_is_neither_a_run_nor_published_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither a run"):
        open_model(tmp_path)
