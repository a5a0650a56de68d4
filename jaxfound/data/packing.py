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
# Shares of a bin that may stay empty so that the largest limit holds, where no other does: beyond
# it attention has no places at all, and is many times slower on a GPU.
SLACK = (0.02, 0.05, 0.1, 0.2)


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
    pieces come last and fill what is left, so that a bin may hold a hundred where most hold two.
    So such bins exchange short pieces for a long one of others, until none holds more than the
    smallest of `LIMITS` that this comes to, or that costs next to nothing if it is kept from the
    beginning. For the largest some of each bin may stay empty.

    Args:
        lengths: inputs of each piece, [P].
        seq_len: slots of a bin.
        packing: `padded` gives each piece a bin of its own.
        most_pieces: the limit, whatever it costs; None looks for one.
    """
    if packing == "padded":
        return np.arange(len(lengths))
    windows = [lengths[begin : begin + WINDOW] for begin in range(0, len(lengths), WINDOW)]
    fitted = lambda limit, slots=seq_len: [_best_fit(part, slots, limit=limit) for part in windows]
    free = fitted(None)
    if most_pieces is not None:
        exchanged = _all_exchanged(free, windows, seq_len=seq_len, limit=most_pieces)
        return _joined(exchanged or fitted(most_pieces))
    fullest = max((int(np.bincount(bins).max()) for bins in free), default=0)
    num_bins = _num_bins(free)
    most_bins = max((1 + LIMIT_COST) * num_bins, num_bins + (num_bins >= FEW_BINS))
    for limit in (n for n in LIMITS if n < fullest and len(lengths) <= n * most_bins):
        exchanged = _all_exchanged(free, windows, seq_len=seq_len, limit=limit)
        if exchanged is not None:
            return _joined(exchanged)
        limited = fitted(limit)
        if _num_bins(limited) <= most_bins:
            return _joined(limited)
    for slack in SLACK if fullest > LIMITS[-1] else ():
        roomy = fitted(None, int((1 - slack) * seq_len))
        exchanged = _all_exchanged(roomy, windows, seq_len=seq_len, limit=LIMITS[-1])
        if exchanged is not None and _num_bins(exchanged) <= num_bins / (1 - slack) + 1:
            return _joined(exchanged)
    return _joined(free)


def _num_bins(parts: list[np.ndarray]) -> int:
    return sum(int(bins.max()) + 1 for bins in parts)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return the bin of each piece; no window shares a bin with another."""
    numbered, num_bins = [np.empty(0, np.int64)], 0
    for part in parts:
        numbered.append(part + num_bins)
        num_bins += int(part.max()) + 1
    return np.concatenate(numbered)


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


def _all_exchanged(
    parts: list[np.ndarray], windows: list[np.ndarray], *, seq_len: int, limit: int
) -> list[np.ndarray] | None:
    """Return `_exchanged` of every window; None if one of them does not come to the limit."""
    found = []
    for bins, lengths in zip(parts, windows, strict=True):
        exchanged = _exchanged(bins, lengths, seq_len=seq_len, limit=limit)
        if exchanged is None:
            return None
        found.append(exchanged)
    return found


def _exchanged(
    bin_P: np.ndarray, lengths: np.ndarray, *, seq_len: int, limit: int
) -> np.ndarray | None:
    """Return bins of at most `limit` pieces, or None if exchanges do not come to that.

    A bin with more gives short pieces away for one piece as long as they are together, so that
    both stay as full as they are.

    Args:
        bin_P: bin of each piece.
    """
    if len(lengths) > limit * (bin_P.max() + 1):
        return None
    shortest_first = np.argsort(lengths, kind="stable")
    bins = _Bins(lengths[shortest_first], bin_P[shortest_first], limit=limit)
    # By place in that order; of each bin one after the other.
    by_bin = np.argsort(bins.bin_of, kind="stable")
    begins = np.searchsorted(bins.bin_of[by_bin], np.arange(len(bins.counts) + 1))
    slots = np.bincount(bins.bin_of, weights=bins.lengths).astype(np.int64)
    for full in np.flatnonzero(bins.counts > limit).tolist():
        own = by_bin[begins[full] : begins[full + 1]].tolist()
        free = seq_len - int(slots[full])
        while len(own) > limit:
            found = bins.exchange(own, free=free)
            if found is None:
                return None
            free -= found
    exchanged = np.empty_like(bin_P)
    exchanged[shortest_first] = bins.bin_of
    return _in_order_of_first_piece(exchanged)


class _Bins:
    """Pieces by length, the shortest first, and which bin each is in.

    Attributes:
        lengths: of each piece.
        bin_of: bin of each piece.
        counts: pieces of each bin.
        limit: most of them that a bin may hold.
    """

    def __init__(self, lengths: np.ndarray, bin_of: np.ndarray, *, limit: int) -> None:
        self.lengths, self.bin_of, self.limit = lengths, bin_of.copy(), limit
        self.counts = np.bincount(bin_of)

    def exchange(self, own: list[int], *, free: int) -> int | None:
        """Exchange pieces of `own`, a bin that has too many, for one of a bin that has room.

        Args:
            own: its pieces in their order, which changes.
            free: slots that it has left.

        Returns:
            How many of those it takes; None if there are no such pieces.
        """
        sums = np.concatenate([[0], np.cumsum(self.lengths[own])])
        num_given = min(len(own) - self.limit + 1, self.limit)
        while num_given > 1:
            wanted = sums[num_given:] - sums[:-num_given]
            has_room = self.counts[self.bin_of] <= self.limit - num_given + 1
            places = np.flatnonzero(has_room)
            lengths = self.lengths[places]
            found = np.searchsorted(lengths, wanted)
            fits = np.append(lengths, np.iinfo(np.int64).max)[found] <= wanted + free
            if fits.any():
                # The longest: long pieces are in bins of few.
                begin = int(fits.nonzero()[0][-1])
                taken = int(places[found[begin]])
                self._move(own, slice(begin, begin + num_given), taken)
                return int(self.lengths[taken] - wanted[begin])
            num_given //= 2
        return None

    def _move(self, own: list[int], given: slice, taken: int) -> None:
        """Move the pieces `given` of a bin to the bin of the piece `taken`, and that one here."""
        here, there = self.bin_of[own[0]], self.bin_of[taken]
        self.bin_of[own[given]], self.bin_of[taken] = there, here
        moved = given.stop - given.start - 1
        self.counts[here] -= moved
        self.counts[there] += moved
        del own[given]
        bisect.insort(own, taken)


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
