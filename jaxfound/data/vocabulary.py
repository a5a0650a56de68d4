"""What a tokenizer is to the rest of the library, and the checks on its ids."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxfound.data.errors import DataError

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


def check_ids(ids: np.ndarray, *, vocab_size: int) -> None:
    """Every id is one that the tokenizer can produce; ValueError names the first that is not."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(
            f"token id {bad[0]} is outside the tokenizer's ids 0…{vocab_size - 1}: rows that only "
            "pad the vocabulary must never be sampled"
        )


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """The model has an embedding row for every id of the tokenizer; it may have more.

    Args:
        tokenizer: makes the ids.
        vocab_size: the model's.

    Raises:
        DataError: if it has not; names both numbers.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but "
            f"model.vocab_size={vocab_size} has rows up to {vocab_size - 1}: they do not belong "
            "together. Name the tokenizer that the model was trained with"
        )
