"""Requests scheduled by hand, and a runner small enough to compile in seconds."""

from jaxfound.config.serve import ServeConfig
from jaxfound.serving.request import Request, ScheduledBatch, ScheduledRow, Sequence
from jaxfound.serving.sampler import Sampling

SERVE = ServeConfig(
    page_size=4, num_pages=40, max_rows=4, max_length=48, token_budget=64, prefill_rows=2
)
GREEDY = Sampling(temperature=0.0)


class ByHand:
    """One request; its tokens are scheduled when a test says so."""

    def __init__(self, prompt, *, row, pages, sampling=GREEDY, **request):
        request.setdefault("max_tokens", 30)
        prompt = tuple(int(t) for t in prompt)
        asked = Request(f"row {row}", prompt, sampling=sampling, **request)
        self.sequence = Sequence(asked, 0, list(prompt))
        self.row, self.pages, self.cached = row, tuple(pages), 0

    def chunk(self, count):
        """The next `count` tokens of what is known."""
        start, self.cached = self.cached, self.cached + count
        tokens = tuple(self.sequence.tokens[start : start + count])
        draws, fresh = self.cached == len(self.sequence.tokens), start == 0
        return ScheduledRow(
            self.sequence, self.row, start, count, tokens, self._held(), draws, fresh
        )

    def token(self, count=1):
        """The token that was drawn last, and drafts behind it."""
        start, self.cached = self.cached, self.cached + count
        return ScheduledRow(self.sequence, self.row, start, count, (), self._held(), draws=True)

    def read(self, result):
        """Know the tokens of a step, of which the last is not cached; what was refused is not."""
        self.sequence.tokens += result.tokens
        self.cached = len(self.sequence.tokens) - 1

    def _held(self):
        return self.pages[: -(-self.cached // SERVE.page_size)]


def prefill(*rows):
    return ScheduledBatch(rows, ())


def decode(*requests):
    return ScheduledBatch((), tuple(request.token() for request in requests))


def tokens_by_row(steps, results):
    """What each row drew, in order."""
    drawn = {}
    for step, found in zip(steps, results, strict=True):
        for row, result in zip((*step.prefill, *step.decode), found, strict=True):
            assert result.error is None
            drawn.setdefault(row.row, []).extend(result.tokens)
    return drawn
