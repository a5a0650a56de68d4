"""What has been said about a request, and what its next tokens add to it."""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from jaxfound.data.tokenizer import Tokenizer
from jaxfound.serving.request import FinishReason, Output, Sequence, TokenLogprobs
from jaxfound.serving.step import RowResult
from jaxfound.serving.stopping import StoppingText


class Taken(NamedTuple):
    """News of a step.

    Attributes:
        output: what to tell.
        num_read: drawn ids that count; those after an end do not.
        reason: why the request ends with them, or None.
    """

    output: Output
    num_read: int
    reason: FinishReason | None


class Progress:
    """A request that has not ended: its text so far and its counts.

    Args:
        sequence: of the scheduler.
        tokenizer: decodes.
        added_s: when it came, by the engine's clock.

    Attributes:
        sequence: of the scheduler.
        begun_s: when its first step began; None before that.
        num_drawn: ids of the continuation that were read, the end-of-text id not among them.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, *, added_s: float = 0.0) -> None:
        self.sequence = sequence
        self.begun_s: float | None = None
        self._added_s = added_s
        self.num_drawn = 0
        self._eos_id = None if sequence.request.ignore_eos else tokenizer.eos_id
        self._text = StoppingText(tokenizer, sequence.request.stop)
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}

    def take(self, result: RowResult, *, start: int) -> Taken:
        """Return what a row's result adds.

        Args:
            result: of this request's row, without an error.
            start: tokens that were cached before the row's step.
        """
        request, first = self.sequence.request, self.num_drawn == 0
        if request.prompt_logprobs and first:
            self._prompt_logprobs.update(enumerate(result.prompt_logprobs, start + 1))
        pieces: list[str] = []
        reason: FinishReason | None = None
        num_read = 0
        while num_read < len(result.tokens) and reason is None:
            token = result.tokens[num_read]
            num_read += 1
            if token == self._eos_id:
                reason = "stop"
                break
            pieces.append(self._text.push(token))
            reason = self._reason_to_end(request.max_tokens)
        output = Output(
            request.id,
            text="".join(pieces),
            tokens=result.tokens[: len(pieces)],
            logprobs=reported(result.logprobs[: len(pieces)], request.logprobs),
            prompt_logprobs=self._of_prompt() if first and num_read else (),
        )
        return Taken(output, num_read, reason)

    def tell(self, output: Output) -> Output:
        """Return `output` with the request's counts."""
        return replace(
            output,
            num_prompt_tokens=len(self.sequence.request.prompt),
            num_cached_tokens=self.sequence.num_reused,
            num_completion_tokens=self.num_drawn,
            queue_s=0.0 if self.begun_s is None else self.begun_s - self._added_s,
        )

    def end(self, output: Output, reason: FinishReason) -> Output:
        """Return the last output, with the text that was held back."""
        text = output.text + self._text.finish()
        # A last character that stays cut may complete a stop text.
        if reason == "length" and self._text.stopped:
            reason = "stop"
        return self.tell(replace(output, text=text, finish_reason=reason))

    def _reason_to_end(self, max_tokens: int) -> FinishReason | None:
        self.num_drawn += 1
        if self._text.stopped:
            return "stop"
        return "length" if self.num_drawn == max_tokens else None

    def _of_prompt(self) -> tuple[TokenLogprobs | None, ...]:
        request = self.sequence.request
        if not request.prompt_logprobs:
            return ()
        known = [self._prompt_logprobs[place] for place in range(1, len(request.prompt))]
        self._prompt_logprobs.clear()
        return (None, *reported(known, request.logprobs or 0))


def reported(logprobs: Items[TokenLogprobs], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities with `num_top` likely ids each; none where None was asked for."""
    if num_top is None:
        return ()
    return tuple(replace(one, top=one.top[:num_top]) for one in logprobs)
