"""A tokenizer.json and what lies beside it: special tokens, start of a prompt, chat template."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxfound.data.chat_template import ChatTemplate
from jaxfound.data.errors import DataError
from jaxfound.data.vocabulary import Ids, check_ids

if TYPE_CHECKING:
    import tokenizers

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# The parts of tokenizer_config.json that name one token; a template may ask for each.
TOKEN_KEYS = tuple(f"{part}_token" for part in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))

# Names of special tokens in published tokenizers, tried in order when no tokenizer_config.json
# beside the file says which they are.
BOS_TOKENS = (
    "<｜begin▁of▁sentence｜>",  # noqa: RUF001
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "[BOS]",
    "<|startoftext|>",
    "<|endoftext|>",
    "[CLS]",
)
EOS_TOKENS = (
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|endoftext|>",
    "[SEP]",
)
PAD_TOKENS = (
    "<｜▁pad▁｜>",  # noqa: RUF001
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
)


@dataclass(frozen=True)
class Settings:
    """What lies beside a tokenizer.json.

    Attributes:
        tokens: bos_token, eos_token … as written; None where the file says that there is none.
        add_bos: whether prompts begin with bos; None where the file does not say.
        template: text of the chat template, or None.
        place: where the template stands, for messages.
    """

    tokens: dict[str, str | None]
    add_bos: bool | None
    template: str | None
    place: str

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Return the settings in a folder; a file that is not there says nothing.

        Raises:
            DataError: if one of the files is damaged.
        """
        place, jinja = folder / CONFIG, folder / TEMPLATE
        settings = cls.of(_read_json(place) if place.is_file() else {}, place=str(place))
        if not jinja.is_file():
            return settings
        # A template of its own file is the newer one where both are there.
        return cls(settings.tokens, settings.add_bos, read_text(jinja), str(jinja))

    @classmethod
    def of(cls, config: Mapping[str, object], *, place: str) -> "Settings":
        """Return what the object of a tokenizer_config.json says."""
        tokens: dict[str, str | None] = {}
        for key in TOKEN_KEYS:
            value = config.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if value is None or isinstance(value, str):
                tokens |= {key: value} if key in config else {}
        add_bos = config.get("add_bos_token")
        return cls(
            tokens,
            add_bos if isinstance(add_bos, bool) else None,
            _template_of(config.get("chat_template"), place),
            place,
        )


class SpecialToken(NamedTuple):
    """A token that is no text: its id, and whether blanks beside it in a text belong to it."""

    id: int
    takes_blanks_before: bool
    takes_blanks_after: bool


class JsonTokenizer:
    """The text of a tokenizer.json, run by the `tokenizers` package.

    bos, eos and pad come from the settings, else from well-known names. A tokenizer without bos
    begins documents with eos; one without pad pads with eos.

    Attributes:
        name: what messages and prepared data call it.
        fingerprint: hash of its text and of bos, eos and pad.
        vocab_size: one more than the largest id.
        bos_id: id that begins a document.
        eos_id: id that ends a document.
        pad_id: id that fills slots which hold no token.
        has_bos: whether bos is a token of its own, and not eos in its place.
        prompt_start: ids that a published model of this tokenizer expects before a plain prompt.
        template_tokens: special tokens by the names that a chat template uses for them.
        chat: the chat template, or None.

    Raises:
        DataError: if the text is damaged, names no end-of-document token, or `tokenizers` is not
            installed.
    """

    def __init__(self, raw: bytes, settings: Settings, *, name: str) -> None:
        self._raw = raw
        self.name = name
        self._tokenizer = self._parse()
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        eos = _find_special(vocab, settings.tokens, "eos_token", EOS_TOKENS)
        if eos is None:
            raise DataError(
                f"{name} names no end-of-document token: none of {list(EOS_TOKENS)} is in its "
                f"vocabulary. Put a {CONFIG} with eos_token beside it"
            )
        bos = _find_special(vocab, settings.tokens, "bos_token", BOS_TOKENS)
        pad = _find_special(vocab, settings.tokens, "pad_token", PAD_TOKENS)
        self.vocab_size = max(vocab.values()) + 1
        self.eos_id = eos
        self.has_bos = bos is not None
        self.bos_id = eos if bos is None else bos
        self.pad_id = eos if pad is None else pad
        ids = f"bos {self.bos_id} eos {self.eos_id} pad {self.pad_id}"
        self.fingerprint = hashlib.sha256(raw + ids.encode()).hexdigest()
        self._control_ids = np.array([self.bos_id, self.eos_id, self.pad_id])
        adds = self._file_adds_bos() if settings.add_bos is None else settings.add_bos
        self.prompt_start = (self.bos_id,) if self.has_bos and adds else ()
        self.template_tokens = {k: v for k, v in settings.tokens.items() if v is not None}
        self.template_tokens["eos_token"] = self.text_of(eos)
        if bos is not None:
            self.template_tokens["bos_token"] = self.text_of(bos)
        self.chat = None
        if settings.template is not None:
            tokens = self.template_tokens
            self.chat = ChatTemplate(settings.template, place=settings.place, tokens=tokens)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text` as plain text.

        Raises:
            ValueError: if this tokenizer's model itself turns some text into bos, eos or pad (a
                unigram model may): such text cannot be told from the end of a document.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        id_T = np.asarray(found, np.int32)
        control = id_T[np.isin(id_T, self._control_ids)]
        if control.size:
            token = self._tokenizer.id_to_token(int(control[0]))
            raise ValueError(
                f"{self.name} turns plain text into the control token {token!r} (id {control[0]}), "
                "which would end or begin a document. Remove that text, or use another tokenizer"
            )
        return id_T

    def encode_marked(self, text: str) -> np.ndarray:
        """Return the ids of `text` where special tokens written in it are those tokens.

        Only for text that the program wrote, such as a chat template's.
        """
        found = self._marking.encode(text, add_special_tokens=False).ids
        return np.asarray(found, np.int32)

    def decode(self, ids: Ids) -> str:
        """Return the text of `ids`; special tokens give nothing."""
        id_T = np.asarray(ids, np.int64)
        check_ids(id_T, vocab_size=self.vocab_size)
        # A file need not call its bos and eos special.
        text_T = id_T[~np.isin(id_T, self._control_ids)]
        return self._tokenizer.decode(text_T.tolist(), skip_special_tokens=True)

    def text_of(self, token: int) -> str:
        """Return how a token is written, e.g. `<s>`; ValueError if there is no such id."""
        check_ids(np.array([token]), vocab_size=self.vocab_size)
        return self._tokenizer.id_to_token(token) or ""

    @cached_property
    def special_tokens(self) -> dict[str, SpecialToken]:
        """Return the tokens that the file calls special, by how they are written."""
        return {
            token.content: SpecialToken(number, token.lstrip, token.rstrip)
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    @cached_property
    def _marking(self) -> "tokenizers.Tokenizer":
        """Return a second reader of the file: the switch between the two modes is not a call's."""
        return self._parse()

    def _parse(self) -> "tokenizers.Tokenizer":
        try:
            import tokenizers
        except ImportError as err:
            raise DataError(
                f"reading {self.name} needs the `tokenizers` package: pip install "
                "'jaxfound[data]', or use data.tokenizer=byte"
            ) from err
        try:
            json.loads(self._raw)
            parsed = tokenizers.Tokenizer.from_buffer(self._raw)
        except ValueError as err:
            raise DataError(
                f"{self.name} is not a tokenizer.json that `tokenizers` {tokenizers.__version__} "
                f"can read: {err}"
            ) from err
        # Settings saved in the file that would cut or pad behind our back.
        parsed.no_truncation()
        parsed.no_padding()
        return parsed

    def _file_adds_bos(self) -> bool:
        """Return whether the file's own post-processor begins a text with bos."""
        return self._tokenizer.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]


class TokenizerFile(JsonTokenizer):
    """A tokenizer.json, with the tokenizer_config.json and chat_template.jinja beside it.

    Args:
        path: of the tokenizer.json.
        name: what messages call it; its path by default.

    Raises:
        DataError: if a file is missing or damaged, none names the end-of-document token, or
            `tokenizers` is not installed.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        super().__init__(_read(path), Settings.read(path.parent), name=name or str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise DataError(
            f"cannot read the tokenizer {path}: {err.strerror}. data.tokenizer is `byte` or the "
            "path of a tokenizer.json"
        ) from err


def read_text(path: Path) -> str:
    """Return the text of a file; DataError if it is not there or not UTF-8."""
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as err:
        raise DataError(f"{path} is not UTF-8: {err}. Save it as UTF-8") from err


def _read_json(path: Path) -> dict[str, object]:
    try:
        config = json.loads(_read(path))
    except ValueError as err:
        raise DataError(f"{path} is not JSON: {err}") from err
    if not isinstance(config, dict):
        raise DataError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def _template_of(value: object, place: str) -> str | None:
    """Return the template: the text itself, or the one called `default` of several."""
    if value is None or isinstance(value, str):
        return value
    rows = [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
    named = {row.get("name"): row.get("template") for row in rows}
    template = named.get("default")
    if not isinstance(template, str):
        raise DataError(
            f"{place}: chat_template is neither text nor a list with one called 'default'; it has "
            f"{sorted(str(name) for name in named)}. Put the right one into {TEMPLATE} beside it"
        )
    return template


def _find_special(
    vocab: dict[str, int], named: dict[str, str | None], key: str, known: tuple[str, ...]
) -> int | None:
    """Return the id of the token that the settings name, else of the first known one."""
    if key in named and (key == "bos_token" or named[key] is not None):
        known = () if named[key] is None else (str(named[key]),)
    return next((vocab[token] for token in known if token in vocab), None)
