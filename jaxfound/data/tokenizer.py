"""Text to token ids and back: bytes in core, any tokenizer.json through `tokenizers`.

Text is always plain text: `</s>` or `<|eot|>` written inside a document or a prompt is encoded
as its characters, in training and in serving alike. Only the program adds bos and eos.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from jaxfound.data.errors import DataError

if TYPE_CHECKING:
    import tokenizers

Ids = Sequence[int] | np.ndarray


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer.

    Attributes:
        name: `byte`, or the path it was read from.
        fingerprint: hash of everything that decides the ids; prepared data carries it.
        vocab_size: one more than the largest id.
        bos_id: id that begins a document.
        eos_id: id that ends a document.
        pad_id: id that fills slots which hold no token.
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int32 [T], with no bos, eos or pad among them."""
        ...

    def decode(self, ids: Ids) -> str:
        """Return the text of `ids`; bos, eos and pad give nothing, cut characters give U+FFFD."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8, then bos 256, eos 257, pad 258."""

    name = "byte"
    fingerprint = hashlib.sha256(b"utf-8 bytes, bos 256, eos 257, pad 258").hexdigest()
    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of `text`; ValueError if it holds half of a surrogate pair."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        id_T = np.asarray(ids, np.int64)
        check_ids(id_T, vocab_size=self.vocab_size)
        return id_T[id_T < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


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


class TokenizerFile:
    """A tokenizer.json, read by the `tokenizers` package.

    bos, eos and pad come from a tokenizer_config.json in the same folder, else from well-known
    names. A file without bos begins documents with eos; one without pad pads with eos.

    Raises:
        DataError: if the file is missing or damaged, names no end-of-document token, or
            `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        raw = _read(path)
        self._tokenizer = _parse(raw, path)
        # Settings saved in the file that would add, cut or pad tokens behind our back.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        named = _named_specials(path.with_name("tokenizer_config.json"))
        eos = _find_special(vocab, named.get("eos_token"), EOS_TOKENS)
        if eos is None:
            raise DataError(
                f"{path} names no end-of-document token: none of {list(EOS_TOKENS)} is in its "
                "vocabulary. Put a tokenizer_config.json with eos_token beside it"
            )
        bos = _find_special(vocab, named.get("bos_token"), BOS_TOKENS)
        pad = _find_special(vocab, named.get("pad_token"), PAD_TOKENS)
        self.name = str(path)
        self.vocab_size = max(vocab.values()) + 1
        self.eos_id = eos
        self.bos_id = eos if bos is None else bos
        self.pad_id = eos if pad is None else pad
        ids = f"bos {self.bos_id} eos {self.eos_id} pad {self.pad_id}"
        self.fingerprint = hashlib.sha256(raw + ids.encode()).hexdigest()
        self._control_ids = np.array([self.bos_id, self.eos_id, self.pad_id])

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

    def decode(self, ids: Ids) -> str:
        """Return the text of `ids`; special tokens give nothing."""
        id_T = np.asarray(ids, np.int64)
        check_ids(id_T, vocab_size=self.vocab_size)
        return self._tokenizer.decode(id_T.tolist(), skip_special_tokens=True)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the byte tokenizer for `byte`, else the tokenizer.json at that path or folder."""
    if name_or_path == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(name_or_path)
    return TokenizerFile(path / "tokenizer.json" if path.is_dir() else path)


def check_ids(ids: np.ndarray, *, vocab_size: int) -> None:
    """Every id is one that the tokenizer can produce; ValueError names the first that is not."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(
            f"token id {bad[0]} is outside the tokenizer's ids 0…{vocab_size - 1}: rows that only "
            "pad the vocabulary must never be sampled"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise DataError(
            f"cannot read the tokenizer {path}: {err.strerror}. data.tokenizer is `byte` or the "
            "path of a tokenizer.json"
        ) from err


def _parse(raw: bytes, path: Path) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError as err:
        raise DataError(
            f"reading {path} needs the `tokenizers` package: pip install 'jaxfound[data]', or use "
            "data.tokenizer=byte"
        ) from err
    try:
        json.loads(raw)
        return tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as err:
        raise DataError(
            f"{path} is not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read: "
            f"{err}"
        ) from err


def _named_specials(path: Path) -> dict[str, str]:
    """Return eos_token, bos_token and pad_token as tokenizer_config.json spells them."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as err:
        raise DataError(f"{path} is not JSON: {err}") from err
    named = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[key] = value
    return named


def _find_special(vocab: dict[str, int], named: str | None, known: tuple[str, ...]) -> int | None:
    for token in (named,) if named else known:
        if token in vocab:
            return vocab[token]
    return None
