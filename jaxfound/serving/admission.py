"""Which requests can be served at all: those that could never finish are refused at the door."""

from typing import Literal

from jaxfound.serving.errors import RequestError
from jaxfound.serving.page_pool import PagePool
from jaxfound.serving.request import Request

type Refusal = Literal["empty", "too_long", "too_many_pages", "queue_full"]


class AdmissionError(RequestError):
    """A request that is not taken, with the figures.

    Attributes:
        reason: `empty`, `too_long` and `too_many_pages` hold for ever; `queue_full` passes.
        asked: what the request needs.
        limit: what there is.
    """

    def __init__(self, message: str, *, reason: Refusal, asked: int, limit: int) -> None:
        super().__init__(message)
        self.reason: Refusal = reason
        self.asked = asked
        self.limit = limit


def most_cached(request: Request) -> int:
    """Return the most tokens a request can have in the cache: the last one drawn is never there."""
    return len(request.prompt) + request.max_tokens - 1


def check(request: Request, *, pool: PagePool, max_length: int) -> None:
    """Refuse a request that could not finish if it were alone.

    Args:
        request: what is asked.
        pool: where its pages would come from.
        max_length: most tokens of prompt and continuation.

    Raises:
        AdmissionError: says what is too much, by how much, and what would be taken.
    """
    prompt, more = len(request.prompt), request.max_tokens
    if prompt < 1 or more < 1:
        raise AdmissionError(
            f"a prompt of {prompt} tokens and max_tokens={more}: both must be at least 1",
            reason="empty",
            asked=min(prompt, more),
            limit=1,
        )
    if prompt + more > max_length:
        raise AdmissionError(
            f"max_tokens={more} after a prompt of {prompt} tokens: the sum, {prompt + more}, must "
            f"be at most {max_length}. {_way_out(prompt, room=max_length)}",
            reason="too_long",
            asked=prompt + more,
            limit=max_length,
        )
    pages = pool.pages_for(most_cached(request))
    if pages > pool.num_pages:
        slots = pool.num_pages * pool.page_size
        raise AdmissionError(
            f"max_tokens={more} after a prompt of {prompt} tokens takes {pages} pages of "
            f"{pool.page_size} tokens, and the cache has {pool.num_pages}. "
            f"{_way_out(prompt, room=slots + 1)}, or raise serve.num_pages",
            reason="too_many_pages",
            asked=pages,
            limit=pool.num_pages,
        )


def _way_out(prompt: int, *, room: int) -> str:
    if prompt < room:
        return f"Use max_tokens up to {room - prompt}"
    return f"Use a prompt of at most {room - 1} tokens"
