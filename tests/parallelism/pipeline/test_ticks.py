"""A tick table, replayed with a token for each value: every read finds what it needs."""

from collections import Counter

import numpy as np
import pytest

from jaxfound.parallelism.pipeline.builders import SCHEDULES, make_schedule
from jaxfound.parallelism.pipeline.slots import Wait, assign_slots
from jaxfound.parallelism.pipeline.ticks import tick_table
from tests.parallelism.pipeline.test_schedules import CASES, FEW_MICROBATCHES, SIZES


def table_of(name, num_ranks, num_microbatches, num_chunks=2):
    return tick_table(
        make_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks
        )
    )


class Replay:
    """Runs a table with tokens in the slots, from its columns alone; keeps what was run."""

    def __init__(self, table):
        self.table = table
        ranks = table.num_ranks
        self.inputs = [[None] * (table.num_input_slots + 1) for _ in range(ranks)]
        self.grads = [[None] * (table.num_grad_slots + 1) for _ in range(ranks)]
        self.kept = [[None] * (table.num_kept_slots + 1) for _ in range(ranks)]
        self.ran = Counter()
        self.used = {"inputs": set(), "grads": set(), "kept": set()}

    def run(self):
        for tick in range(self.table.num_ticks):
            results = [self.tick(tick, rank) for rank in range(self.table.num_ranks)]
            self.deliver(tick, results)
        return self

    def tick(self, tick, rank):
        """What a rank sends at the end of a tick, by payload."""
        row = {name: int(column[tick, rank]) for name, column in self.table.columns.items()}
        kind = self.table.kinds[row["kind"]]
        results = {}
        for op in kind.split("+"):
            if op == "F":
                results["forward"] = self.forward(rank, row)
            elif op in ("B", "I"):
                results["backward"] = self.backward(rank, row, op)
            elif op == "W":
                self.weight_grad(rank, row)
        return results

    def forward(self, rank, row):
        microbatch, stage = row["f_microbatch"], self.stage(rank, row, "f")
        self.read_input(rank, row, "f")
        self.ran["F", microbatch, stage] += 1
        return ("output", microbatch, stage)

    def backward(self, rank, row, op):
        microbatch, stage = row["b_microbatch"], self.stage(rank, row, "b")
        self.read_input(rank, row, "b")
        assert row["b_last"] == (stage == self.table.schedule.num_stages - 1)
        if row["b_last"]:
            assert row["b_grad_slot"] == self.table.num_grad_slots
        else:
            found = self.grads[rank][row["b_grad_slot"]]
            assert found == ("gradient", microbatch, stage + 1)
            self.used["grads"].add(row["b_grad_slot"])
        if op == "I":
            self.kept[rank][row["b_kept_slot"]] = ("kept", microbatch, stage)
        self.ran[op, microbatch, stage] += 1
        return ("gradient", microbatch, stage)

    def weight_grad(self, rank, row):
        microbatch, stage = row["b_microbatch"], self.stage(rank, row, "b")
        assert row["b_kept_slot"] < self.table.num_kept_slots
        assert self.kept[rank][row["b_kept_slot"]] == ("kept", microbatch, stage)
        self.used["kept"].add(row["b_kept_slot"])
        self.ran["W", microbatch, stage] += 1

    def read_input(self, rank, row, side):
        microbatch, stage = row[f"{side}_microbatch"], self.stage(rank, row, side)
        assert row[f"{side}_first"] == (stage == 0)
        if stage == 0:
            assert row[f"{side}_slot"] == self.table.num_input_slots
        else:
            found = self.inputs[rank][row[f"{side}_slot"]]
            assert found == ("output", microbatch, stage - 1)
            self.used["inputs"].add(row[f"{side}_slot"])

    def stage(self, rank, row, side):
        stage = self.table.schedule.stages_of(rank)[row[f"{side}_chunk"]]
        assert self.table.schedule.place(row[f"{side}_microbatch"], stage).rank == rank
        return stage

    def deliver(self, tick, results):
        ranks = self.table.num_ranks
        for send in self.table.sends:
            buffers = self.inputs if send.payload == "forward" else self.grads
            for receiver in range(ranks):
                arrived = results[(receiver - send.hop) % ranks].get(send.payload)
                buffers[receiver][send.slots[tick, receiver]] = arrived


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "num_chunks"), CASES)
def test_every_read_finds_its_value_and_every_pass_runs_once(
    name, num_ranks, num_microbatches, num_chunks
):
    table = table_of(name, num_ranks, num_microbatches, num_chunks)
    replay = Replay(table).run()
    last = table.schedule.num_stages - 1
    listed = Counter(
        tuple(action)
        for order in table.schedule.orders
        for step in order
        for action in step
        if action.op != "F" or action.stage < last
    )
    assert replay.ran == listed
    assert replay.used == {
        "inputs": set(range(table.num_input_slots)),
        "grads": set(range(table.num_grad_slots)),
        "kept": set(range(table.num_kept_slots)),
    }


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "num_chunks"), CASES)
def test_what_a_step_does_not_use_is_zero_or_trash(name, num_ranks, num_microbatches, num_chunks):
    table = table_of(name, num_ranks, num_microbatches, num_chunks)
    inputs, grads, kept = table.num_input_slots, table.num_grad_slots, table.num_kept_slots
    unused = {
        **dict.fromkeys(("f_microbatch", "f_chunk", "f_first"), 0),
        **dict.fromkeys(("b_microbatch", "b_chunk", "b_first", "b_last"), 0),
        **{"f_slot": inputs, "b_slot": inputs, "b_grad_slot": grads, "b_kept_slot": kept},
    }
    assert set(table.columns) == {"kind", *unused}
    kinds = np.array(table.kinds)[table.columns["kind"]]
    for name_, value in unused.items():
        column = table.columns[name_]
        assert column.dtype == np.int32
        without = (
            ~np.char.startswith(kinds, "F") if name_[0] == "f" else np.isin(kinds, ["idle", "F"])
        )
        assert (column[without] == value).all()
    reads_inputs = np.char.find(kinds, "B") + np.char.find(kinds, "I") > -2
    assert (table.columns["b_slot"][~reads_inputs] == inputs).all()
    assert (table.columns["b_grad_slot"][~reads_inputs] == grads).all()
    assert (table.columns["b_kept_slot"][~np.isin(kinds, ["I", "W", "F+I"])] == kept).all()


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_paired_1f1b_takes_a_tick_a_microbatch_and_two_a_rank_before_the_last(
    num_ranks, num_microbatches
):
    table = table_of("paired_1f1b", num_ranks, num_microbatches)
    assert table.num_ticks == num_microbatches + 2 * (num_ranks - 1)


@pytest.mark.parametrize("rank", range(4))
def test_a_tick_of_paired_1f1b_is_f_of_t_minus_r_beside_b_of_t_minus_the_way_there_and_back(rank):
    table = table_of("paired_1f1b", 4, 16)
    kinds = np.array(table.kinds)[table.columns["kind"][:, rank]]
    for tick, kind in enumerate(kinds):
        forward, backward = tick - rank, tick - (6 - rank)
        runs = [op for op, m in (("F", forward), ("B", backward)) if 0 <= m < 16]
        if rank == 3:
            runs = [op for op in runs if op == "B"]
        assert kind == ("+".join(runs) or "idle")
        if "F" in runs:
            assert table.columns["f_microbatch"][tick, rank] == forward
        if "B" in runs:
            assert table.columns["b_microbatch"][tick, rank] == backward


# Ticks of four ranks and 16 micro-batches, slots for inputs, gradients and what I leaves for W.
TABLES = {
    "gpipe": (38, 16, 1, 0),
    "1f1b": (38, 4, 1, 0),
    "paired_1f1b": (22, 5, 1, 0),
    "interleaved": (70, 10, 2, 0),
    "zero_bubble": (51, 4, 1, 4),
    "dualpipe": (24, 6, 1, 2),
    "dualpipev": (50, 10, 2, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_ticks_and_slots_are_those_expected(name):
    table = table_of(name, 4, 16)
    slots = (table.num_input_slots, table.num_grad_slots, table.num_kept_slots)
    assert (table.num_ticks, *slots) == TABLES[name]


@pytest.mark.parametrize("name", ["1f1b", "paired_1f1b", "zero_bubble", "dualpipe", "dualpipev"])
def test_slots_do_not_grow_with_the_number_of_microbatches(name):
    few, many = table_of(name, 4, 16), table_of(name, 4, 64)
    assert few.num_input_slots == many.num_input_slots
    assert few.num_grad_slots == many.num_grad_slots
    assert few.num_kept_slots == many.num_kept_slots
    assert few.kinds == many.kinds
    assert [(s.payload, s.hop) for s in few.sends] == [(s.payload, s.hop) for s in many.sends]


@pytest.mark.parametrize(("num_microbatches", "num_ranks"), FEW_MICROBATCHES)
def test_only_kinds_that_occur_are_listed_and_idle_comes_first(num_microbatches, num_ranks):
    table = table_of("paired_1f1b", num_ranks, num_microbatches)
    # The rank before the last has two forward passes ahead, and then pairs the third.
    pairs = ("F+B",) if num_microbatches > 2 else ()
    assert table.kinds == ("idle", "F", "B", *pairs)


def test_the_turn_of_the_v_stays_on_its_rank():
    sends = [(send.payload, send.hop) for send in table_of("dualpipev", 4, 8).sends]
    assert sends == [(p, h) for p in ("backward", "forward") for h in (0, 1, 3)]


def test_a_rank_that_is_alone_sends_nothing_and_keeps_nothing():
    table = table_of("1f1b", 1, 3)
    assert table.sends == ()
    assert (table.num_input_slots, table.num_grad_slots, table.num_kept_slots) == (0, 0, 0)


def test_a_slot_is_given_anew_in_the_tick_that_reads_it_last_and_not_before():
    first = Wait(value=(0, 1), rank=0, written=0, last_read=4)
    early = Wait(value=(1, 1), rank=0, written=3, last_read=6)
    just = Wait(value=(2, 1), rank=0, written=4, last_read=8)
    slots = assign_slots([just, first, early])
    assert slots.of == {(0, 1): 0, (1, 1): 1, (2, 1): 0}
    assert slots.count == 2
    assert slots.slot((9, 9)) == 2


def test_ranks_have_slots_of_their_own_and_buffers_of_one_size():
    waits = [Wait((m, 1), rank=m % 2, written=0, last_read=5) for m in range(5)]
    slots = assign_slots(waits)
    assert slots.count == 3
    assert sorted(slots.of[m, 1] for m in (0, 2, 4)) == [0, 1, 2]
    assert sorted(slots.of[m, 1] for m in (1, 3)) == [0, 1]


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "num_chunks"), CASES)
def test_no_colouring_of_the_input_slots_needs_fewer(name, num_ranks, num_microbatches, num_chunks):
    table = table_of(name, num_ranks, num_microbatches, num_chunks)
    arrivals = sum(
        (send.slots < table.num_input_slots).astype(int)
        for send in table.sends
        if send.payload == "forward"
    )
    if table.num_input_slots == 0:
        return
    kinds = np.array(table.kinds)[table.columns["kind"]]
    last_reads = np.isin(kinds, ["B", "I", "F+B", "F+I"]) & (table.columns["b_first"] == 0)
    # Inside after a tick: all that has arrived but what has been read for the last time.
    waiting = np.cumsum(arrivals, axis=0) - np.cumsum(last_reads, axis=0)
    assert waiting.max() == table.num_input_slots
