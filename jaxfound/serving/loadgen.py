"""Sends a planned load at a target and measures what its clients see."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.load_plan import Shot
from jaxfound.serving.load_report import Shown
from jaxfound.serving.reply import Front
from jaxfound.serving.request import Output, Request
from jaxfound.serving.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
LATE = "not done within the time limit"


type Fire = Callable[[Shot], Awaitable[None]]


class TargetError(RuntimeError):
    """A request that was not answered; the reason in few words, which failures are counted by."""


class News(NamedTuple):
    """What came of a request.

    Attributes:
        num_tokens: in this news.
        total: tokens of the continuation so far, where the target says; else None.
        queue_s: wait for a first step, where the target says.
    """

    num_tokens: int
    total: int | None = None
    queue_s: float | None = None


@runtime_checkable
class Target(Protocol):
    """What a load is sent to."""

    def send(self, shot: Shot) -> AsyncGenerator[News]:
        """Send a request, and yield its news until it has ended.

        Raises:
            TargetError: it was not answered.
        """
        ...


@dataclass(frozen=True)
class EngineTarget:
    """An engine in this process; no HTTP in between.

    Attributes:
        front: takes requests in a running event loop.
        sampling: how tokens are drawn.
        name: begins the requests' ids.
    """

    front: Front
    sampling: Sampling = GREEDY
    name: str = "load"

    async def send(self, shot: Shot) -> AsyncGenerator[News]:
        """Send a request; TargetError if it is refused or broken off."""
        request = Request(
            id=f"{self.name}-{shot.number}",
            prompt=shot.prompt,
            max_tokens=shot.max_tokens,
            sampling=self.sampling,
            ignore_eos=True,
        )
        try:
            stream = self.front.stream(request)
        except (RequestError, UnavailableError) as error:
            raise TargetError(type(error).__name__) from error
        async with aclosing(stream):
            async for output in stream:
                check_output(output)
                yield News(len(output.tokens), output.num_completion_tokens, output.queue_s)


def check_output(output: Output) -> None:
    """The request goes on or has ended as asked; TargetError otherwise."""
    if output.finish_reason not in (None, "stop", "length"):
        raise TargetError(output.error or output.finish_reason)


async def run_load(
    target: Target,
    shots: Sequence[Shot],
    *,
    concurrency: int | None,
    limit_s: float,
    told: Callable[[Shown], None] = lambda shown: None,
) -> list[Shown]:
    """Send all shots and return what came of each, in their order.

    Args:
        target: where to.
        shots: what, and in an open loop when.
        concurrency: clients of a closed loop; None = an open loop, by `Shot.at_s`.
        limit_s: after it what has not ended is broken off and counts as failed.
        told: called with each that has ended.
    """
    start_s = time.monotonic()
    # What is not known to have ended was broken off.
    shown = {shot.number: never_done(shot, limit_s=limit_s) for shot in shots}

    async def fire(shot: Shot) -> None:
        planned_s = shot.at_s if concurrency is None else time.monotonic() - start_s
        shown[shot.number] = await _fire(target, shot, planned_s=planned_s, start_s=start_s)
        told(shown[shot.number])

    if concurrency is None:
        clients = [_at(start_s + shot.at_s, fire, shot) for shot in shots]
    else:
        waiting = iter(shots)
        clients = [_client(waiting, fire) for _ in range(concurrency)]
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    return [shown[shot.number] for shot in shots]


def never_done(shot: Shot, *, limit_s: float) -> Shown:
    """Return what is shown of a request that did not end within the time limit."""
    return Shown(shot.number, shot.at_s, shot.at_s, None, limit_s, len(shot.prompt), 0, error=LATE)


async def _client(waiting: Iterator[Shot], fire: Fire) -> None:
    for shot in waiting:
        await fire(shot)


async def _at(when_s: float, fire: Fire, shot: Shot) -> None:
    await asyncio.sleep(max(when_s - time.monotonic(), 0.0))
    await fire(shot)


async def _fire(target: Target, shot: Shot, *, planned_s: float, start_s: float) -> Shown:
    """Send one request and measure it."""

    def now_s() -> float:
        return time.monotonic() - start_s

    sent_s, error = now_s(), ""
    came_s: list[float] = []
    told: list[News] = []
    try:
        async with aclosing(target.send(shot)) as stream:
            async for news in stream:
                told.append(news)
                came_s += [now_s()] if news.num_tokens else []
    except TargetError as refusal:
        error = str(refusal)
    totals = [news.total for news in told if news.total is not None]
    waits_s = [news.queue_s for news in told if news.queue_s is not None]
    gaps_s = tuple(b - a for a, b in itertools.pairwise(came_s))
    first_s = came_s[0] if came_s else None
    return Shown(
        shot.number,
        planned_s,
        sent_s,
        first_s,
        now_s(),
        len(shot.prompt),
        totals[-1] if totals else sum(news.num_tokens for news in told),
        gaps_s,
        waits_s[0] if waits_s else None,
        error or ("" if came_s else "no token came"),
    )
