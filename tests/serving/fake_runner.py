"""A runner without a model: ids are a hash of the tokens that a row's pages hold.

Whatever is scheduled wrongly (a page given away too early, a chunk left out, a token drawn twice, a
row whose sampler is another's) changes the ids.
"""

import zlib

from jaxfound.config.serve import ServeConfig
from jaxfound.data import ByteTokenizer
from jaxfound.serving.engine import Engine
from jaxfound.serving.request import TokenLogprobs
from jaxfound.serving.scheduler import Scheduler
from jaxfound.serving.step import RowResult

EOS = ByteTokenizer.eos_id
# Few letters, so that stop texts are met; two bytes of one character, so that it is cut.
LETTERS = [*b"abc", *"é".encode()]


def drawn(tokens, *, index, seed):
    """The id after `tokens`."""
    number = zlib.crc32(repr((tuple(tokens), index, seed)).encode())
    return EOS if number % 23 == 0 else LETTERS[number % len(LETTERS)]


def logprobs_of(tokens, token):
    """Log-probabilities that tell of all tokens before them."""
    value = -float(zlib.crc32(repr(tuple(tokens)).encode()) % 1000)
    return TokenLogprobs(token, value, ((token, value), (0, value - 1), (1, value - 2)))


def one_by_one(request):
    """The ids that `request` gets when it is alone: those before the end, and why it ends."""
    tokens = list(request.prompt)
    for index in range(request.max_tokens):
        token = drawn(tokens, index=index, seed=request.sampling.seed)
        if token == EOS and not request.ignore_eos:
            return tokens[len(request.prompt) :], "stop"
        tokens.append(token)
    return tokens[len(request.prompt) :], "length"


class FakeStep:
    """A step that was computed when it was dispatched, as a device does in order."""

    def __init__(self, runner, number, results, *, fails):
        self.runner, self.number, self.results, self.fails = runner, number, results, fails

    def read(self):
        self.runner.events.append(("read", self.number))
        if self.fails:
            raise RuntimeError("the device fell over")
        return self.results


class FakeRunner:
    """Pages of tokens, and the last token and the request of each row.

    Args:
        cfg: page size and drafts.
        num_pages: of the pool.
        fails: numbers of steps that fail, to the place where they do: "dispatch" or "read".
    """

    def __init__(self, cfg, num_pages, *, fails=None):
        self.cfg, self.num_pages = cfg, num_pages
        self.fails = fails or {}
        self.events = []
        self.num_steps = 0
        self.recovers = True
        self._empty()

    def dispatch(self, batch):
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.events.append(("dispatch", number))
        if self.fails.get(number) == "dispatch":
            raise RuntimeError("the device fell over")
        self._check(batch)
        results = [self._prefill(row) for row in batch.prefill]
        results += [self._decode(row) for row in batch.decode]
        return FakeStep(self, number, results, fails=self.fails.get(number) == "read")

    def reset(self):
        if not self.recovers:
            raise RuntimeError("the device is gone")
        self._empty()

    def _empty(self):
        self.slots = [[None] * self.cfg.page_size for _ in range(self.num_pages)]
        self.last, self.owner = {}, {}

    def _check(self, batch):
        rows = (*batch.prefill, *batch.decode)
        assert len({row.row for row in rows}) == len(rows) <= self.cfg.max_rows
        assert batch.num_tokens <= self.cfg.token_budget
        assert len(batch.prefill) <= self.cfg.prefill_rows

    def _prefill(self, row):
        request = row.sequence.request
        if row.fresh:
            self.owner[row.row] = request
        assert len(row.tokens) == row.count > 0
        for place, token in enumerate(row.tokens, row.start):
            self._write(row, place, token)
        known = self._tokens(row, row.start + row.count)
        prompt = self._of_prompt(row, known) if request.prompt_logprobs else ()
        if not row.draws:
            return RowResult(prompt_logprobs=prompt)
        token = self._draw(row, known)
        return RowResult((token,), self._logprobs(request, known, token), prompt)

    def _decode(self, row):
        assert row.draws
        assert not row.tokens
        found, logprobs = [], ()
        for place in range(row.start, row.start + row.count):
            self._write(row, place, self.last[row.row])
            known = self._tokens(row, place + 1)
            found.append(self._draw(row, known))
            logprobs += self._logprobs(row.sequence.request, known, found[-1])
            # A draft that is not accepted.
            if zlib.crc32(repr(known).encode()) % 3 == 0:
                break
        return RowResult(tuple(found), logprobs)

    def _draw(self, row, known):
        request = self.owner[row.row]
        index = len(known) - len(request.prompt)
        self.last[row.row] = drawn(known, index=index, seed=request.sampling.seed)
        return self.last[row.row]

    def _logprobs(self, request, known, token):
        return () if request.logprobs is None else (logprobs_of(known, token),)

    def _of_prompt(self, row, known):
        prompt = row.sequence.request.prompt
        places = range(row.start + 1, min(row.start + row.count + 1, len(prompt)))
        return tuple(logprobs_of(known[:place], prompt[place]) for place in places)

    def _write(self, row, place, token):
        page, slot = divmod(place, self.cfg.page_size)
        self.slots[row.pages[page]][slot] = token

    def _tokens(self, row, count):
        places = (divmod(place, self.cfg.page_size) for place in range(count))
        return [self.slots[row.pages[page]][slot] for page, slot in places]


def fake_engine(*, num_pages=64, max_length=64, fails=None, **sizes):
    """An engine over a fake runner; returns it, its scheduler and its runner."""
    sizes = {"page_size": 4, "max_rows": 4, "token_budget": 16, "prefill_rows": 2} | sizes
    cfg = ServeConfig(**sizes)
    scheduler = Scheduler(cfg, num_pages=num_pages, max_length=max_length)
    runner = FakeRunner(cfg, num_pages, fails=fails)
    return Engine(runner, scheduler, ByteTokenizer(), start=(256,)), scheduler, runner


def run(engine, requests=()):
    """Add requests and step until nothing is left to do; each request's outputs."""
    found = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.id, []).append(output)
    return found
