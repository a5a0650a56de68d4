"""One split's rows, written a chunk at a time, whatever the size of the text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxfound.data.bins import SplitCounts
from jaxfound.data.packing import Pieces

# Slots filled at one time: about 50 MB of indices and blocks.
CHUNK_SLOTS = 1 << 20


def write_split(
    folder: Path,
    *,
    pieces: Pieces,
    bin_of_piece: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    pad_id: int,
) -> SplitCounts:
    """Write the arrays of `bins.Bins` into `folder`; return what they hold.

    Args:
        folder: made here.
        pieces: stretches of documents.
        bin_of_piece: row of each piece, [P].
        tokens: ids of all documents of all splits, one after the other.
        lengths: ids of each of those documents, [N].
        seq_len: slots of a row.
        pad_id: token and target in slots that hold none.
    """
    folder.mkdir()
    order = np.argsort(bin_of_piece, kind="stable")
    bin_P = bin_of_piece[order]
    document_P, start_P, length_P = (field[order] for field in pieces)
    num_bins = int(bin_P[-1]) + 1
    piece_offsets = np.searchsorted(bin_P, np.arange(num_bins + 1))
    filled_P = np.cumsum(length_P) - length_P
    first_token = np.cumsum(lengths) - lengths
    rows = _Rows(
        bin=bin_P,
        segment=np.arange(len(bin_P)) - piece_offsets[bin_P] + 1,
        slot=filled_P - filled_P[piece_offsets[bin_P]],
        origin=first_token[document_P] + start_P,
        length=length_P,
        offsets=piece_offsets,
        seq_len=seq_len,
    )
    rows.write(folder, tokens=tokens, pad_id=pad_id)
    np.save(folder / "piece_documents.npy", document_P)
    np.save(folder / "piece_offsets.npy", piece_offsets)
    documents = np.unique(document_P)
    return SplitCounts(
        documents=len(documents),
        pieces=len(bin_P),
        bins=num_bins,
        tokens=int(length_P.sum()),
        longest_tokens=int(lengths[documents].max()),
        slots=num_bins * seq_len,
    )


@dataclass(frozen=True)
class _Rows:
    """Where every piece goes (row, segment, first slot) and where its tokens come from, [P]."""

    bin: np.ndarray
    segment: np.ndarray
    slot: np.ndarray
    origin: np.ndarray
    length: np.ndarray
    offsets: np.ndarray
    seq_len: int

    def write(self, folder: Path, *, tokens: np.ndarray, pad_id: int) -> None:
        num_bins = len(self.offsets) - 1
        segment_dtype = np.uint16 if self.segment.max() < 1 << 16 else np.uint32
        create = np.lib.format.open_memmap
        shape = (num_bins, self.seq_len)
        out_tokens = create(folder / "tokens.npy", "w+", tokens.dtype, shape)
        out_targets = create(folder / "targets.npy", "w+", tokens.dtype, shape)
        out_segments = create(folder / "segment_ids.npy", "w+", segment_dtype, shape)
        step = max(1, CHUNK_SLOTS // self.seq_len)
        for first in range(0, num_bins, step):
            last = min(first + step, num_bins)
            slots, origin, segment = self._chunk(first, last)
            for out, values, empty in (
                (out_tokens, tokens[origin], pad_id),
                (out_targets, tokens[origin + 1], pad_id),
                (out_segments, segment, 0),
            ):
                block = np.full((last - first) * self.seq_len, empty, out.dtype)
                block[slots] = values
                out[first:last] = block.reshape(-1, self.seq_len)
        for out in (out_tokens, out_targets, out_segments):
            out.flush()

    def _chunk(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the filled slots of rows first … last-1, and token index and segment of each."""
        part = slice(self.offsets[first], self.offsets[last])
        length = self.length[part]
        begin = np.cumsum(length) - length
        within = np.arange(length.sum()) - np.repeat(begin, length)
        slots = np.repeat((self.bin[part] - first) * self.seq_len + self.slot[part], length)
        origin = np.repeat(self.origin[part], length)
        return slots + within, origin + within, np.repeat(self.segment[part], length)
