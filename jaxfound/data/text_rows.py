"""Texts as rows in which every token is predicted once: what a loss is measured on. In memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxfound.config.train import DataConfig
from jaxfound.data.batch import Batch
from jaxfound.data.documents import Dropped, Fault, read_documents, refuse_or_count
from jaxfound.data.errors import DataError
from jaxfound.data.loader import positions_of
from jaxfound.data.packing import Pieces, assign, cut
from jaxfound.data.source import find_files
from jaxfound.data.tokenizer import JsonTokenizer, Tokenizer


class Text(NamedTuple):
    """A document's ids, int32 [T], with nothing before or after them, and its UTF-8 bytes."""

    ids: np.ndarray
    num_bytes: int


class Edges(NamedTuple):
    """Ids before and after the text of a document."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class TextRows:
    """Pieces of documents in rows [R T]; a slot holds an input and, as its target, the next token.

    Attributes:
        tokens: inputs, int32.
        targets: int32.
        segment_ids: as in `Batch`, int32.
        piece: number of the piece in each slot, -1 in padding.
        documents: document of each piece, [P].
        lengths: targets of each piece, [P].
        num_bytes: UTF-8 bytes of the text that is predicted.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    piece: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.lengths.sum())

    @property
    def seq_len(self) -> int:
        """Slots of a row."""
        return self.tokens.shape[1]

    def batches(self, size: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield every row once, `size` at a time, and the piece of each slot [B T].

        The rows that the last batch lacks are padding.
        """
        for first in range(0, len(self.tokens), size):
            part = slice(first, first + size)
            missing = ((0, max(0, first + size - len(self.tokens))), (0, 0))
            tokens, targets, segments = (
                np.pad(a[part], missing) for a in (self.tokens, self.targets, self.segment_ids)
            )
            piece = np.pad(self.piece[part], missing, constant_values=-1)
            yield Batch(tokens, targets, positions_of(segments), segments, segments > 0), piece


def read_texts(
    cfg: DataConfig, tokenizer: Tokenizer, *, min_tokens: int | None = None
) -> list[Text]:
    """Return the documents of `cfg.source` in order, whole, until they hold `min_tokens` ids.

    Raises:
        DataError: if a source is missing or damaged, or no document is usable.
    """
    files, texts, num_tokens = find_files(cfg.source), list[Text](), 0
    dropped: dict[str, Dropped] = {}
    for document in read_documents(
        files, text_field=cfg.text_field, on_bad_record=cfg.on_bad_record, dropped=dropped
    ):
        try:
            ids = tokenizer.encode(document.text)
        except ValueError as err:
            fault = Fault("not encodable", str(err), "Change the text")
            place = f"{document.file}:{document.line}"
            refuse_or_count(fault, place=place, policy=cfg.on_bad_record, to=dropped)
            continue
        texts.append(Text(ids, len(document.text.encode())))
        num_tokens += len(ids)
        if min_tokens is not None and num_tokens >= min_tokens:
            break
    if not texts:
        left_out = "; ".join(f"{d.count} left out ({why})" for why, d in sorted(dropped.items()))
        raise DataError(
            f"no usable document in {', '.join(file.name for file in files)}: "
            f"{left_out or 'there is no line of text'}. Name a file that holds text"
        )
    return texts


def edges_of(tokenizer: Tokenizer, *, step: int) -> Edges:
    """Return the edges that documents had where the weights were trained.

    In our training that is bos and eos. Step 0 was trained elsewhere: its texts begin as the
    tokenizer's own files say, and no token ends them.
    """
    if step == 0 and isinstance(tokenizer, JsonTokenizer):
        return Edges(tokenizer.prompt_start, ())
    return Edges((tokenizer.bos_id,), (tokenizer.eos_id,))


def rows_of(texts: Sequence[Text], tokenizer: Tokenizer, *, edges: Edges, seq_len: int) -> TextRows:
    """Return rows in which every token but the first of its document is the target of one slot.

    A document of more than `seq_len` targets is cut into pieces that do not overlap: the first
    tokens of a piece see nothing of the one before. One of fewer than 2 ids has no target.

    Raises:
        DataError: if no document has a target.
    """
    start, end = (np.array(ids, np.int32) for ids in edges)
    documents = [np.concatenate([start, text.ids, end]) for text in texts]
    lengths = np.array([len(ids) for ids in documents], np.int64)
    usable = np.flatnonzero(lengths >= 2)
    if not usable.size:
        raise DataError(
            f"none of the {len(texts)} documents has 2 tokens or more, and the first of each is "
            "not predicted: there is nothing to measure. Name longer texts"
        )
    pieces = cut(lengths, documents=usable, seq_len=seq_len)
    used = [texts[i] for i in usable.tolist()]
    # Without a start token the first of the text is not predicted: its bytes are not paid for.
    unpaid = () if edges.start else (tokenizer.decode(text.ids[:1]) for text in used)
    num_bytes = sum(text.num_bytes for text in used) - sum(len(t.encode()) for t in unpaid)
    return _filled(documents, pieces, seq_len=seq_len, pad_id=tokenizer.pad_id, num_bytes=num_bytes)


def _filled(
    documents: list[np.ndarray], pieces: Pieces, *, seq_len: int, pad_id: int, num_bytes: int
) -> TextRows:
    """Return the rows with every piece in its place."""
    row_P = assign(pieces.length, seq_len=seq_len, packing="packed")
    shape = (int(row_P.max()) + 1, seq_len)
    tokens, targets = np.full(shape, pad_id, np.int32), np.full(shape, pad_id, np.int32)
    segments, piece = np.zeros(shape, np.int32), np.full(shape, -1)
    num_filled, num_segments = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int32)
    for number, (document, start, length) in enumerate(zip(*pieces, strict=True)):
        row, ids = row_P[number], documents[document][start : start + length + 1]
        here = slice(num_filled[row], num_filled[row] + length)
        tokens[row, here], targets[row, here] = ids[:-1], ids[1:]
        num_filled[row] += length
        num_segments[row] += 1
        segments[row, here], piece[row, here] = num_segments[row], number
    return TextRows(tokens, targets, segments, piece, pieces.document, pieces.length, num_bytes)
