"""What a step that the device may still be working on gives, once somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxfound.serving.programs import NONE
from jaxfound.serving.request import ScheduledRow, TokenLogprobs
from jaxfound.serving.sampler import Draws
from jaxfound.serving.step import RowResult

NOT_FINITE = (
    "the logits of this request are not finite: weights or activations overflowed, or its pages "
    "hold NaN"
)


@dataclass(frozen=True)
class Part:
    """Rows of a step that one program computed.

    Attributes:
        rows: what was scheduled, in the order of the program's rows.
        places: of each row in the step, `prefill` first and then `decode`.
        drawn: tokens of the rows, in the rows' order [b t]; None where no row draws.
        scored: log-probabilities of the tokens that follow in each chunk [b x T]; None where
            nobody asked.
        chunk: T of the program.
    """

    rows: tuple[ScheduledRow, ...]
    places: tuple[int, ...]
    drawn: Draws | None
    scored: Draws | None = None
    chunk: int = 1

    def send(self) -> None:
        """Begin to copy what the host will read."""
        for array in jax.tree.leaves((self.drawn, self.scored)):
            array.copy_to_host_async()

    def results(self) -> list[RowResult]:
        """Wait for the program; one result a row."""
        drawn, scored = (jax.tree.map(np.asarray, d) for d in (self.drawn, self.scored))
        return [
            result_of(row, _one(drawn, i), self._scores(scored, i, row))
            for i, row in enumerate(self.rows)
        ]

    def _scores(
        self, scored: Draws | None, number: int, row: ScheduledRow
    ) -> tuple[TokenLogprobs, ...]:
        request = row.sequence.request
        if scored is None or not request.prompt_logprobs:
            return ()
        # The prompt's first token has none, and behind its last one nothing of it follows.
        count = min(row.count, len(request.prompt) - 1 - row.start)
        first = number * self.chunk
        return tuple(
            logprobs_at(scored, first + i, num_top=request.logprobs or 0) for i in range(count)
        )


@dataclass(frozen=True)
class Pending:
    """A step under way.

    Attributes:
        parts: of it, by program.
        num_rows: rows of the step.
    """

    parts: Sequence[Part]
    num_rows: int

    def read(self) -> list[RowResult]:
        """Wait for the step; one result a row, those of `prefill` and then those of `decode`.

        Raises:
            RuntimeError: the device failed.
        """
        results = [RowResult()] * self.num_rows
        for part in self.parts:
            for place, result in zip(part.places, part.results(), strict=True):
                results[place] = result
        return results


def result_of(
    row: ScheduledRow, drawn: Draws | None, scores: tuple[TokenLogprobs, ...]
) -> RowResult:
    """Return what a row gave.

    Args:
        row: what was scheduled.
        drawn: its tokens, as arrays of the host [t]; None where no row of its program draws.
        scores: log-probabilities of its prompt.
    """
    if not row.draws or drawn is None:
        return RowResult(prompt_logprobs=scores)
    tokens = tuple(int(token) for token in drawn.tokens if token != NONE)
    if tokens[0] < 0:
        return RowResult(prompt_logprobs=scores, error=NOT_FINITE)
    wanted, places = row.sequence.request.logprobs, range(len(tokens))
    found = () if wanted is None else tuple(logprobs_at(drawn, i, num_top=wanted) for i in places)
    return RowResult(tokens=tokens, logprobs=found, prompt_logprobs=scores)


def logprobs_at(draws: Draws, place: int, *, num_top: int) -> TokenLogprobs:
    """Return what stands at one place of arrays of the host."""
    tokens, logprobs, top_tokens, top_logprobs = (a[place] for a in draws)
    top = zip(top_tokens[:num_top], top_logprobs[:num_top], strict=True)
    return TokenLogprobs(
        token=int(tokens),
        logprob=float(logprobs),
        top=tuple((int(token), float(logprob)) for token, logprob in top),
    )


def _one(draws: Draws | None, number: int) -> Draws | None:
    return None if draws is None else Draws(*(a[number] for a in draws))
