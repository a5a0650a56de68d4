"""Texts that end a continuation: nothing of one is ever shown, however tokens cut it."""

from collections.abc import Sequence

from jaxfound.data.text_stream import TextStream
from jaxfound.data.vocabulary import Tokenizer


class StoppingText:
    """Turns ids into pieces of text that end where a stop text begins.

    Of several stop texts the one that is complete first wins; of those complete at the same
    character, the longest. So the end depends on the text alone, not on how tokens cut it, and
    the pieces join to what a search in the whole text gives.

    Args:
        tokenizer: decodes.
        stop: the texts, none empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(stop)
        # Text that may be the beginning of a stop text.
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text has been met; no more text follows."""
        return self._stopped

    def push(self, token: int) -> str:
        """Return the text that is safe to show since the last call; empty while it is held."""
        if self._stopped:
            return ""
        return self._admit(self._stream.push(token))

    def finish(self) -> str:
        """Return what was held back, unless it holds a stop text; the end of the text."""
        if self._stopped:
            return ""
        piece = self._admit(self._stream.finish())
        held, self._held = self._held, ""
        return piece + held

    def _admit(self, piece: str) -> str:
        text = self._held + piece
        end = first_stop(text, self._stop)
        if end is not None:
            self._stopped, self._held = True, ""
            return text[:end]
        num_held = beginning_of_stop(text, self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the stop text that is complete first begins in `text`, or None."""
    places = ((text.find(one), one) for one in stop)
    found = [(place + len(one), place) for place, one in places if place >= 0]
    return min(found)[1] if found else None


def beginning_of_stop(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop text."""
    longest = max((len(one) for one in stop), default=1) - 1
    for num in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - num :]
        if any(len(one) > num and one.startswith(tail) for one in stop):
            return num
    return 0
