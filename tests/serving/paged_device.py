"""A device of the scheduler's tests: it runs batches in order and believes nothing.

Its model is a hash of all tokens so far, which is also what a slot of the cache holds: so a slot
read after other tokens than the sequence's own, not yet written, or written over, is found out, and
a continuation is right only if every token of it was computed from the right beginning.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxfound.serving.request import Request, ScheduledBatch, ScheduledRow
from jaxfound.serving.scheduler import Scheduler

VOCAB = 11
EOS = 0
SEED = 1


def mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % (2**61 - 1)


def draw(state: int) -> int:
    return (state >> 7) % VOCAB


def continuation(request: Request) -> list[int]:
    """What a request must get, whoever else is served."""
    state = SEED
    for token in request.prompt:
        state = mix(state, token)
    drawn = []
    while len(drawn) < request.max_tokens and not ends(request, drawn):
        drawn.append(draw(state))
        state = mix(state, drawn[-1])
    return drawn


def ends(request: Request, drawn: Sequence[int]) -> bool:
    at_eos = bool(drawn) and drawn[-1] == EOS and not request.ignore_eos
    return at_eos or len(drawn) >= request.max_tokens


class Slot(NamedTuple):
    before: int
    token: int


class Device:
    """Pages and rows. `run` returns what each row drew, to be read when the test likes."""

    def __init__(self, scheduler: Scheduler, *, luck: random.Random) -> None:
        cfg = scheduler.cfg
        self.size = cfg.page_size
        self.pages: list[list[Slot | None]] = [
            [None] * self.size for _ in range(scheduler.pool.num_pages)
        ]
        self.owner: list[object] = [None] * cfg.max_rows
        self.newest: list[int | None] = [None] * cfg.max_rows
        self.luck = luck
        self.num_computed = 0

    def run(self, batch: ScheduledBatch) -> list[tuple[ScheduledRow, list[int]]]:
        rows = (*batch.prefill, *batch.decode)
        # What another row writes in the same step is not there to be read.
        states = [self._read(row) for row in rows]
        written: set[tuple[int, int]] = set()
        results = []
        for row, state in zip(rows, states, strict=True):
            inputs = list(row.tokens) or self._inputs(row, state)
            results.append((row, self._write(row, state, inputs, written)))
        assert len({row.row for row in rows}) == len(rows), "a row has two sequences"
        self.num_computed += batch.num_tokens
        return results

    def _read(self, row: ScheduledRow) -> int:
        assert len(row.pages) == -(-(row.start + row.count) // self.size)
        if row.fresh:
            self.owner[row.row], self.newest[row.row] = row.sequence, None
        assert self.owner[row.row] is row.sequence, "a row changed hands and was not fresh"
        state = SEED
        for i in range(row.start):
            slot = self.pages[row.pages[i // self.size]][i % self.size]
            assert slot is not None, "a slot is read that nobody wrote"
            assert slot.before == state, "a slot is read that belongs to another beginning"
            state = mix(state, slot.token)
        return state

    def _inputs(self, row: ScheduledRow, state: int) -> list[int]:
        """The newest token, and drafts: the right ones, until luck ends."""
        newest = self.newest[row.row]
        assert newest is not None, "a row decodes that has drawn nothing"
        inputs = [newest]
        for _ in range(row.count - 1):
            state = mix(state, inputs[-1])
            right = self.luck.random() < 0.7
            inputs.append(draw(state) if right else self.luck.randrange(VOCAB))
        return inputs

    def _write(
        self, row: ScheduledRow, state: int, inputs: list[int], written: set[tuple[int, int]]
    ) -> list[int]:
        assert len(inputs) == row.count
        drawn = []
        accepted = True
        for i, token in enumerate(inputs, row.start):
            place = row.pages[i // self.size], i % self.size
            assert place not in written, "two rows write one slot in one step"
            written.add(place)
            self.pages[place[0]][place[1]] = Slot(state, token)
            state = mix(state, token)
            if row.draws and not row.tokens:
                accepted = accepted and (i == row.start or token == drawn[-1])
                drawn += [draw(state)] if accepted else []
        if row.draws and row.tokens:
            drawn = [draw(state)]
        if drawn:
            self.newest[row.row] = drawn[-1]
        return drawn


class Engine:
    """Runs a scheduler on the device, reads tokens some steps late, and looks after every step.

    Looking at every page takes longer than a step: a long walk does it in every n-th.
    """

    def __init__(
        self, scheduler: Scheduler, *, luck: random.Random | None = None, every: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.every = every
        self.device = Device(scheduler, luck=luck or random.Random(0))
        self.unread: list[list[tuple[ScheduledRow, list[int]]]] = []
        self.finished: dict[str, list[int]] = {}
        self.batches: list[ScheduledBatch] = []

    def step(self, *, behind: int = 1) -> ScheduledBatch:
        """Schedule and dispatch a step; read all but the last `behind` steps."""
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        look_at(self.scheduler, batch)
        if len(self.batches) % self.every == 0:
            look_at_pages(self.scheduler)
        self.unread.append(self.device.run(batch))
        idle = not batch.num_tokens
        if idle and self.scheduler.has_work:
            assert any(self.unread), "nothing runs, nothing is to be read, and requests wait"
        self.read(keep=0 if idle else behind)
        return batch

    def read(self, *, keep: int = 0) -> None:
        while len(self.unread) > keep:
            for row, drawn in self.unread.pop(0):
                if row.draws:
                    self._commit(row, drawn)

    def _commit(self, row: ScheduledRow, drawn: list[int]) -> None:
        sequence = row.sequence
        request = sequence.request
        if not self.scheduler.commit(sequence, drawn):
            return
        said = sequence.tokens[len(request.prompt) :]
        for length in range(len(said) - len(drawn) + 1, len(said) + 1):
            if ends(request, said[:length]):
                self.finished[request.id] = said[:length]
                self.scheduler.finish(sequence)
                return

    def run_to_the_end(self, *, behind: int = 1, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.read()
                return
            self.step(behind=behind)
        raise AssertionError(f"requests are still there after {limit} steps")


def serve(
    scheduler: Scheduler, requests: Iterable[Request], *, behind: int = 1
) -> tuple[Engine, dict[str, list[int]]]:
    """Run requests that come at once to their end; return the engine and what each one got."""
    engine = Engine(scheduler)
    for request in requests:
        scheduler.add(request)
    engine.run_to_the_end(behind=behind)
    return engine, engine.finished


def look_at(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """Check what must hold after every step."""
    cfg = scheduler.cfg
    assert batch.num_tokens <= cfg.token_budget
    assert len(batch.prefill) <= cfg.prefill_rows
    assert all(row.count > 0 for row in (*batch.prefill, *batch.decode))
    assert len(scheduler.running) <= cfg.max_rows
    assert all(s.num_drawn <= s.request.max_tokens for s in scheduler.running)
    going = [s for s in scheduler.running if s.num_drawn < s.request.max_tokens]
    for lost in batch.preempted:
        assert all(order(s) < order(lost) for s in going), "one was preempted before a later one"
    for row in batch.prefill:
        drawn_before = row.sequence.num_drawn - row.draws
        if row.fresh:
            passed = [s for s in scheduler.waiting if order(s) < order(row.sequence)]
            assert not passed, "one began before another that waited longer"
        if row.fresh and row.sequence.request.prompt_logprobs and not drawn_before:
            assert row.start == 0, "a prompt's logits are asked for and not computed"


def look_at_pages(scheduler: Scheduler) -> None:
    """Each page is held by exactly those that say so, and is otherwise free."""
    pool, cache = scheduler.pool, scheduler.holdings.cache
    holders = [0] * pool.num_pages
    for sequence in scheduler.running:
        assert len(set(sequence.pages)) == len(sequence.pages)
        for page in sequence.pages:
            holders[page] += 1
    for sequence in scheduler.waiting:
        assert not sequence.pages
        assert sequence.row is None
    kept = [page in cache for page in range(pool.num_pages)]
    assert cache.num_idle == sum(k and not n for k, n in zip(kept, holders, strict=True))
    expected = [k + n for k, n in zip(kept, holders, strict=True)]
    assert [pool.references(page) for page in range(pool.num_pages)] == expected
    assert pool.num_free == expected.count(0)
    now = scheduler.snapshot()
    assert now.pages_in_use + now.pages_cached + now.pages_free == now.num_pages
    assert 0 < now.utilisation <= 1
    assert 0 <= now.fragmentation < 1


def order(sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival
