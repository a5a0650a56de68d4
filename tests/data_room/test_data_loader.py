"""Step t's batch is a pure function of (seed, t): resumes, processes, engines change nothing."""

import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxfound.data import BinLoader, ByteTokenizer, DataError
from jaxfound.data.shuffle import permute

S10 = Path(__file__).parent.parent / "data" / "S10"
SHARDS = tuple(S10 / f"shard-{i}.jsonl" for i in range(3))
SOURCES = {"shards": SHARDS, "single": S10 / "single.jsonl"}
NUM_DOCUMENTS = 103
BATCH, STEPS, SEQ_LEN = 8, 60, 64

ORDERS = ("shuffled", "sequential")
PACKINGS = ("packed", "padded")


@pytest.fixture
def loader_of(prepared_from):
    """A loader over the case's documents, from nothing but what is on disk."""

    def make(*, source="shards", packing="packed", order="shuffled", seed=5, batch_size=BATCH):
        prepared = prepared_from(SOURCES[source], seq_len=SEQ_LEN, packing=packing)
        return BinLoader(prepared.train, batch_size=batch_size, seed=seed, order=order)

    return make


def trace(batch):
    """Read off the tokens which documents each row holds; a segment holds one and no other."""
    rows = []
    for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
        row = []
        for number in range(1, segments.max() + 1):
            words = set(ByteTokenizer().decode(tokens[segments == number]).split())
            assert len(words) == 1
            row.append(words.pop())
        rows.append(tuple(row))
    return rows


def run(loader, start, stop):
    with loader.batches(start) as batches:
        return [trace(next(batches)) for _ in range(start, stop)]


def edge_of_epoch_1(loader):
    """The step that holds the last bin of the first epoch."""
    return (loader.bins.num_bins - 1) // loader.batch_size


STOPS = {
    "after 1": lambda edge: (1,),
    "after 7": lambda edge: (7,),
    "after the last batch of epoch 1": lambda edge: (edge + 1,),
    "after the first batch of epoch 2": lambda edge: (edge + 2,),
    "after 7, 9 and 20": lambda edge: (7, 9, 20),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_resumed_runs_see_the_documents_of_the_straight_run(loader_of, order, packing):
    straight_loader = loader_of(order=order, packing=packing)
    straight = run(straight_loader, 0, STEPS)
    for name, stops_of in STOPS.items():
        stops = stops_of(edge_of_epoch_1(straight_loader))
        resumed = []
        for start, stop in zip((0, *stops), (*stops, STEPS), strict=True):
            resumed += run(loader_of(order=order, packing=packing), start, stop)
        assert resumed == straight, name


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_shards_and_a_single_file_give_the_same_batches(loader_of, order, packing):
    both = [run(loader_of(source=s, order=order, packing=packing), 0, STEPS) for s in SOURCES]
    assert both[0] == both[1]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_document_appears_once_in_every_epoch(loader_of, order, packing):
    loader = loader_of(order=order, packing=packing)
    rows = [row for batch in run(loader, 0, STEPS) for row in batch]
    n = loader.bins.num_bins
    assert len(rows) // n >= 4
    for epoch in range(len(rows) // n):
        seen = Counter(word for row in rows[epoch * n : (epoch + 1) * n] for word in row)
        assert seen == {f"d{i:03d}": 1 for i in range(NUM_DOCUMENTS)}


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_the_rows_of_all_processes_are_the_global_batch(loader_of, num_processes, order):
    share = BATCH // num_processes
    slices = [slice(i * share, (i + 1) * share) for i in range(num_processes)]
    loader = loader_of(order=order)
    for step in range(20):
        parts = [loader_of(order=order).batch(step, rows=rows) for rows in slices]
        for whole, *pieces in zip(loader.batch(step), *parts, strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(pieces))


@pytest.mark.parametrize("order", ORDERS)
def test_resumes_with_other_numbers_of_processes_see_the_documents_of_the_straight_run(
    loader_of, order
):
    straight = run(loader_of(order=order), 0, STEPS)
    edge = edge_of_epoch_1(loader_of(order=order))
    stops = sorted({0, 1, 7, edge + 1, edge + 2, 20, STEPS})
    seen = []
    for turn, (start, stop) in enumerate(pairwise(stops)):
        seen += joined(loader_of, start, stop, count=(2, 1, 4)[turn % 3], order=order)
    assert seen == straight


def joined(loader_of, start, stop, *, count, order):
    """What so many processes see from one step to another, each with its share of the rows."""
    parts = []
    for process in range(count):
        rows = slice(process * BATCH // count, (process + 1) * BATCH // count)
        with loader_of(order=order).batches(start, rows=rows) as batches:
            parts.append([trace(next(batches)) for _ in range(start, stop)])
    return [[row for rows in step for row in rows] for step in zip(*parts, strict=True)]


def test_a_bigger_batch_continues_the_same_order_of_samples(loader_of):
    small = [row for batch in run(loader_of(batch_size=4), 0, 20) for row in batch]
    large = [row for batch in run(loader_of(batch_size=8), 0, 10) for row in batch]
    assert small == large


def test_the_documents_of_a_step_are_those_its_tokens_spell(loader_of):
    loader = loader_of()
    for step in range(10):
        named = [tuple(f"d{i:03d}" for i in row) for row in loader.documents(step)]
        assert named == trace(loader.batch(step))


def test_shuffling_differs_by_seed_and_by_epoch_and_sequence_does_not(loader_of):
    n = loader_of().bins.num_bins
    first = loader_of(batch_size=n).bin_ids(0)
    assert (first != loader_of(batch_size=n).bin_ids(1)).any()
    assert (first != loader_of(batch_size=n, seed=6).bin_ids(0)).any()
    in_order = loader_of(batch_size=n, order="sequential")
    assert in_order.bin_ids(3).tolist() == list(range(n))


def test_a_batch_says_what_its_slots_are(loader_of):
    batch = loader_of().batch(2)
    assert {field.shape for field in batch} == {(BATCH, SEQ_LEN)}
    assert [f.dtype.name for f in batch] == ["int32"] * 4 + ["bool"]
    np.testing.assert_array_equal(batch.loss_mask, batch.segment_ids > 0)
    last = (batch.segment_ids[:, :-1] != batch.segment_ids[:, 1:]) & batch.loss_mask[:, :-1]
    assert (batch.targets[:, :-1][last] == ByteTokenizer.eos_id).all()
    inside = batch.segment_ids[:, :-1] == batch.segment_ids[:, 1:]
    inside &= batch.loss_mask[:, 1:]
    np.testing.assert_array_equal(batch.targets[:, :-1][inside], batch.tokens[:, 1:][inside])
    assert ((batch.positions == 0) == ((batch.tokens == 256) | ~batch.loss_mask)).all()


def test_fewer_bins_than_rows_repeat_and_that_is_said_once(prepared_from, caplog):
    prepared = prepared_from(["one", "two", "three"], packing="padded")
    loader = BinLoader(prepared.train, batch_size=7)
    with loader.batches() as batches:
        next(batches)
        next(batches)
    counts = Counter(row for step in range(3) for row in loader.documents(step))
    assert counts == {(0,): 7, (1,): 7, (2,): 7}
    [record] = [r for r in caplog.records if r.message == "data.repeats"]
    assert record.epochs_per_step == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loader: loader.batch(-1), "step=-1"),
        (lambda loader: loader.batch(0, rows=slice(4, 9)), "not rows of a batch of 8"),
        (lambda loader: loader.batch(0, rows=slice(-2, None)), "not rows of a batch of 8"),
        (lambda loader: BinLoader(loader.bins, batch_size=0), "batch_size=0"),
    ],
)
def test_steps_and_rows_that_do_not_exist_are_refused(loader_of, call, message):
    with pytest.raises(ValueError, match=message):
        call(loader_of())


@pytest.mark.parametrize("num_prefetch", [0, 1, 3])
@pytest.mark.parametrize("engine", ["numpy", "grain"])
def test_every_engine_streams_the_batches_of_the_index(loader_of, engine, num_prefetch):
    loader = loader_of()
    with loader.batches(11, engine=engine, num_prefetch=num_prefetch, rows=slice(2, 6)) as stream:
        for step in range(11, 31):
            for got, wanted in zip(next(stream), loader.batch(step, rows=slice(2, 6)), strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_grain_missing_is_said_with_the_extra(loader_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(DataError, match=r"jaxfound\[data\].*data\.loader=numpy"):
        loader_of().batches(engine="grain")


@pytest.mark.parametrize("engine", ["numpy", "grain"])
def test_a_closed_stream_is_exhausted_and_leaves_no_thread(loader_of, engine):
    before = set(threading.enumerate())
    stream = loader_of().batches(engine=engine)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    left = [t for t in set(threading.enumerate()) - before if "jaxfound" in t.name]
    assert left == []


@pytest.mark.parametrize("num_prefetch", [0, 2])
@pytest.mark.parametrize("engine", ["numpy", "grain"])
def test_what_goes_wrong_in_the_thread_is_raised_at_that_step(
    loader_of, engine, num_prefetch, monkeypatch
):
    loader = loader_of()
    good = BinLoader.batch

    def batch(self, step, *, rows):
        if step == 3:
            raise OSError("the disk is gone")
        return good(self, step, rows=rows)

    monkeypatch.setattr(BinLoader, "batch", batch)
    with loader.batches(1, engine=engine, num_prefetch=num_prefetch) as stream:
        next(stream)
        next(stream)
        with pytest.raises(OSError, match="the disk is gone"):
            next(stream)


def test_evaluation_sees_each_bin_once_and_fills_the_last_batch_with_padding(loader_of):
    loader = loader_of(packing="padded")
    batches = list(loader.eval_batches(1000))
    assert len(batches) == -(-NUM_DOCUMENTS // BATCH)
    seen = Counter(word for batch in batches for row in trace_or_empty(batch) for word in row)
    assert seen == {f"d{i:03d}": 1 for i in range(NUM_DOCUMENTS)}
    empty = batches[-1].segment_ids.max(axis=1) == 0
    assert empty.sum() == BATCH - NUM_DOCUMENTS % BATCH
    assert not batches[-1].loss_mask[empty].any()
    assert (batches[-1].tokens[empty] == ByteTokenizer.pad_id).all()
    assert {field.shape for field in batches[-1]} == {(BATCH, SEQ_LEN)}


def trace_or_empty(batch):
    kept = batch.segment_ids.max(axis=1) > 0
    return trace(type(batch)(*(field[kept] for field in batch)))


def test_evaluation_is_the_same_for_every_seed_and_for_every_split_into_processes(loader_of):
    whole = list(loader_of(seed=1).eval_batches(3))
    other = list(loader_of(seed=2).eval_batches(3))
    halves = [list(loader_of().eval_batches(3, rows=r)) for r in (slice(0, 4), slice(4, 8))]
    assert len(whole) == 3
    for i, batch in enumerate(whole):
        for field, again, *parts in zip(batch, other[i], *(h[i] for h in halves), strict=True):
            np.testing.assert_array_equal(field, again)
            np.testing.assert_array_equal(field, np.concatenate(parts))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 103, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_the_shuffled_order_is_a_permutation(size, seed):
    for epoch in (0, 1, 1_000_000):
        index = np.arange(size)
        order = permute(index, size=size, seed=seed, epoch=np.full(size, epoch))
        assert sorted(order.tolist()) == list(range(size))


def test_an_entry_of_a_huge_permutation_costs_no_memory():
    index = np.array([0, 1, 10**15])
    order = permute(index, size=10**15 + 1, seed=0, epoch=np.zeros(3, np.int64))
    assert len(set(order.tolist())) == 3


def test_shuffling_looks_random_in_place_and_in_neighbours():
    size, epochs = 10, 6000
    index = np.tile(np.arange(size), epochs)
    epoch = np.repeat(np.arange(epochs), size)
    order = permute(index, size=size, seed=3, epoch=epoch).reshape(epochs, size)
    share = np.stack([np.bincount(order[:, i], minlength=size) for i in range(size)]) / epochs
    # Standard deviation of a share is sqrt(0.1 * 0.9 / 6000) = 0.0039; 5 of them over 100 cells.
    assert np.abs(share - 0.1).max() < 0.02
    follows = (order[:, 1:] == order[:, :-1] + 1).mean()
    # A random order has a pair (v, v + 1) side by side with probability 1 / size.
    assert abs(follows - 0.1) < 0.01


def test_indices_outside_the_permutation_are_refused():
    with pytest.raises(ValueError, match=r"outside 0…4"):
        permute(np.array([5]), size=5, seed=0, epoch=np.array([0]))
