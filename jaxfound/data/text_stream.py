"""Text out of ids that come one at a time: nothing is sent that a later id could change."""

from jaxfound.data.vocabulary import Tokenizer

CUT = "\ufffd"


class TextStream:
    """Turns ids into pieces of text whose sum is the text of all of them.

    A character may be spread over several ids, and a decoder may drop the blank before its first
    word. So the text of a short window of ids is compared with what was sent of it, and a tail
    of U+FFFD, the mark of a character that is not complete, waits.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The window's ids, how much of its text was sent, and how many of its ids that text ends.
        self._ids: list[int] = []
        self._sent = ""
        self._whole = 0

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is cut."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        ready = text.rstrip(CUT)
        if not ready.startswith(self._sent):
            return ""
        piece = ready[len(self._sent) :]
        self._sent = ready
        if ready == text:
            self._begin_window()
        return piece

    def finish(self) -> str:
        """Return what is left, U+FFFD for a character that stays cut; the stream is empty then."""
        text = self._tokenizer.decode(self._ids)
        if text.startswith(self._sent):
            piece = text[len(self._sent) :]
        else:
            # A decoder may show a whole character as cut because of the one after it.
            piece = self._tokenizer.decode(self._ids[self._whole :])
        self._ids, self._sent, self._whole = [], "", 0
        return piece

    def _begin_window(self) -> None:
        """Keep the ids since the last end of a character, if they show any text by themselves."""
        last = self._ids[self._whole :]
        text = self._tokenizer.decode(last)
        if text and self._whole:
            self._ids, self._sent = last, text
        self._whole = len(self._ids)
