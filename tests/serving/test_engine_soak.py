"""Thousands of clients of all kinds: pages and memory are as they were."""

import asyncio
import gc
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxfound.serving import Pump, RequestError, UnavailableError
from jaxfound.serving.request import Request
from tests.serving.tiny_engine import MAX_LENGTH, WIDE, tiny_engine, tiny_generator, tiny_runner

# Two of the longest requests: those that run preempt each other.
PAGES = 16
# Of prompts: within a page, exactly pages, and between.
SIZES = [1, 3, 8, 16, 20, 24]


def resident_bytes():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


async def client(pump, id, rng):
    """One client of any kind: stays, leaves before or amid its text, or asks for nonsense."""
    size = int(rng.choice(SIZES))
    prompt = tuple(rng.integers(0, 58, size).tolist()) if rng.random() < 0.7 else (7,) * size
    stop = ("A", "BC") if rng.random() < 0.1 else ()
    max_tokens = 1 if rng.random() < 0.1 else int(rng.integers(1, 40))
    if rng.random() < 0.03:
        prompt, max_tokens = prompt * 20, 90
    stays = rng.choice([0, 1, 3, 1000], p=[0.1, 0.1, 0.1, 0.7])
    try:
        stream = pump.stream(Request(id, prompt, max_tokens, stop=stop))
    except (RequestError, UnavailableError):
        return "refused"
    for _ in range(stays):
        with suppress(StopAsyncIteration):
            output = await anext(stream)
            if output.finish_reason is not None:
                return output.finish_reason
    await stream.aclose()
    return "left"


@dataclass
class Held:
    """What the process holds: objects that Python's collector knows, and bytes in memory."""

    objects: int
    bytes: int

    @classmethod
    def now(cls):
        gc.collect()
        return cls(len(gc.get_objects()), resident_bytes())


async def clients(pump, numbers, rng, *, concurrency=32):
    """Clients of these numbers, so many at once; how each ended."""
    ends = Counter()

    async def lane(part):
        for number in part:
            ends[await client(pump, f"r{number}", rng)] += 1

    await asyncio.gather(*(lane(numbers[i::concurrency]) for i in range(concurrency)))
    while pump.num_open:
        await asyncio.sleep(0.01)
    return ends


@pytest.mark.slow
def test_two_thousand_clients_leave_pages_and_memory_as_they_were():
    engine, scheduler = tiny_engine(tiny_runner(tiny_generator(), WIDE), num_pages=PAGES)
    rng = np.random.default_rng(5)
    pump = Pump(engine, request_timeout_s=600.0)
    pump.start()
    try:
        # The first quarter fills the caches of the interpreter and of JAX.
        ends = asyncio.run(clients(pump, range(500), rng))
        before = Held.now()
        ends += asyncio.run(clients(pump, range(500, 2000), rng))
        after = Held.now()
    finally:
        pump.close()
    assert set(ends) == {"refused", "left", "stop", "length"}
    assert ends.total() == 2000
    snapshot = scheduler.snapshot()
    assert snapshot.pages_free + snapshot.pages_cached == PAGES
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
    assert snapshot.num_preempted > 0
    # One object a request would be 1,500; the tree of prefixes may hold other tokens.
    assert after.objects - before.objects < 300
    # Nothing is kept; but pieces between the device's buffers stay with the allocator.
    assert after.bytes - before.bytes < 8 * 2**20
    (whole,) = engine.generate([[1]], max_tokens=MAX_LENGTH - 1, ignore_eos=True)
    assert len(whole.tokens) == MAX_LENGTH - 1
