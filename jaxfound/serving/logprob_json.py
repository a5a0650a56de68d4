"""Log-probabilities in OpenAI's two forms: of completions (columns) and of chats (rows)."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from jaxfound.data.text_stream import CUT, TextStream
from jaxfound.data.tokenizer import JsonTokenizer, Tokenizer
from jaxfound.serving.request import TokenLogprobs

type Json = dict[str, object]

# JSON has no infinity; clients know this as the log-probability of what cannot be drawn.
LEAST = -9999.0


@lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return what one id looks like by itself; never empty, and never a cut character."""
    text = tokenizer.decode([token])
    if text and CUT not in text:
        return text
    written = tokenizer.text_of(token) if isinstance(tokenizer, JsonTokenizer) else ""
    return written or f"<token {token}>"


class Columns:
    """The log-probabilities of one continuation of `/v1/completions`, as they come.

    Args:
        tokenizer: names the ids.
        prompt: ids of the prompt, if it is part of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stream = TextStream(tokenizer)
        self._offset = 0
        self._ends_prompt = False

    def of_prompt(self, rows: Sequence[TokenLogprobs | None]) -> Json:
        """Return the columns of the prompt's ids; the first has no log-probability."""
        # A prompt's last character may be cut; the continuation begins a text of its own.
        found = self._columns(self._prompt, rows)
        self._offset += len(self._stream.finish())
        return found

    def of_tokens(self, rows: Sequence[TokenLogprobs]) -> Json:
        """Return the columns of new ids."""
        return self._columns([row.token for row in rows], rows)

    def _columns(self, ids: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> Json:
        texts, offsets = [], []
        for token in ids:
            texts.append(token_text(self._tokenizer, token))
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return {
            "tokens": texts,
            "token_logprobs": [None if row is None else finite(row.logprob) for row in rows],
            "top_logprobs": [None if row is None else self._top(row) for row in rows],
            "text_offset": offsets,
        }

    def _top(self, row: TokenLogprobs) -> Json:
        # Two ids may look alike; the more likely one, which comes first, keeps the name.
        found: Json = {}
        for token, logprob in (*row.top, (row.token, row.logprob)):
            found.setdefault(token_text(self._tokenizer, token), finite(logprob))
        return found


def joined(columns: Iterable[Json]) -> Json:
    """Return the columns one after the other."""
    found: dict[str, list[object]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for each in columns:
        for name, values in found.items():
            more = each[name]
            assert isinstance(more, list)
            values += more
    return dict(found)


def chat_rows(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs]) -> list[Json]:
    """Return the rows of new ids, as `/v1/chat/completions` has them."""
    return [
        {
            **_row(tokenizer, row.token, row.logprob),
            "top_logprobs": [_row(tokenizer, token, logprob) for token, logprob in row.top],
        }
        for row in rows
    ]


def _row(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    text = token_text(tokenizer, token)
    # The bytes of a cut character are not known by its id alone.
    whole = tokenizer.decode([token]) == text
    return {
        "token": text,
        "logprob": finite(logprob),
        "bytes": list(text.encode("utf-8")) if whole else None,
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can write."""
    return max(logprob, LEAST)
