"""An engine that answers by script: the server's tests need no model."""

import asyncio
import http.client
import json
from dataclasses import dataclass, field
from pathlib import Path

from jaxfound.config.serve import ServeConfig
from jaxfound.data import load_tokenizer
from jaxfound.data.chat_template import ChatTemplate
from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.request import Output, TokenLogprobs
from jaxfound.serving.served import ServedModel
from jaxfound.serving.server import make_app
from jaxfound.serving.server_metrics import ServerMetrics
from jaxfound.serving.stopping import StoppingText

DATA = Path(__file__).resolve().parent.parent / "data"
EXPECTED = json.loads((DATA / "S21" / "expected.json").read_text("utf-8"))
SCRIPTS = {tuple(row["prompt_ids"]): row for row in EXPECTED["scripts"].values()}
CONTEXT = 128
RIVER = " river mill bridge market boat"
GREEDY = {"model": "m", "prompt": "<|r0|>", "temperature": 0, "max_tokens": 20}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def served_model(**changes):
    tokenizer = load_tokenizer(str(DATA / "S21" / "script_model"))
    template = ChatTemplate(TEMPLATE, place="test", tokens=tokenizer.template_tokens)
    keys = {"name": "m", "start": tokenizer.prompt_start, "template": template, **changes}
    return ServedModel(tokenizer=tokenizer, max_length=CONTEXT, **keys)


@dataclass(eq=False)
class ScriptedStream:
    """Outputs of one request, an id each; what is cancelled is told to the front."""

    front: "ScriptedFront"
    request: object
    outputs: list
    ended: bool = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.ended:
            raise StopAsyncIteration
        await self.front.pause()
        output = self.outputs.pop(0)
        if output.finish_reason is None and self.front.stopped is not None:
            output = Output(output.id, finish_reason=self.front.stopped, error="it broke")
        if output.finish_reason is not None:
            self.close()
        return output

    async def aclose(self):
        if not self.ended:
            self.front.cancelled.append(self.request.id)
            self.close()

    def close(self):
        self.ended = True
        self.front.open.discard(self.request.id)


@dataclass
class ScriptedFront:
    """Holds what an engine would: who is open, who was cancelled.

    Attributes:
        delay_s: before every output.
        held: no output comes while this is set to a fresh event.
        max_open: requests taken at once.
        stopped: finish reason of everything from now on.
    """

    tokenizer: object
    delay_s: float = 0.0
    held: asyncio.Event | None = None
    max_open: int = 100
    stopped: str | None = None
    healthy: bool = True
    draining: bool = False
    open: set = field(default_factory=set)
    cancelled: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    @property
    def accepting(self):
        return self.healthy and not self.draining

    @property
    def num_running(self):
        return len(self.open)

    async def pause(self):
        if self.held is not None:
            await self.held.wait()
        await asyncio.sleep(self.delay_s)

    def stream(self, request):
        if not self.accepting:
            raise UnavailableError("the server is shutting down")
        if len(request.prompt) == 13:
            raise RequestError("13 tokens never fit")
        if len(self.open) >= self.max_open:
            raise UnavailableError("too many requests are open")
        self.asked.append(request)
        self.open.add(request.id)
        return ScriptedStream(self, request, list(self.outputs(request)))

    async def drain(self, timeout_s):
        self.draining = True
        end = asyncio.get_running_loop().time() + timeout_s
        while self.open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        rest, self.stopped = len(self.open), "cancelled"
        if self.held is not None:
            self.held.set()
        return rest

    def outputs(self, request):
        """The script of the prompt, or its ids backwards, as an engine would tell it."""
        row = SCRIPTS.get(request.prompt)
        ids = row["ids"] if row else list(reversed(request.prompt))
        text, counts = StoppingText(self.tokenizer, request.stop), {}
        if request.prompt_logprobs:
            found = (None, *(logprobs_of(t, request.logprobs) for t in request.prompt[1:]))
            yield Output(request.id, prompt_logprobs=found, num_prompt_tokens=len(request.prompt))
        for number, token in enumerate(ids, 1):
            counts = {
                "num_prompt_tokens": len(request.prompt),
                "num_cached_tokens": 1,
                "num_completion_tokens": number,
                "queue_s": 0.25,
            }
            piece = text.push(token)
            end = "stop" if text.stopped else "length" if number == request.max_tokens else None
            piece += text.finish() if end else ""
            asked = request.logprobs is not None
            logprobs = (logprobs_of(token, request.logprobs),) if asked else ()
            yield Output(request.id, piece, (token,), logprobs, finish_reason=end, **counts)
            if end:
                return
        yield Output(request.id, text.finish(), finish_reason="stop", **counts)


def logprobs_of(token, num):
    """-0.25 for the id itself, which is the most likely one; the next ids below it."""
    top = tuple(((token + i) % 400, -0.25 - i) for i in range(num))
    return TokenLogprobs(token, -0.25, top)


def scripted_app(served=None, *, api_key=None, cfg=None, **front_keys):
    served = served or served_model()
    front = ScriptedFront(served.tokenizer, **front_keys)
    metrics = ServerMetrics(lambda: front)
    cfg = cfg or ServeConfig(max_body_bytes=20_000)
    return front, make_app(front, served, metrics, cfg=cfg, api_key=api_key)


def events(answer):
    """The objects of a streamed answer; it must end with the mark."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def complete(client, **changes):
    """The JSON of a completion that must be served."""
    answer = client.post("/v1/completions", json={**GREEDY, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(port, body, path="/v1/completions", *, timeout_s=20.0):
    """Status and JSON of an answer at a port of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
