"""`jaxfound serve` and `jaxfound bench serve`, from the command line to the last line printed."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxfound.cli.main import main
from tests.serving.script_server import DEADLINE_S, overrides, script_model
from tests.serving.scripted import GREEDY, RIVER
from tests.serving.test_server_live import running

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COMMAND = [sys.executable, "-m", "jaxfound.cli.main"]


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process: its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level, **_: None)

    def run(*args):
        with pytest.raises(SystemExit) as left:
            main([str(arg) for arg in args])
        return left.value.code or 0, capsys.readouterr()

    return run


def ask(port, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        body = {**GREEDY, "model": "script_model"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_command_serves_until_it_is_told_to_stop(here, monkeypatch):
    answers = []

    def listen_for_a_while(there, server):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [there]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
        port = there.getsockname()[1]
        answers.append(ask(port)[0])
        answers.append(ask(port, {"Authorization": "Bearer secret"}))
        server.should_exit = True
        thread.join(DEADLINE_S)

    monkeypatch.setattr("jaxfound.serving.run.listen", listen_for_a_while)
    monkeypatch.setenv("JAXFOUND_API_KEY", "secret")
    code, said = here("serve", script_model(), *overrides(), "--port", 0)
    assert code == 0, said.err
    assert re.search(r"listening on http://127\.0\.0\.1:\d+", said.out)
    assert "up to 4 requests at once, 128 tokens each; 64 pages of 2" in said.out
    refused, (status, answer) = answers
    assert (refused, status) == (401, 200)
    assert answer["choices"][0]["text"] == RIVER


def test_an_engine_is_measured_in_this_process(here, tmp_path):
    code, said = here(
        *("bench", "serve", script_model(), *overrides(), "--concurrency", 2, "--rate", "200"),
        *("--requests", 6, "--prompt-tokens", "4-20", "--output-tokens", 5, "--out", "found.json"),
        *("--first-limit-ms", 60_000, "--png", "found.png"),
    )
    assert code == 0, said.err
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["serve"]["num_pages"] == 64
    closed, opened = (each["found"] for each in found["loads"])
    for each in (closed, opened):
        assert (each["num_requests"], each["failures"], each["good_share"]) == (6, {}, 1.0)
        assert each["token_rate"] * each["duration_s"] == pytest.approx(30)
        assert each["first_token_s"]["p50"] > 0
        assert each["queue_s"]["p50"] >= 0
    assert (closed["name"], opened["name"]) == ("2 clients", "200 requests/s")
    assert "2 clients: 6 requests" in said.out
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_is_measured_over_http(here, tmp_path):
    with running() as (front, port, _):
        url = f"http://127.0.0.1:{port}/v1"
        args = ("bench", "serve", "--url", url, "--requests", 4, "--output-tokens", 3)
        code, said = here(*args, "--concurrency", 2, "--prompt-tokens", 9, "--out", "a.json")
        assert code == 0, said.err
        found = json.loads((tmp_path / "a.json").read_text("utf-8"))
        assert (found["target"], found["model"]) == ("http", "m")
        assert found["loads"][0]["found"]["queue_s"]["p50"] == 0.25
        assert all(len(request.prompt) == 9 for request in front.asked)
        # The engine refuses prompts of thirteen: the warm-up ends it before anything is measured.
        code, said = here(*args, "--concurrency", 2, "--prompt-tokens", 13)
        assert code == 2
        assert "the first request of the warm-up failed: status 400" in said.err
        front.healthy = False
        code, said = here(*args, "--rate", 5)
        assert (code, "status 503" in said.err) == (2, True)


@pytest.mark.parametrize(
    "model", ["deepseek-v2-lite", CONFIGS / "deepseek-v2-lite.yaml"], ids=["preset", "file"]
)
def test_a_plan_needs_no_weights(here, model):
    code, said = here("serve", model, "serve.max_length=4096", "--plan", "h200")
    assert code == 0, said.err
    # As tests/serving/test_capacity.py works out by hand.
    assert "52,374 pages of 64 tokens" in said.out


REFUSED = [
    (("serve", "deepseek-v2-lite", "--plan", "foo"), "foo"),
    (("serve", "deepseek-v2-lite", "--plan", "h200", "--load", "64"), "--load 64"),
    (("serve", "nowhere", "--plan", "h200"), "neither a run"),
    (("serve", "nowhere"), "neither a run"),
    (("serve", "nowhere", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    (("serve", "nowhere", "--api-key", ""), "the API key is empty"),
    (("bench", "serve", "--rate", "1"), "name either MODEL"),
    (("bench", "serve", "a", "--url", "http://b", "--rate", "1"), "name either MODEL"),
    (("bench", "serve", "a", "--concurrency", "x"), "take numbers"),
    (("bench", "serve", "a", "--rate", "nan"), "above 0, and finite"),
    (("bench", "serve", "a"), "say what load"),
    (("bench", "serve", "a", "--rate", "1", "--prompt-tokens", "0"), "is no length"),
    (("bench", "serve", "--url", "ftp://a", "--rate", "1"), "is no address"),
    (("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1"), "no connection"),
]


@pytest.mark.parametrize(("args", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be_done_is_one_error_and_exit_code_2(here, args, named):
    args = (*args, "--port", "0") if args[0] == "serve" else args
    code, said = here(*args)
    assert code == 2
    assert said.err.startswith("error: ")
    assert named in said.err


def test_a_wrong_size_is_named_before_anything_is_compiled(here):
    code, said = here("serve", script_model(), "serve.max_row=3", "--port", 0)
    assert (code, "serve.max_rows" in said.err) == (2, True)
    code, said = here("serve", script_model(), "serve.max_length=129", "--port", 0)
    assert (code, "max_positions=128" in said.err) == (2, True)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_lets_running_requests_end_and_exits_with_0(tmp_path, number):
    args = [*COMMAND, "serve", str(script_model()), *overrides(), "--port", "0"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        args, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if "listening on" in line)
        port = int(line.rsplit(":", 1)[1])
        body = {"prompt": "<|r0|>", "max_tokens": 126, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        process.send_signal(number)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "stopped" in out
