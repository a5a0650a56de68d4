"""The server on a real port: clients that leave, pieces that come at once, limits, the end."""

import asyncio
import itertools
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from jaxfound.config import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.serving.http_target import HttpTarget, ask
from jaxfound.serving.listen import HttpServer, bind
from jaxfound.serving.load_plan import Shot
from jaxfound.serving.loadgen import TargetError, run_load
from tests.serving.scripted import GREEDY, RIVER, post, scripted_app

DEADLINE_S = 20.0


@contextmanager
def running(**keys):
    """A server with a scripted engine in a thread: the engine, the port, the server."""
    cfg = keys.pop("cfg", None) or ServeConfig(max_body_bytes=20_000)
    front, app = scripted_app(cfg=cfg, **keys)
    there, ready = bind("127.0.0.1", 0), threading.Event()
    server = HttpServer(app, front, cfg=cfg, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [there]})
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield front, there.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def live():
    with running() as there:
        yield there


def begin(port, body):
    """A socket on which a request was sent and nothing was read."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n"
    there = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    there.sendall(head.encode() + raw)
    return there


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_who_leaves_before_the_first_token_cancels_all_of_it(live, body):
    front, port, _ = live
    front.cancelled.clear()
    front.held = asyncio.Event()
    there = begin(port, {**GREEDY, **body})
    until(lambda: len(front.open) == body.get("n", 1))
    there.close()
    until(lambda: not front.open)
    front.held = None
    assert len(front.cancelled) == body.get("n", 1)


def test_who_leaves_in_the_middle_of_a_stream_cancels_it(live):
    front, port, _ = live
    front.cancelled.clear()
    front.delay_s = 0.05
    there = begin(port, {**GREEDY, "stream": True})
    assert b"200 OK" in there.recv(65536)
    there.close()
    until(lambda: not front.open)
    front.delay_s = 0.0
    assert len(front.cancelled) == 1


def test_pieces_are_sent_when_they_are_there(live, monkeypatch):
    front, port, _ = live
    numbers, going = itertools.count(), threading.Event()

    async def pause():
        # Four of eight tokens come, and the others when those have been read.
        number = next(numbers)
        while number >= 4 and not going.is_set():
            await asyncio.sleep(0.005)

    monkeypatch.setattr(front, "pause", pause)
    there, seen = begin(port, {**GREEDY, "stream": True}), b""
    while b" ri" not in seen:
        seen += there.recv(65536)
    assert b"[DONE]" not in seen
    going.set()
    while b"[DONE]" not in seen:
        seen += there.recv(65536)
    there.close()


def test_a_body_that_never_ends_is_cut_off_and_the_server_lives(live):
    _, port, _ = live
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000000\r\n\r\n"
    there = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    there.sendall(head)
    # More than the server is willing to read away: it closes, at some point of these.
    with suppress(OSError):
        for _ in range(200):
            there.sendall(b" " * 20_000)
        pytest.fail("the server read all of it")
    there.close()
    assert post(port, GREEDY)[0] == 200


def test_a_body_of_several_limits_is_answered_with_413(live):
    _, port, _ = live
    status, answer = post(port, b" " * 150_000)
    assert (status, answer["error"]["code"]) == (413, "body_too_long")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["tls", "long header", "negative length", "bad chunk", "half a body"],
)
def test_what_is_not_http_does_no_harm(live, raw):
    front, port, _ = live
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as there:
        there.sendall(raw)
        there.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            answer = there.recv(65536)
    assert b" 500 " not in answer
    assert post(port, GREEDY)[1]["choices"][0]["text"] == RIVER
    assert not front.open


def test_a_soak_of_all_kinds_of_clients_leaves_nothing_open(live):
    front, port, _ = live
    front.delay_s = 0.001
    statuses = []

    def client(number):
        for i in range(10):
            kind = (number + i) % 5
            if kind == 0:
                begin(port, {**GREEDY, "stream": True, "n": 2}).close()
            elif kind == 1:
                statuses.append(post(port, b"{" * 50)[0])
            elif kind == 2:
                statuses.append(post(port, b" " * 30_000)[0])
            elif kind == 3:
                there = begin(port, {**GREEDY, "stream": True})
                there.recv(400)
                there.close()
            else:
                status, answer = post(port, GREEDY)
                statuses.append(status)
                assert answer["choices"][0]["text"] == RIVER

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    until(lambda: not front.open)
    front.delay_s = 0.0
    assert set(statuses) == {200, 400, 413}
    assert len(statuses) == 8 * 10 * 3 // 5


def test_an_end_lets_running_requests_finish_and_takes_no_more():
    with running(delay_s=0.05) as (front, port, server):
        there = begin(port, {**GREEDY, "stream": True})
        seen = there.recv(65536)
        server.should_exit = True
        until(lambda: front.draining)
        while chunk := there.recv(65536):
            seen += chunk
        there.close()
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in seen.decode().splitlines()
            if line.startswith("data: {")
        )
        assert text == RIVER
        assert "[DONE]" in seen.decode()
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection(("127.0.0.1", port), timeout=1.0)


def test_an_end_tells_those_whom_it_cannot_wait_for():
    with running(cfg=ServeConfig(drain_timeout_s=0.2)) as (front, port, server):
        front.held = asyncio.Event()
        there = begin(port, GREEDY)
        until(lambda: front.open)
        server.should_exit = True
        answer = there.recv(65536)
        there.close()
    assert b"503" in answer.split(b"\r\n")[0]
    assert b"cancelled" in answer


def test_a_port_that_is_taken_is_said_before_anything_is_loaded():
    with bind("127.0.0.1", 0) as there:
        there.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port"):
            bind("127.0.0.1", there.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("192.0.2.1", 8000)


def test_a_load_over_http_counts_what_the_engine_made(live):
    _, port, _ = live
    target = HttpTarget(f"http://127.0.0.1:{port}", "m")
    planned = [Shot(i, 0.0, (0, 392), 20) for i in range(6)]
    planned += [Shot(6, 0.0, (5,) * 13, 2), Shot(7, 0.0, (5,) * 200, 2)]
    shown = asyncio.run(run_load(target, planned, concurrency=3, limit_s=DEADLINE_S))
    assert [each.num_tokens for each in shown] == [8] * 6 + [0, 0]
    assert [each.error for each in shown] == [""] * 6 + ["status 400"] * 2
    info = asyncio.run(ask(target.url, "/tokenizer_info"))
    assert info["vocab_size"] == 400


def test_a_server_that_is_not_there_is_a_failure_and_no_exception():
    with bind("127.0.0.1", 0) as there:
        url = f"http://127.0.0.1:{there.getsockname()[1]}"
        planned = [Shot(0, 0.0, (5,), 2)]
        (shown,) = asyncio.run(
            run_load(HttpTarget(url, "m"), planned, concurrency=1, limit_s=DEADLINE_S)
        )
        assert shown.error.startswith("no connection")
        with pytest.raises(TargetError):
            asyncio.run(ask(url, "/tokenizer_info"))
