"""Outputs of the engine as OpenAI's JSON, whole or in pieces."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxfound.serving.api_error import unavailable
from jaxfound.serving.logprob_json import Columns, Json, chat_rows, joined
from jaxfound.serving.protocol import Asked
from jaxfound.serving.request import Output, Request
from jaxfound.serving.served import ServedModel

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, object]) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8") + b"\n\n"


def check_ending(output: Output) -> None:
    """A continuation goes on, or has ended as asked; ApiError 503 if it was broken off."""
    if output.finish_reason == "timeout":
        raise unavailable("the request took longer than this server allows", code="timeout")
    if output.finish_reason == "cancelled":
        raise unavailable("the server is shutting down and ended the request", code="cancelled")
    if output.finish_reason == "error":
        raise unavailable(f"the engine gave up the request: {output.error}", code="engine_error")


@dataclass
class Choice:
    """One continuation, as far as it has come.

    Attributes:
        request: what was asked of the engine.
        echo: the prompt's text, as far as it is part of the answer and was not given out.
        columns: writes log-probabilities of completions.
        pieces: text given out.
        logprobs: given out, columns or rows.
        begun: whether anything was given out.
        last: newest output.
    """

    request: Request
    echo: str
    columns: Columns
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    begun: bool = False
    last: Output | None = None


class Answer:
    """Turns the outputs of a body's continuations into what is sent.

    Args:
        asked: the checked body.
        served: the model.
        now: seconds since 1970.
    """

    def __init__(self, asked: Asked, served: ServedModel, *, now: float | None = None) -> None:
        self.asked = asked
        self._served = served
        self._created = int(time.time() if now is None else now)
        self._is_chat = asked.kind == "chat"
        self._choices = [
            Choice(request, echo, Columns(served.tokenizer, request.prompt))
            for request, echo in zip(asked.requests, asked.echoes, strict=True)
        ]

    def take(self, index: int, output: Output) -> None:
        """Add news of one continuation to the whole answer; ApiError 503 if it was broken off."""
        choice = self._choices[index]
        text, logprobs = self._news(choice, output)
        choice.pieces.append(text)
        choice.logprobs += logprobs

    def body(self) -> Json:
        """Return the whole answer, once every continuation has ended."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        return {**self._head(), "choices": choices, "usage": self.usage()}

    def chunks(self, index: int, output: Output) -> Iterator[bytes]:
        """Yield events with the news of one continuation; ApiError 503 if it was broken off."""
        choice = self._choices[index]
        begun, choice.begun = choice.begun, True
        text, logprobs = self._news(choice, output)
        end = output.finish_reason
        told = bool(text or logprobs)
        if not self._is_chat:
            if told or end:
                found = joined(logprobs) if logprobs else None
                yield self._chunk(index, {"text": text}, found, end)
            return
        if not begun:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
        if told:
            rows: Json | None = {"content": logprobs, "refusal": None} if logprobs else None
            yield self._chunk(index, {"delta": {"content": text}}, rows, None)
        if end:
            yield self._chunk(index, {"delta": {}}, None, end)

    def last_chunks(self) -> Iterator[bytes]:
        """Yield the end of a stream: the counts of tokens where asked for, and the mark."""
        if self.asked.usage_chunk:
            yield event({**self._head(".chunk"), "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> Json:
        """Return the counts of tokens: every prompt once, every continuation."""
        known = [(c.request, c.last) for c in self._choices if c.last is not None]
        first = [(c.request, c.last) for c in self._choices[:: self.asked.num_choices]]
        num_prompt = sum(len(request.prompt) for request, _ in first)
        num_completion = sum(last.num_completion_tokens for _, last in known)
        num_cached = sum(last.num_cached_tokens for _, last in first if last is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            # Ours: seconds until the first step of the continuation that waited longest.
            "queue_s": max((last.queue_s for _, last in known), default=0.0),
        }

    def _news(self, choice: Choice, output: Output) -> tuple[str, list[Json]]:
        """Return new text, and new log-probabilities: columns, or the rows of a chat."""
        check_ending(output)
        choice.last = output
        text, choice.echo = choice.echo + output.text, ""
        if choice.request.logprobs is None:
            return text, []
        if self._is_chat:
            return text, chat_rows(self._served.tokenizer, output.logprobs)
        columns: list[Json] = []
        if output.prompt_logprobs:
            columns.append(choice.columns.of_prompt(output.prompt_logprobs))
        if output.logprobs:
            columns.append(choice.columns.of_tokens(output.logprobs))
        return text, columns

    def _head(self, suffix: str = "") -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self.asked.id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
        }

    def _whole(self, index: int, choice: Choice) -> Json:
        text = "".join(choice.pieces)
        asked = choice.request.logprobs is not None
        end = None if choice.last is None else choice.last.finish_reason
        if self._is_chat:
            rows = {"content": choice.logprobs, "refusal": None} if asked else None
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": rows, "finish_reason": end}
        columns = joined(choice.logprobs) if asked else None
        return {"index": index, "text": text, "logprobs": columns, "finish_reason": end}

    def _chunk(self, index: int, news: Json, logprobs: Json | None, end: str | None) -> bytes:
        choice = {"index": index, **news, "logprobs": logprobs, "finish_reason": end}
        usage: Json = {"usage": None} if self.asked.usage_chunk else {}
        return event({**self._head(".chunk"), "choices": [choice], **usage})
