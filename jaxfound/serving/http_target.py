"""A server that speaks OpenAI's completions, as the target of a load: a small client of our own."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxfound.config.schema import ConfigError
from jaxfound.serving.load_plan import Shot
from jaxfound.serving.loadgen import News, TargetError

# One line of an answer: an event with log-probabilities is the longest.
MAX_LINE_BYTES = 1 << 20
DATA = b"data: "


@dataclass(frozen=True)
class HttpTarget:
    """A server at an address, asked over a connection of its own for each request.

    Attributes:
        url: of the server, e.g. `http://127.0.0.1:8000`.
        model: what requests call the model.
        api_key: sent where there is one.
        temperature: of the draws.
    """

    url: str
    model: str
    api_key: str | None = None
    temperature: float = 0.0

    async def send(self, shot: Shot) -> AsyncGenerator[News]:
        """Send a request; TargetError if it is refused or broken off."""
        body = {
            "model": self.model,
            "prompt": list(shot.prompt),
            "max_tokens": shot.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found = lines(self.url, "/v1/completions", body, api_key=self.api_key)
        async with aclosing(found) as answer:
            async for line in answer:
                for news in news_of(line):
                    yield news


def news_of(line: bytes) -> list[News]:
    """Return what a line of a stream tells; TargetError if it tells of an error."""
    if not line.startswith(DATA) or line == DATA + b"[DONE]":
        return []
    found = json.loads(line.removeprefix(DATA))
    if "error" in found:
        raise TargetError(found["error"].get("code") or "error")
    # How many tokens an event holds is not told; the last one tells the sum.
    news = [News(1 if choice["text"] else 0) for choice in found["choices"]]
    usage = found.get("usage")
    if usage is not None:
        news.append(News(0, usage["completion_tokens"], usage.get("queue_s")))
    return news


async def ask(url: str, path: str, *, api_key: str | None = None) -> dict[str, object]:
    """Return the JSON that a server answers at a path.

    Raises:
        TargetError: it does not answer, or not with JSON.
    """
    raw = b"".join([line async for line in lines(url, path, None, api_key=api_key)])
    try:
        return json.loads(raw)
    except ValueError as error:
        raise TargetError(f"{url}{path} does not answer with JSON") from error


async def lines(
    url: str, path: str, body: object, *, api_key: str | None = None
) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer; a GET without a body, else a POST.

    HTTP 1.0, in which an answer ends with its connection.

    Raises:
        TargetError: no connection, a status other than 200, or an end in the middle.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=secure, limit=MAX_LINE_BYTES
        )
    except OSError as error:
        raise TargetError(f"no connection: {error.strerror or error}") from error
    try:
        writer.write(_head(parts.netloc, path, body, api_key=api_key))
        await writer.drain()
        status = (await reader.readline()).split()
        while (await reader.readline()).strip():
            pass
        if len(status) < 2 or status[1] != b"200":
            code = status[1].decode("ascii", "replace") if len(status) > 1 else "no answer"
            raise TargetError(f"status {code}")
        while line := await reader.readline():
            yield line.rstrip(b"\r\n")
    except (OSError, ValueError) as error:
        raise TargetError("connection lost") from error
    finally:
        writer.close()


def _head(host: str, path: str, body: object, *, api_key: str | None) -> bytes:
    raw = b"" if body is None else json.dumps(body).encode("utf-8")
    heads = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.0",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    ]
    if api_key is not None:
        heads.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*heads, "", ""]).encode("utf-8") + raw
