"""A request's outputs, from the first to the last, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfound.serving.errors import UnavailableError
from jaxfound.serving.request import FinishReason, Output, TokenLogprobs


@dataclass(frozen=True)
class Completion:
    """A whole continuation.

    Attributes:
        text: up to a stop text or the end.
        tokens: its ids, those of a stop text included, the end-of-text id not.
        logprobs: of the ids, where asked for.
        finish_reason: why it ended.
        num_prompt_tokens: ids before it.
        num_cached_tokens: of those, found in the prefix cache.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int


def completion(outputs: Sequence[Output]) -> Completion:
    """Return all outputs of one request, in their order, as a whole.

    Raises:
        UnavailableError: it ended with an error.
    """
    last = outputs[-1]
    if last.finish_reason is None or last.finish_reason == "error":
        raise UnavailableError(f"a continuation did not come to its end: {last.error}")
    return Completion(
        text="".join(output.text for output in outputs),
        tokens=tuple(token for output in outputs for token in output.tokens),
        logprobs=tuple(one for output in outputs for one in output.logprobs),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
