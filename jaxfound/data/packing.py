"""Documents cut into pieces, and pieces put into bins of fixed length. Lengths only, no tokens."""

import bisect
from typing import Literal, NamedTuple

import numpy as np

Packing = Literal["packed", "padded"]

# Pieces that are packed together. More packs no tighter in practice, and takes more memory.
WINDOW = 1 << 16
# Pieces that a row may be limited to: attention has a place for each piece of the fullest row, in
# every row, and few places are faster.
LIMITS = (2, 4, 8, 16, 32, 64)
# Share of bins more than without a limit that one may cost, or one bin where there are so many.
LIMIT_COST, FEW_BINS = 0.005, 20


class Pieces(NamedTuple):
    """Stretches of documents, [P] each, int64.

    A piece of `length` inputs that begins at token `start` of its document has the targets
    `start + 1 … start + length`: its last target is the next piece's first input.

    Attributes:
        document: index of the document.
        start: offset of the first input in the document, bos being 0.
        length: number of inputs, which is the number of targets.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


def cut(lengths: np.ndarray, *, documents: np.ndarray, seq_len: int) -> Pieces:
    """Return the pieces in which every next-token pair of every document appears exactly once.

    Args:
        lengths: tokens of each document, bos and eos included, [N]; two or more each.
        documents: indices of the documents to cut, in order.
        seq_len: most inputs of a piece.
    """
    pairs = lengths[documents] - 1
    num_pieces = -(-pairs // seq_len)
    first = np.cumsum(num_pieces) - num_pieces
    start = (np.arange(num_pieces.sum()) - np.repeat(first, num_pieces)) * seq_len
    length = np.minimum(np.repeat(pairs, num_pieces) - start, seq_len)
    return Pieces(np.repeat(documents, num_pieces), start, length)


def assign(
    lengths: np.ndarray, *, seq_len: int, packing: Packing, most_pieces: int | None = None
) -> np.ndarray:
    """Return the bin of each piece, int64 [P]; bins are numbered in the order of their first piece.

    `packed` is best fit, longest piece first, within windows of `WINDOW` pieces. The shortest
    pieces come last and fill what is left, so that a bin may hold a hundred where most hold two. So
    bins take no more of them than the smallest of `LIMITS` that costs next to nothing.

    Args:
        lengths: inputs of each piece, [P].
        seq_len: slots of a bin.
        packing: `padded` gives each piece a bin of its own.
        most_pieces: the limit, whatever it costs; None looks for one.
    """
    if packing == "padded":
        return np.arange(len(lengths))
    if most_pieces is not None:
        return _in_windows(lengths, seq_len, limit=most_pieces)
    free = _in_windows(lengths, seq_len, limit=None)
    num_bins, fullest = free.max(initial=-1) + 1, np.bincount(free).max(initial=0)
    most_bins = max((1 + LIMIT_COST) * num_bins, num_bins + (num_bins >= FEW_BINS))
    for limit in (limit for limit in LIMITS if limit < fullest):
        if len(lengths) <= limit * most_bins:
            limited = _in_windows(lengths, seq_len, limit=limit)
            if limited.max() + 1 <= most_bins:
                return limited
    return free


def _in_windows(lengths: np.ndarray, seq_len: int, *, limit: int | None) -> np.ndarray:
    """Return the bin of each piece; no window shares a bin with another."""
    parts, num_bins = [np.empty(0, np.int64)], 0
    for begin in range(0, len(lengths), WINDOW):
        part = _best_fit(lengths[begin : begin + WINDOW], seq_len, limit=limit)
        parts.append(part + num_bins)
        num_bins += int(part.max()) + 1
    return np.concatenate(parts)


def _best_fit(lengths: np.ndarray, seq_len: int, *, limit: int | None) -> np.ndarray:
    """Put each piece into the fullest bin that still holds it, longest first.

    Args:
        limit: most pieces of a bin; None for as many as fit.
    """
    bin_P = np.empty(len(lengths), np.int64)
    pieces_of_bin = np.zeros(len(lengths), np.int64)
    # (free slots, bin), sorted: the first entry that is large enough is the fullest bin that fits.
    open_bins: list[tuple[int, int]] = []
    num_bins = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect.bisect_left(open_bins, (length, -1))
        if place == len(open_bins):
            free, chosen = seq_len, num_bins
            num_bins += 1
        else:
            free, chosen = open_bins.pop(place)
        bin_P[piece] = chosen
        pieces_of_bin[chosen] += 1
        if free > length and pieces_of_bin[chosen] != limit:
            bisect.insort(open_bins, (free - length, chosen))
    return _in_order_of_first_piece(bin_P)


def _in_order_of_first_piece(bin_P: np.ndarray) -> np.ndarray:
    _, first = np.unique(bin_P, return_index=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[bin_P]


def choose_held_out(hashes: np.ndarray, *, fraction: float) -> np.ndarray | None:
    """Return which documents are held out, bool [N]; None if no split leaves one on each side.

    A document's content decides: the `fraction` of the documents with the smallest hashes, at
    least one, is held out. So the order of the files does not matter, and copies of one text
    never lie on both sides.
    """
    if fraction == 0:
        return np.zeros(len(hashes), np.bool_)
    ordered = np.sort(hashes)
    if ordered[0] == ordered[-1]:
        return None
    wanted = max(1, round(fraction * len(hashes)))
    last = ordered[min(wanted, len(hashes)) - 1]
    # Copies of the text on the edge may take the whole of the rest; then the edge is left out.
    return hashes <= last if last < ordered[-1] else hashes < last
