"""Answers one checked body: asks the engine, sends what comes, and stops when nobody listens."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol, runtime_checkable

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from jaxfound.serving.api_error import ApiError, bad, unavailable
from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.protocol import Asked
from jaxfound.serving.request import Output, Request
from jaxfound.serving.responses import DONE, Answer, event
from jaxfound.serving.served import ServedModel
from jaxfound.serving.server_metrics import ServerMetrics

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that would collect pieces are asked not to.
    (b"x-accel-buffering", b"no"),
]

# News of several requests, each with the number of its request.
type News = AsyncGenerator[tuple[int, Output]]


@runtime_checkable
class OutputStream(Protocol):
    """News of one request, until the one with a finish reason."""

    def __aiter__(self) -> "OutputStream": ...
    async def __anext__(self) -> Output:
        """Wait for the next news."""
        ...

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; its pages are free then."""
        ...


@runtime_checkable
class Front(Protocol):
    """What the server asks of an engine."""

    @property
    def healthy(self) -> bool:
        """Whether steps can run."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether requests are taken, were there room."""
        ...

    def stream(self, request: Request) -> OutputStream:
        """Take a request.

        Raises:
            RequestError: it can never be served.
            UnavailableError: not now.
        """
        ...

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests, wait for the open ones, cancel the rest; how many those were."""
        ...


class Reply:
    """The answer to a checked body, as an ASGI application.

    Args:
        asked: what the body asked for.
        served: the model.
        front: the engine.
        metrics: told of times and ends.
        limit_s: longest time that sending may take; a reader who is slower is left.
    """

    def __init__(
        self,
        asked: Asked,
        served: ServedModel,
        front: Front,
        metrics: ServerMetrics,
        *,
        limit_s: float,
    ) -> None:
        self._asked = asked
        self._answer = Answer(asked, served)
        self._front = front
        self._metrics = metrics
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that goes away cancels its requests."""
        send_all = self._stream(send) if self._asked.stream else self._send(scope, receive, send)
        await while_connected(receive, send_all)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(self._limit_s), self._news() as news:
            async for index, output in news:
                self._answer.take(index, output)
        await JSONResponse(self._answer.body())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send events; what fails before the first one is told by a status, later by an event."""
        begun = False
        try:
            async with asyncio.timeout(self._limit_s), aclosing(self._events()) as events:
                async for body in events:
                    begun = begun or await _begin(send)
                    await send(_piece(body))
        except (ApiError, TimeoutError) as error:
            if not begun:
                raise
            told = error if isinstance(error, ApiError) else too_slow()
            await send(_piece(event(told.body) + DONE))
        await send(_piece(b"", more=False))

    async def _events(self) -> AsyncGenerator[bytes]:
        """Yield all events, those of one moment together."""
        async with self._news() as news:
            async for index, output in news:
                if body := b"".join(self._answer.chunks(index, output)):
                    yield body
        yield b"".join(self._answer.last_chunks())

    @asynccontextmanager
    async def _news(self) -> AsyncIterator[News]:
        async with opened(self._front, self._asked.requests) as streams:
            now_s = time.monotonic()
            clocks = [self._metrics.clock(now_s) for _ in streams]

            async def timed(news: News) -> News:
                async for index, output in news:
                    clocks[index].tick(output, time.monotonic())
                    yield index, output

            async with aclosing(merged(streams)) as news, aclosing(timed(news)) as told:
                yield told


def too_slow() -> ApiError:
    """Return what is said when an answer took too long to make or to send."""
    return unavailable("the request took longer than this server allows", code="timeout")


@asynccontextmanager
async def opened(front: Front, requests: Sequence[Request]) -> AsyncIterator[list[OutputStream]]:
    """Hand all requests to the engine, or none; whatever has not ended at exit is cancelled.

    Raises:
        ApiError: 400 if one can never be served, 503 if the engine takes no more now.
    """
    streams: list[OutputStream] = []
    try:
        try:
            for request in requests:
                streams.append(front.stream(request))
        except RequestError as error:
            raise bad(str(error)) from error
        except UnavailableError as error:
            code = "overloaded" if front.accepting else "shutting_down"
            raise unavailable(str(error), code=code) from error
        yield streams
    finally:
        for stream in streams:
            await stream.aclose()


async def merged(streams: Sequence[OutputStream]) -> News:
    """Yield the news of all streams with their numbers, in order of arrival."""
    queue: asyncio.Queue[tuple[int, Output | None]] = asyncio.Queue()

    async def forward(index: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                queue.put_nowait((index, output))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, output = await queue.get()
            if output is None:
                left -= 1
                continue
            yield index, output
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; when the client goes away before it is done, break it off."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send) -> bool:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    return True


def _piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
