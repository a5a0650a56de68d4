"""The pump: streams over one stepping thread, ends of all kinds, and nobody who waits for ever."""

import asyncio
import gc
import threading
from contextlib import contextmanager

import pytest

from jaxfound.serving import Pump, RequestError, UnavailableError
from jaxfound.serving.request import Request
from tests.serving.fake_runner import fake_engine, one_by_one

# A test that waits longer has failed.
PATIENCE_S = 60


def request(id="r", prompt=(97, 98), **fields):
    return Request(id, prompt, **({"max_tokens": 8, "ignore_eos": True} | fields))


def ids(outputs):
    return [token for output in outputs for token in output.tokens]


class Gate:
    """Lets steps pass one by one, or all."""

    def __init__(self, runner):
        self.dispatch = runner.dispatch
        self.may = threading.Semaphore(0)
        self.open = False
        runner.dispatch = self.pass_through

    def pass_through(self, batch):
        if not self.open:
            assert self.may.acquire(timeout=PATIENCE_S)
        return self.dispatch(batch)

    def let(self, num=1):
        self.may.release(num)

    def let_all(self):
        self.open = True
        self.let(100)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@contextmanager
def started(engine, *, timeout_s=1000.0, clock=None):
    pump = Pump(engine, request_timeout_s=timeout_s, **({} if clock is None else {"clock": clock}))
    pump.start()
    try:
        yield pump
    finally:
        pump.close()
        assert threading.active_count() < 20


def play(coroutine):
    """Run a test's coroutine, with the limit of its patience."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


async def all_of(stream):
    return [output async for output in stream]


def test_many_streams_get_what_each_request_gets_alone():
    engine, scheduler, _ = fake_engine(num_pages=24, max_length=32)
    wanted = [request(f"r{i}", (97, 98 + i), max_tokens=3 + i % 5) for i in range(20)]

    async def scenario(pump):
        streams = [pump.stream(one) for one in wanted]
        return await asyncio.gather(*map(all_of, streams))

    with started(engine) as pump:
        found = play(scenario(pump))
        assert pump.num_open == 0
    for one, outputs in zip(wanted, found, strict=True):
        assert ids(outputs) == one_by_one(one)[0]
        assert outputs[-1].finish_reason == "length"
    assert scheduler.snapshot().pages_in_use == 0


def test_news_come_as_steps_are_made():
    engine, _, runner = fake_engine()
    gate = Gate(runner)

    async def scenario(pump):
        stream = pump.stream(request(max_tokens=3))
        gate.let(2)
        first = await anext(stream)
        gate.let_all()
        return [first, *[output async for output in stream]]

    with started(engine) as pump:
        outputs = play(scenario(pump))
    assert [len(output.tokens) for output in outputs] == [1, 1, 1]


@pytest.mark.parametrize("how", ["aclose", "cancelled task", "dropped"])
def test_a_consumer_that_leaves_gives_the_pages_back(how):
    engine, scheduler, runner = fake_engine(max_rows=2)
    gate = Gate(runner)
    other = request("other", (99,), max_tokens=30)

    async def scenario(pump):
        stream, kept = pump.stream(request(max_tokens=40)), pump.stream(other)
        gate.let(2)
        await anext(stream)
        assert scheduler.snapshot().num_running == 2
        if how == "aclose":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "cancelled task":
            # One item is there, and then it waits for the next.
            task = asyncio.create_task(all_of(stream))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream
            gc.collect()
        gate.let(2)
        await until(lambda: pump.num_open == 1)
        assert scheduler.snapshot().num_running == 1
        gate.let_all()
        return await all_of(kept)

    with started(engine) as pump:
        assert ids(play(scenario(pump))) == one_by_one(other)[0]
    assert scheduler.snapshot().pages_in_use == 0


def test_a_consumer_that_leaves_while_its_request_waits_is_forgotten():
    engine, scheduler, runner = fake_engine(max_rows=1)
    gate = Gate(runner)

    async def scenario(pump):
        running = pump.stream(request("running"))
        waiting = pump.stream(request("waiting"))
        gate.let(2)
        await anext(running)
        await waiting.aclose()
        gate.let_all()
        await all_of(running)
        await until(lambda: pump.num_open == 0)

    with started(engine) as pump:
        play(scenario(pump))
    assert scheduler.snapshot().num_waiting == 0


def test_more_than_may_be_open_are_refused_and_taken_again_later():
    engine, _, runner = fake_engine(max_rows=1, max_waiting=1)
    gate = Gate(runner)

    async def scenario(pump):
        first, second = pump.stream(request("a")), pump.stream(request("b"))
        with pytest.raises(UnavailableError, match="2 requests are open"):
            pump.stream(request("c"))
        gate.let_all()
        await asyncio.gather(all_of(first), all_of(second))
        return await all_of(pump.stream(request("c")))

    with started(engine) as pump:
        assert len(ids(play(scenario(pump)))) == 8


def test_what_can_never_be_served_is_refused_at_once():
    engine, _, _ = fake_engine(max_length=16)

    async def scenario(pump):
        with pytest.raises(RequestError, match="must be at most 16"):
            pump.stream(request(max_tokens=60))
        kept = pump.stream(request())
        with pytest.raises(UnavailableError, match="'r' is being served"):
            pump.stream(request())
        await all_of(kept)
        assert pump.num_open == 0

    with started(engine) as pump:
        play(scenario(pump))


def test_a_request_that_is_too_old_ends_with_timeout():
    engine, scheduler, runner = fake_engine(max_rows=1)
    gate, clock = Gate(runner), Clock()

    async def scenario(pump):
        old = pump.stream(request("old", max_tokens=40))
        queued = pump.stream(request("queued"))
        clock.now = 5.0
        young = pump.stream(request("young"))
        gate.let(2)
        outputs = [await anext(old)]
        clock.now = 11.0
        gate.let_all()
        outputs += await all_of(old)
        return outputs, await all_of(queued), await all_of(young)

    with started(engine, timeout_s=10.0, clock=clock) as pump:
        old, queued, young = play(scenario(pump))
    assert old[-1].finish_reason == "timeout"
    assert 1 <= len(ids(old)) < 40
    assert [output.finish_reason for output in queued] == ["timeout"]
    assert young[-1].finish_reason == "length"
    assert scheduler.snapshot().pages_in_use == 0


def test_drain_lets_requests_end_and_takes_no_more():
    engine, _, runner = fake_engine()
    gate = Gate(runner)

    async def scenario(pump):
        stream = pump.stream(request())
        draining = asyncio.create_task(pump.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            pump.stream(request("late"))
        assert not pump.accepting
        gate.let_all()
        outputs = await all_of(stream)
        assert await draining == 0
        return outputs

    with started(engine) as pump:
        assert play(scenario(pump))[-1].finish_reason == "length"


def test_drain_cancels_what_takes_too_long():
    engine, scheduler, runner = fake_engine(max_length=4000, num_pages=1000)
    gate = Gate(runner)

    async def scenario(pump):
        stream = pump.stream(request(max_tokens=3990))
        draining = asyncio.create_task(pump.drain(0.0))
        await asyncio.sleep(0.05)
        gate.let_all()
        assert await draining == 1
        return await all_of(stream)

    with started(engine) as pump:
        assert play(scenario(pump))[-1].finish_reason == "cancelled"
    assert scheduler.snapshot().pages_in_use == 0


def test_close_ends_what_is_open():
    engine, _, runner = fake_engine(max_length=4000, num_pages=1000)
    gate = Gate(runner)

    async def scenario(pump):
        stream = pump.stream(request(max_tokens=3990))
        gate.let(1)
        closing = asyncio.create_task(asyncio.to_thread(pump.close))
        await asyncio.sleep(0.02)
        gate.let_all()
        await closing
        with pytest.raises(UnavailableError, match="closed"):
            pump.stream(request("late"))
        return await all_of(stream)

    with started(engine) as pump:
        assert play(scenario(pump))[-1].finish_reason == "cancelled"
        assert not pump.healthy


def test_before_the_start_nothing_is_taken():
    pump = Pump(fake_engine()[0], request_timeout_s=1.0)

    async def scenario():
        with pytest.raises(UnavailableError, match="has not been started"):
            pump.stream(request())

    play(scenario())
    pump.close()


def test_a_failed_step_ends_its_requests_and_the_pump_goes_on():
    engine, _, _ = fake_engine(fails={1: "read"})

    async def scenario(pump):
        failed = await all_of(pump.stream(request("a")))
        return failed, await all_of(pump.stream(request("b")))

    with started(engine) as pump:
        failed, after = play(scenario(pump))
        assert pump.healthy
    assert failed[-1].finish_reason == "error"
    assert "the device fell over" in failed[-1].error
    assert after[-1].finish_reason == "length"


def test_a_dead_engine_ends_all_and_is_not_healthy():
    engine, _, runner = fake_engine(fails={1: "read"}, max_rows=1)
    runner.recovers = False

    async def scenario(pump):
        streams = [pump.stream(request(id)) for id in "abc"]
        found = await asyncio.gather(*map(all_of, streams))
        assert not pump.healthy
        with pytest.raises(UnavailableError, match="dead"):
            pump.stream(request("d"))
        return found

    with started(engine) as pump:
        found = play(scenario(pump))
    assert {outputs[-1].finish_reason for outputs in found} == {"error"}


def test_a_request_that_was_taken_before_the_engine_died_is_told_so(monkeypatch):
    engine, _, _ = fake_engine()

    def dead(request):
        raise UnavailableError("the engine is dead: out of memory")

    monkeypatch.setattr(engine, "add", dead)

    async def scenario(pump):
        outputs = await all_of(pump.stream(request()))
        assert pump.num_open == 0
        return outputs

    with started(engine) as pump:
        (last,) = play(scenario(pump))
        assert pump.healthy
    assert (last.finish_reason, last.error) == ("error", "the engine is dead: out of memory")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(monkeypatch):
    engine, scheduler, runner = fake_engine()
    gate = Gate(runner)

    def broken():
        raise KeyError("a fault of ours")

    async def scenario(pump):
        stream = pump.stream(request(max_tokens=30))
        gate.let(2)
        await anext(stream)
        # The request is far from its end, so the thread comes by here again.
        monkeypatch.setattr(scheduler, "schedule", broken)
        gate.let_all()
        outputs = await all_of(stream)
        await until(lambda: not pump.healthy)
        with pytest.raises(UnavailableError, match="dead"):
            pump.stream(request("late"))
        return outputs

    with started(engine) as pump:
        last = play(scenario(pump))[-1]
    assert last.finish_reason == "error"
    assert "dead" in last.error


def test_a_loop_that_is_gone_stops_nobody():
    engine, scheduler, runner = fake_engine()
    gate = Gate(runner)
    left = []

    async def leave(pump):
        left.append(pump.stream(request("left", max_tokens=30)))

    async def stay(pump):
        return await all_of(pump.stream(request("kept")))

    with started(engine) as pump:
        play(leave(pump))
        gate.let_all()
        assert play(stay(pump))[-1].finish_reason == "length"
    assert scheduler.snapshot().pages_in_use == 0
