"""What moves through the engine: a request, its sequence, the rows of a step, what comes out."""

from dataclasses import dataclass, field
from typing import Literal

from jaxfound.serving.sampling import Sampling

type FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        id: unique among the requests of an engine.
        prompt: token ids, at least one.
        max_tokens: longest continuation, at least 1.
        sampling: how each token is drawn.
        stop: texts that end the continuation and are not part of it.
        ignore_eos: do not end at the end-of-text id.
        logprobs: most likely tokens to report beside each drawn one; None = no log-probabilities.
        prompt_logprobs: report those of the prompt's tokens too (`echo`).
        priority: smaller runs first; equal ones in order of arrival.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    priority: int = 0


@dataclass(eq=False)
class Sequence:
    """A request on its way: tokens known, tokens cached, pages held. Only the scheduler writes it.

    Attributes:
        tokens: prompt and continuation. While steps overlap, the newest drawn ids may still be on
            the device; `num_drawn` counts them, `tokens` holds those that have been read.
        num_drawn: tokens of the continuation that steps have been asked for.
        num_cached: tokens whose keys and values (latents) are, or will be after the steps that were
            dispatched, in `pages`.
        pages: of the pool, in order; page i holds tokens i x page_size onward.
        row: row of the runner's device state while it runs, else None.
        arrival: number in the order of arrival.
        num_preempted: times that it lost its pages.
        num_reused: tokens of the prompt that were found in the prefix cache when it first ran.
        num_shared: of `pages`, from the first on, those that the prefix cache holds too.
        decoding: whether the token that comes next to be computed lies in its row on the device.
    """

    request: Request
    arrival: int
    tokens: list[int]
    num_drawn: int = 0
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    num_preempted: int = 0
    num_reused: int = 0
    num_shared: int = 0
    decoding: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and continuation, those still on the device included."""
        return len(self.request.prompt) + self.num_drawn

    @property
    def num_unread(self) -> int:
        """Tokens that steps were asked for and that have not been committed."""
        return self.num_tokens - len(self.tokens)


@dataclass(frozen=True)
class ScheduledRow:
    """One sequence's part in a step.

    Attributes:
        row: of the runner's device state.
        start: tokens that were cached before the step.
        count: tokens that the step computes, from `start` on.
        tokens: their ids; empty in decoding, where the id is the one that the row drew last, which
            is on the device.
        pages: of the sequence, enough for start + count tokens.
        draws: whether the step draws the token after them; a chunk before the prompt's last does
            not.
        fresh: the row is new to its slot: its sampler's state is reset from the request and the
            tokens so far.
    """

    sequence: Sequence
    row: int
    start: int
    count: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    draws: bool
    fresh: bool = False


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: chunks of prompts, and one token (with drafts) of each row that decodes.

    Attributes:
        prefill: rows whose tokens are known, at most `prefill_rows`.
        decode: rows that continue from what they drew last.
        preempted: sequences that lost their pages before this step.
    """

    prefill: tuple[ScheduledRow, ...]
    decode: tuple[ScheduledRow, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.count for row in (*self.prefill, *self.decode))


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one place, of the model itself: before temperature and filters.

    Attributes:
        token: the id that stands there.
        logprob: its log-probability under the model's own distribution (temperature 1).
        top: the most likely ids and theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """News of one request: text that is safe to show, the tokens behind it, perhaps the end.

    Attributes:
        id: of the request.
        text: new text; never part of a stop text or of an unfinished character.
        tokens: new ids.
        logprobs: of the new ids, where asked for.
        prompt_logprobs: of the prompt, once, where asked for; the first token has none.
        finish_reason: None while it goes on.
        error: what went wrong, with finish_reason "error".
        num_prompt_tokens: for the usage of the request.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        num_completion_tokens: so far.
        queue_s: seconds that the request waited for its first step.
    """

    id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    queue_s: float = 0.0
