"""A conversation as token ids: the template's marks are tokens, the messages are plain text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from jaxfound.data.chat_template import ChatTemplate, Message
from jaxfound.data.errors import DataError
from jaxfound.data.tokenizer_json import CONFIG, TEMPLATE, JsonTokenizer, read_text
from jaxfound.data.vocabulary import Tokenizer

# Characters that Unicode reserves for a program's own use: they stand in no text. One of them,
# put inside a special token that a message spells, keeps it from being read as that token.
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: ChatTemplate | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> np.ndarray:
    """Return the ids of a conversation, int32 [T], with exactly one start token.

    The start token comes once whether the template prints it, the tokenizer would add it, both or
    neither; a tokenizer without one gets none. A special token spelled inside a message stays text.

    Args:
        tokenizer: with a chat template beside it, unless `template` is given.
        messages: each with a `role` and what the template reads, e.g. `content`.
        template: in place of the tokenizer's.
        add_generation_prompt: end where the model's answer begins.
        tools: what the model may call, for templates that know tools.
        variables: more of the template's variables.

    Raises:
        DataError: if there is no template, or it refuses the messages.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        raise DataError(
            f"the tokenizer {tokenizer.name} has no chat template: chats need a tokenizer.json "
            f"with a chat_template in its {CONFIG}, or a {TEMPLATE} beside it"
        )
    template = template or tokenizer.chat
    if template is None:
        raise DataError(
            f"{tokenizer.name} has no chat template: put a {TEMPLATE} beside it, or give the "
            "prompt as plain text"
        )
    given: list[object] = [list(messages), None if tools is None else list(tools)]
    spelled = [mark for mark in tokenizer.special_tokens if any(mark in t for t in _texts(given))]
    guard = _free_guard(template, given) if spelled else ""
    safe_messages, safe_tools = cast(list, _guarded(given, spelled, guard))
    text = template.render(
        safe_messages,
        add_generation_prompt=add_generation_prompt,
        tools=safe_tools,
        variables=variables,
    )
    # As a whole where that is safe: the pieces of some tokenizers depend on what is before them.
    whole = not spelled
    id_T = tokenizer.encode_marked(text) if whole else _encode_apart(tokenizer, text, guard)
    return _with_one_start(tokenizer, id_T, text)


def read_template(tokenizer: Tokenizer, path: Path) -> ChatTemplate:
    """Return the template in a jinja file, for the special tokens of this tokenizer.

    Raises:
        DataError: if it cannot be read.
    """
    tokens = tokenizer.template_tokens if isinstance(tokenizer, JsonTokenizer) else {}
    return ChatTemplate(read_text(path), place=str(path), tokens=tokens)


def _with_one_start(tokenizer: JsonTokenizer, id_T: np.ndarray, text: str) -> np.ndarray:
    """Return the ids with one bos in front, unless the template has begun with one after blanks."""
    if not tokenizer.has_bos:
        return id_T
    others = np.flatnonzero(id_T != tokenizer.bos_id)
    first = int(others[0]) if others.size else len(id_T)
    if first == 0 and text.lstrip().startswith(tokenizer.text_of(tokenizer.bos_id)):
        return id_T
    return np.concatenate([np.array([tokenizer.bos_id], np.int32), id_T[first:]])


def _texts(value: object) -> Iterator[str]:
    """Yield every text in messages and tools, the names of their fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _guarded(value: object, spelled: Sequence[str], guard: str) -> object:
    """Return the same messages and tools with `guard` inside every special token they spell."""
    if isinstance(value, str):
        for mark in spelled:
            value = value.replace(mark, mark[:1] + guard + mark[1:])
        return value
    if isinstance(value, Mapping):
        return {
            _guarded(key, spelled, guard): _guarded(item, spelled, guard)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_guarded(item, spelled, guard) for item in value]
    return value


def _free_guard(template: ChatTemplate, given: object) -> str:
    """Return a guard that is in no message and not in the template."""
    taken = set(template.text).union(*_texts(given))
    free = [guard for guard in GUARDS if guard not in taken]
    if not free:
        raise DataError("the messages hold every character that Unicode reserves as no character")
    return free[0]


def _encode_apart(tokenizer: JsonTokenizer, text: str, guard: str) -> np.ndarray:
    """Return the ids of a rendered text piece by piece: special tokens, and plain text between."""
    marks = sorted(tokenizer.special_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, marks)))
    ids: list[int] = []
    at, after_blanks = 0, False
    for match in [*pattern.finditer(text), None]:
        plain = text[at : len(text) if match is None else match.start()].replace(guard, "")
        plain = plain.lstrip() if after_blanks else plain
        mark = None if match is None else tokenizer.special_tokens[match[0]]
        if mark is not None and mark.takes_blanks_before:
            plain = plain.rstrip()
        ids += tokenizer.encode(plain).tolist()
        if match is not None and mark is not None:
            ids.append(mark.id)
            at, after_blanks = match.end(), mark.takes_blanks_after
    return np.asarray(ids, np.int32)
