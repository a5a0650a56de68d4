"""Decides what each step computes: who decodes, whose prompt goes on, who waits, who gives way.

No clock, no device, no file: what comes out follows from what was called before. The engine runs

    batch = scheduler.schedule()         # needs counts, not the ids of tokens that are not read
    ... dispatch the batch, and read the tokens of the batch before it ...
    scheduler.commit(sequence, [token])  # in the order of the steps
    scheduler.finish(sequence)           # when a commit ended it

and may be steps ahead of what it has read, but for drafts: how many tokens a step with drafts
yields decides where the next one begins. `schedule` counts what it hands out as done, because
a device runs programs in the order in which they were dispatched: a step that is dispatched later
finds the pages written, and pages that are given back now are written by later steps only.
"""

import heapq
from bisect import insort
from collections.abc import Iterable

from jaxfound.config.serve import ServeConfig
from jaxfound.serving import admission
from jaxfound.serving.holdings import Holdings
from jaxfound.serving.page_pool import PagePool
from jaxfound.serving.request import Request, ScheduledBatch, ScheduledRow, Sequence
from jaxfound.serving.snapshot import Snapshot


class Scheduler:
    """Continuous batching over one pool of pages.

    Order is (priority, arrival) everywhere. Rows that decode come first, each with one token (and
    drafts). What they leave of the budget goes to prompts in order, in chunks. A row that decodes
    and finds no page takes those of the last in order, perhaps its own; nobody is preempted for a
    prompt that waits, whatever its priority. The first in order always goes on: therefore each
    request ends (docs/decisions/who-gives-way-in-serving.md).

    Attributes:
        cfg: budget and rows.
        pool: pages.
        holdings: who holds which.
        max_length: most tokens of prompt and continuation.
        waiting: requests without a row, in order.
        running: requests with a row, in order.
    """

    def __init__(self, cfg: ServeConfig, *, num_pages: int, max_length: int) -> None:
        """Start with every page free.

        Args:
            cfg: budget, rows, page size, drafts.
            num_pages: pages that the runner has allocated.
            max_length: most tokens of prompt and continuation of one request.
        """
        self.cfg = cfg
        self.pool = PagePool(num_pages, page_size=cfg.page_size)
        self.holdings = Holdings(self.pool, share=cfg.prefix_cache)
        self.max_length = max_length
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._rows = list(range(cfg.max_rows))
        self._num_arrived = 0
        self._num_preempted = 0
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    def add(self, request: Request) -> Sequence:
        """Let a request wait for its turn.

        Raises:
            AdmissionError: it could never finish, or too many wait.
            ValueError: a request of this id is there.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is there already: ids must differ")
        admission.check(request, pool=self.pool, max_length=self.max_length)
        # As many as there are free rows do not wait: the next step takes them.
        if len(self.waiting) >= self.cfg.max_waiting + len(self._rows):
            raise admission.AdmissionError(
                f"{len(self.waiting)} requests wait and serve.max_waiting={self.cfg.max_waiting}. "
                "Try again later",
                reason="queue_full",
                asked=len(self.waiting) + 1,
                limit=self.cfg.max_waiting,
            )
        sequence = Sequence(request, self._num_arrived, list(request.prompt))
        self._num_arrived += 1
        self._live[request.id] = sequence
        insort(self.waiting, sequence, key=_order)
        return sequence

    def cancel(self, request_id: str) -> Sequence | None:
        """End a request wherever it is; None if it has ended already.

        Steps that were dispatched for it may still run; their tokens are dropped by `commit`.
        """
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """End a sequence: its row and pages are free for the next step. Twice is once.

        A step that computes a token too many for it may be under way. Its page can be given away
        all the same: whoever takes it is computed by a step that is dispatched after that one.
        """
        if not self._is_live(sequence):
            return
        del self._live[sequence.request.id]
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def commit(self, sequence: Sequence, tokens: Iterable[int]) -> bool:
        """Add the tokens that the oldest unread step drew for a sequence.

        A sequence that was preempted meanwhile takes them too: they were drawn from what came
        before, and its recomputing begins when all are there, so that none is drawn twice.

        Args:
            sequence: of a row that draws.
            tokens: one; with drafts 1 to 1 + draft_tokens, and what was not accepted counts as
                never asked for.

        Returns:
            False, and nothing is kept, if the sequence has ended.

        Raises:
            ValueError: tokens that no step was asked for.
        """
        if not self._is_live(sequence):
            return False
        tokens = list(tokens)
        # With drafts no step is scheduled before the last is read: what is unread is one step's.
        asked = sequence.num_unread if self.cfg.draft_tokens else min(sequence.num_unread, 1)
        if not 1 <= len(tokens) <= asked:
            raise ValueError(
                f"{len(tokens)} tokens for request {sequence.request.id!r}, whose oldest unread "
                f"step was asked for {asked}"
            )
        sequence.tokens += tokens
        refused = asked - len(tokens)
        self._drafted_tokens += asked - 1
        self._accepted_tokens += len(tokens) - 1
        sequence.num_drawn -= refused
        if sequence.row is not None:
            sequence.num_cached -= refused
            self.holdings.publish(sequence)
        return True

    def schedule(self) -> ScheduledBatch:
        """Return the next step and count it as done.

        An empty batch while requests are there means that steps under way must be read first.
        """
        preempted = list[Sequence]()
        decode = list[ScheduledRow]()
        # A copy: whoever is preempted leaves the list, and stands behind those already scheduled.
        for sequence in tuple(self.running):
            if self._can_decode(sequence) and self._grow(sequence, preempted):
                decode.append(self._decode_row(sequence))
        budget = self.cfg.token_budget - sum(row.count for row in decode)
        prefill = self._prefill(budget, admit=not preempted)
        # Shared from the next step on, which the device runs after this one.
        for row in (*prefill, *decode):
            self.holdings.publish(row.sequence)
        return ScheduledBatch(tuple(prefill), tuple(decode), tuple(preempted))

    def clear(self) -> tuple[Sequence, ...]:
        """End every request and forget every cached page; return the requests that were there.

        For a step that failed: what its pages hold is not known, and must not be shared.
        """
        ended = tuple(self._live.values())
        for sequence in tuple(self.running):
            self._leave(sequence, keep=False)
        self.waiting.clear()
        self._live.clear()
        self.holdings.cache.clear()
        return ended

    def snapshot(self) -> Snapshot:
        """Return what is held now, as figures."""
        size, cache = self.pool.page_size, self.holdings.cache
        own = sum(s.num_cached - s.num_shared * size for s in self.running)
        cached, free = cache.num_idle, self.pool.num_free
        num_decoding = sum(s.decoding for s in self.running)
        return Snapshot(
            num_pages=self.pool.num_pages,
            pages_in_use=self.pool.num_pages - cached - free,
            pages_cached=cached,
            pages_free=free,
            page_size=size,
            tokens_cached=cache.num_pages * size + own,
            num_waiting=len(self.waiting),
            num_prefilling=len(self.running) - num_decoding,
            num_decoding=num_decoding,
            num_preempted=self._num_preempted,
            num_reclaimed=cache.num_reclaimed,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _is_live(self, sequence: Sequence) -> bool:
        # An id may be used again when its request has ended.
        return self._live.get(sequence.request.id) is sequence

    # Decoding

    def _can_decode(self, sequence: Sequence) -> bool:
        if sequence.row is None or not sequence.decoding or _has_drawn_all(sequence):
            return False
        # How many tokens a step with drafts yields is known when it is read.
        return not (self.cfg.draft_tokens and sequence.num_unread)

    def _num_decoded(self, sequence: Sequence) -> int:
        left = sequence.request.max_tokens - sequence.num_drawn
        return min(1 + self.cfg.draft_tokens, left)

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Give a row the pages of its next tokens, others' if need be; False if it has to wait."""
        wanted = sequence.num_cached + self._num_decoded(sequence)
        while not self.holdings.grow(sequence, num_tokens=wanted):
            # One that has drawn all its tokens gives its pages back as soon as they are read.
            victim = next(s for s in reversed(self.running) if not _has_drawn_all(s))
            if victim is sequence and any(map(_has_drawn_all, self.running)):
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _decode_row(self, sequence: Sequence) -> ScheduledRow:
        count = self._num_decoded(sequence)
        row = self._row(sequence, count=count, tokens=(), draws=True)
        sequence.num_drawn += count
        return row

    def _preempt(self, sequence: Sequence) -> None:
        """Take row and pages of a sequence; it waits in front of all that arrived later.

        Its tokens stay, also those that are still to be read, so that computing again ends in the
        token after them.
        """
        self._leave(sequence)
        sequence.num_preempted += 1
        self._num_preempted += 1
        insort(self.waiting, sequence, key=_order)

    # Prompts

    def _prefill(self, budget: int, *, admit: bool) -> list[ScheduledRow]:
        """Return chunks of prompts in order, of those that run and of those that may begin."""
        rows = list[ScheduledRow]()
        prompts = self._prompts()
        for place, sequence in enumerate(prompts):
            if not budget or len(rows) == self.cfg.prefill_rows:
                break
            fresh = sequence.row is None
            if fresh and not (admit and self._admit(sequence)):
                # Nobody passes one that waits for room: it might wait for ever.
                admit = False
                continue
            others = place + 1 < len(prompts) and len(rows) + 1 < self.cfg.prefill_rows
            row = self._chunk(sequence, budget=budget, whole_pages=others, fresh=fresh)
            rows.append(row)
            budget -= row.count
        return rows

    def _prompts(self) -> list[Sequence]:
        """Return who has tokens to prefill, in order; of those that wait, as many as can begin."""
        running = (s for s in self.running if not s.decoding)
        return sorted((*running, *self.waiting[: self.cfg.prefill_rows]), key=_order)

    def _admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run, if a row and the pages of its known tokens are there."""
        if not self._rows or sequence.num_unread:
            return False
        reusable = self.holdings.reusable(sequence)
        ahead = (s for s in self.running if _order(s) < _order(sequence))
        if self.holdings.is_under_way(sequence, reusable=reusable, ahead=ahead):
            return False
        # A page for each that runs and will need one: else the next step would preempt the
        # newcomer, and its prompt would have been computed for nothing.
        spare = sum(map(self._will_grow, self.running))
        if not self.holdings.enter(sequence, reusable=reusable, spare=spare):
            return False
        sequence.row = heapq.heappop(self._rows)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        self._count_reuse(sequence)
        return True

    def _will_grow(self, sequence: Sequence) -> bool:
        most = admission.most_cached(sequence.request)
        return self.pool.pages_for(most) > len(sequence.pages)

    def _chunk(
        self, sequence: Sequence, *, budget: int, whole_pages: bool, fresh: bool
    ) -> ScheduledRow:
        """Return as many of a sequence's known tokens as the budget allows.

        Args:
            sequence: with a row, and pages for all its known tokens.
            budget: tokens.
            whole_pages: end with a page, if a whole one fits: others can use what is left.
            fresh: whether it has this row since now.
        """
        start, size = sequence.num_cached, self.pool.page_size
        end = min(start + budget, sequence.num_tokens)
        if whole_pages and end < sequence.num_tokens and end // size * size > start:
            end = end // size * size
        draws = end == sequence.num_tokens
        tokens = tuple(sequence.tokens[start:end])
        row = self._row(sequence, count=end - start, tokens=tokens, draws=draws, fresh=fresh)
        if draws:
            sequence.num_drawn += 1
            sequence.decoding = True
        return row

    def _count_reuse(self, sequence: Sequence) -> None:
        if sequence.num_preempted:
            return
        sequence.num_reused = sequence.num_cached
        self._prompt_tokens += len(sequence.request.prompt)
        self._reused_tokens += sequence.num_reused

    # Both

    def _row(
        self,
        sequence: Sequence,
        *,
        count: int,
        tokens: tuple[int, ...],
        draws: bool,
        fresh: bool = False,
    ) -> ScheduledRow:
        """Return a part of a step; its tokens count as cached from now on."""
        assert sequence.row is not None
        start = sequence.num_cached
        sequence.num_cached += count
        pages = tuple(sequence.pages[: self.pool.pages_for(start + count)])
        return ScheduledRow(sequence, sequence.row, start, count, tokens, pages, draws, fresh)

    def _leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take row and pages of a sequence."""
        assert sequence.row is not None
        self.running.remove(sequence)
        heapq.heappush(self._rows, sequence.row)
        self.holdings.leave(sequence, keep=keep)
        sequence.row, sequence.decoding = None, False


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival


def _has_drawn_all(sequence: Sequence) -> bool:
    return sequence.num_drawn == sequence.request.max_tokens
