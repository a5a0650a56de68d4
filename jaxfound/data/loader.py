"""Batches by index: what step t sees is a pure function of (seed, t)."""

import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxfound.data.batch import Batch
from jaxfound.data.bins import Bins
from jaxfound.data.prefetch import ENGINES, BatchStream, Engine
from jaxfound.data.shuffle import permute

log = logging.getLogger(__name__)

Order = Literal["shuffled", "sequential"]

ALL_ROWS = slice(None)
# Held-out rows are drawn in one order for all runs, so that their losses can be compared.
EVAL_SEED = 0


class BinLoader:
    """Batches of one split, for ever, with no state: resuming is asking for another step.

    Row r of step t is sample g = t * batch_size + r. Sample g is entry g mod n of the order of
    epoch g div n, n being the number of bins; so every bin appears once an epoch, none is dropped
    at its end, and a batch may lie on the edge of two epochs. Nothing depends on how many
    processes ask: each names its rows of the global batch.

    Args:
        bins: the split.
        batch_size: rows of the global batch.
        seed: of the shuffled order.
        order: `shuffled` anew each epoch, or `sequential` as prepared.
    """

    def __init__(
        self, bins: Bins, *, batch_size: int, seed: int = 0, order: Order = "shuffled"
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has one row or more")
        self.bins = bins
        self.batch_size = batch_size
        self.seed = seed
        self.order: Order = order

    def batch(self, step: int, *, rows: slice = ALL_ROWS) -> Batch:
        """Return the batch of `step` (the first is 0), or only `rows` of it."""
        return _gather(self.bins, self.bin_ids(step, rows=rows))

    def bin_ids(self, step: int, *, rows: slice = ALL_ROWS) -> np.ndarray:
        """Return which bin each row of the batch is, int64 [B].

        Raises:
            ValueError: if the step is negative or the rows are not rows of the batch.
        """
        if step < 0:
            raise ValueError(f"step={step}: the first step is 0")
        row_B = np.arange(self.batch_size)[_checked(rows, self.batch_size)]
        epoch, entry = np.divmod(step * self.batch_size + row_B, self.bins.num_bins)
        if self.order == "sequential":
            return entry
        return permute(entry, size=self.bins.num_bins, seed=self.seed, epoch=epoch)

    def documents(self, step: int, *, rows: slice = ALL_ROWS) -> tuple[tuple[int, ...], ...]:
        """Return the documents in each row of the batch, in the order of their segments."""
        return tuple(self.bins.documents(row) for row in self.bin_ids(step, rows=rows).tolist())

    def epoch(self, step: int) -> float:
        """Return how often the whole split has been seen before `step`."""
        return step * self.batch_size / self.bins.num_bins

    def batches(
        self,
        start_step: int = 0,
        *,
        num_prefetch: int = 2,
        rows: slice = ALL_ROWS,
        engine: Engine = "numpy",
    ) -> BatchStream:
        """Return the batches of `start_step`, `start_step + 1` …, without end.

        Fewer bins than rows are fine: they repeat within a batch, which is logged once a call.

        Args:
            start_step: the first step, which after a resume is the next one to take.
            num_prefetch: batches made ahead; 0 = none, and no thread.
            rows: this process's rows of the global batch.
            engine: whose threads make them; the batches are the same.

        Raises:
            DataError: if `engine` is grain and grain is not installed.
        """
        self.bin_ids(start_step, rows=rows)
        if self.bins.num_bins < self.batch_size:
            log.warning(
                "data.repeats",
                extra={
                    "bins": self.bins.num_bins,
                    "batch_size": self.batch_size,
                    "epochs_per_step": self.batch_size / self.bins.num_bins,
                },
            )

        def make(step: int) -> Batch:
            return self.batch(step, rows=rows)

        return ENGINES[engine](make, start=start_step, num_prefetch=num_prefetch)

    def eval_batches(self, num: int, *, rows: slice = ALL_ROWS) -> Iterator[Batch]:
        """Yield at most `num` batches in which each bin appears at most once.

        They are the same ones every time, whatever the seed. If the bins run out there are fewer,
        and the rows that the last one lacks are padding.
        """
        n, size = self.bins.num_bins, self.batch_size
        wanted = _checked(rows, size)
        for first in range(0, min(num * size, n), size):
            entry = np.arange(first, min(first + size, n))
            bin_B = permute(entry, size=n, seed=EVAL_SEED, epoch=np.zeros_like(entry))
            missing = np.full(first + size - n if first + size > n else 0, -1)
            yield _gather(self.bins, np.concatenate([bin_B, missing])[wanted])


def _gather(bins: Bins, bin_B: np.ndarray) -> Batch:
    """Return the bins as rows; -1 is a row of padding."""
    filled_B1 = (bin_B >= 0)[:, None]
    segment_ids = np.where(filled_B1, bins.segment_ids[bin_B], 0).astype(np.int32)
    tokens = np.where(filled_B1, bins.tokens[bin_B], bins.pad_id).astype(np.int32)
    targets = np.where(filled_B1, bins.targets[bin_B], bins.pad_id).astype(np.int32)
    return Batch(
        tokens=tokens,
        targets=targets,
        positions=positions_of(segment_ids),
        segment_ids=segment_ids,
        loss_mask=segment_ids > 0,
    )


def positions_of(segment_ids: np.ndarray) -> np.ndarray:
    """Return each slot's offset in its segment, int32 [B T]; 0 in padding."""
    slot_BT = np.broadcast_to(np.arange(segment_ids.shape[1], dtype=np.int32), segment_ids.shape)
    begins = np.ones(segment_ids.shape, np.bool_)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    start_BT = np.maximum.accumulate(np.where(begins, slot_BT, 0), axis=1)
    return np.where(segment_ids > 0, slot_BT - start_BT, 0).astype(np.int32)


def _checked(rows: slice, batch_size: int) -> slice:
    begin, end, stride = rows.start or 0, rows.stop, rows.step or 1
    end = batch_size if end is None else end
    if begin < 0 or stride < 1 or not begin <= end <= batch_size:
        raise ValueError(f"{rows} are not rows of a batch of {batch_size}: use slice(first, last)")
    return rows
