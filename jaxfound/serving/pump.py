"""The engine behind asyncio: one thread steps it, each consumer gets its own stream of news."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from jaxfound.serving.engine import Engine
from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.request import Output, Request

log = logging.getLogger(__name__)

# While requests drain, how often it is looked whether they have ended.
DRAIN_POLL_S = 0.02
DEAD = "the engine is dead; the server's log says why"


class Mailbox(NamedTuple):
    """Where news of a request go. The pump holds it; the consumer holds the stream around it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[Output]
    deadline: float


class Command(NamedTuple):
    """What the stepping thread is asked for."""

    kind: Literal["add", "cancel"]
    mailbox: Mailbox


class Stream:
    """News of one request, for `async for`; ends after the output that has a finish reason.

    A stream that is closed, cancelled while it waits, or dropped cancels its request, which then
    gives its pages back before the next step.
    """

    def __init__(self, mailbox: Mailbox, *, ask: Callable[[Command], None]) -> None:
        self._mailbox = mailbox
        self._ask = ask
        self._ended = False

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.news.get()
        except asyncio.CancelledError:
            self._cancel()
            raise
        self._ended = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; no news follow."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._ask(Command("cancel", self._mailbox))


class Pump:
    """Runs an engine's steps in a thread of its own, while there is work.

    Args:
        engine: nothing else may call it from now on.
        request_timeout_s: after it a request ends with finish_reason "timeout".
        clock: seconds, never backwards.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._max_open = engine.max_open
        self._timeout_s = request_timeout_s
        self._clock = clock
        # Guards what follows; held for moments only, so that the event loop may wait for it.
        self._changed = threading.Condition()
        self._open: dict[str, Mailbox] = {}
        self._commands: deque[Command] = deque()
        self._refusal: str | None = "the engine has not been started"
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engine(self) -> Engine:
        """The engine; only its read-only members may be used."""
        return self._engine

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and the engine can run steps."""
        return self._thread.is_alive() and self._engine.healthy

    @property
    def accepting(self) -> bool:
        """Whether a request would be taken, were there room."""
        return self._refusal is None and self.healthy

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._open)

    def start(self) -> None:
        """Start the thread; from now on requests are taken."""
        self._refusal = None
        self._thread.start()

    def stream(self, request: Request) -> Stream:
        """Take a request and return its news. Called in a running event loop.

        Raises:
            RequestError: the request can never be served.
            UnavailableError: too many are open, or the engine is draining, closed or dead.
        """
        self._engine.check(request)
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(request, loop, asyncio.Queue(), self._clock() + self._timeout_s)
        self._admit(mailbox)
        return Stream(mailbox, ask=self._ask)

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests, wait for the open ones, cancel the rest; how many were cancelled.

        Args:
            timeout_s: longest wait before the rest is cancelled.
        """
        self._refusal = "the server is shutting down"
        end = self._clock() + timeout_s
        while self._open and self.healthy and self._clock() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        with self._changed:
            rest = list(self._open.values())
            self._commands.extend(Command("cancel", mailbox) for mailbox in rest)
            self._changed.notify()
        while self._open and self.healthy:
            await asyncio.sleep(DRAIN_POLL_S)
        return len(rest)

    def close(self) -> None:
        """End all requests with "cancelled" and stop the thread, after the step that it is in."""
        with self._changed:
            self._refusal = "the server is closed"
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _admit(self, mailbox: Mailbox) -> None:
        id = mailbox.request.id
        with self._changed:
            if not self.accepting:
                raise UnavailableError(self._refusal or DEAD)
            if len(self._open) >= self._max_open:
                raise UnavailableError(
                    f"{len(self._open)} requests are open, the most that may run and wait: "
                    "try again later"
                )
            if id in self._open:
                raise UnavailableError(f"request {id!r} is being served already")
            self._open[id] = mailbox
            self._commands.append(Command("add", mailbox))
            self._changed.notify()

    def _ask(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                self._deliver(self._engine.step())
            for id in tuple(self._open):
                self._engine.cancel(id)
            self._deliver(self._engine.step())
        finally:
            # Also where a step failed in a way that nobody foresaw: no consumer waits for ever.
            self._end_all()

    def _wait(self) -> bool:
        """Wait until there is work; False when it is time to stop."""
        with self._changed:
            while not (self._closing or self._commands or self._engine.has_work):
                self._changed.wait()
            return not self._closing

    def _obey(self) -> None:
        """Add and cancel what was asked for since the last step; end what is too old."""
        with self._changed:
            commands, self._commands = self._commands, deque()
            now = self._clock()
            late = [m.request.id for m in self._open.values() if m.deadline <= now]
        for kind, mailbox in commands:
            if kind == "add":
                self._add(mailbox.request)
            elif self._open.get(mailbox.request.id) is mailbox:
                self._engine.cancel(mailbox.request.id)
        for id in late:
            self._engine.cancel(id, reason="timeout")

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except (RequestError, UnavailableError) as error:
            # It was checked when it was taken; since then the engine may have died.
            self._deliver([Output(request.id, finish_reason="error", error=str(error))])

    def _deliver(self, outputs: list[Output]) -> None:
        """Hand outputs to their streams, one call of each event loop."""
        if not outputs:
            return
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Output]]] = {}
        with self._changed:
            for output in outputs:
                mailbox = self._open[output.id]
                if output.finish_reason is not None:
                    del self._open[output.id]
                mail.setdefault(mailbox.loop, []).append((mailbox, output))
        for loop, news in mail.items():
            # A loop that is closed has no consumers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put, news)

    def _end_all(self) -> None:
        """Tell whoever still waits that nothing will come."""
        with self._changed:
            cancelled, self._closing = self._closing, True
            self._refusal = self._refusal or DEAD
            ids = list(self._open)
        last = Output("", finish_reason="cancelled")
        if not cancelled:
            log.error("engine.died", extra={"open_requests": len(ids)})
            last = Output("", finish_reason="error", error=DEAD)
        self._deliver([replace(last, id=id) for id in ids])


def _put(news: list[tuple[Mailbox, Output]]) -> None:
    for mailbox, output in news:
        mailbox.news.put_nowait(output)
