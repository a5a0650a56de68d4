"""Every schedule is right, takes what it says it takes, and has the published bubble and memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfound.parallelism.pipeline.builders import SCHEDULES, make_schedule
from jaxfound.parallelism.pipeline.checks import check
from jaxfound.parallelism.pipeline.schedule import Action, Place, Schedule, ScheduleError
from jaxfound.parallelism.pipeline.simulate import Costs, simulate
from jaxfound.parallelism.pipeline.ticks import lockstep, place_ticks

S25 = Path(__file__).resolve().parents[2] / "data" / "S25" / "layouts.json"
FEW_MICROBATCHES = [tuple(row) for row in json.loads(S25.read_text())["microbatches_stages"]]
SIZES = [(1, 1), (1, 3), (2, 5), (3, 6), (4, 8), (4, 9), (5, 20), (6, 14), *(
    (ranks, microbatches) for microbatches, ranks in FEW_MICROBATCHES
)]  # fmt: skip
# Every schedule at every size that it takes: name, ranks, micro-batches, chunks.
CASES = [
    (name, ranks, microbatches, chunks)
    for name, kind in SCHEDULES.items()
    for ranks, microbatches in SIZES
    for chunks in ((1, 3) if kind.num_chunks is None else (kind.num_chunks,))
    if kind.refuses(ranks, microbatches, chunks) is None
]
TAKES_ANY = [name for name, kind in SCHEDULES.items() if kind.rule is None]
# What the published formulas are stated and checked at: F&B takes as long as F and B.
UNIT = Costs(forward=1, input_grad=1, weight_grad=1, pair=3)

each = pytest.mark.parametrize("name", SCHEDULES)


def made(name, num_ranks, num_microbatches, num_chunks=2):
    return make_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks
    )


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "num_chunks"), CASES)
def test_a_schedule_is_right_wherever_it_is_not_refused(
    name, num_ranks, num_microbatches, num_chunks
):
    check(made(name, num_ranks, num_microbatches, num_chunks))


@pytest.mark.parametrize("name", TAKES_ANY)
@pytest.mark.parametrize(("num_microbatches", "num_ranks"), FEW_MICROBATCHES)
def test_schedules_without_a_rule_take_fewer_microbatches_than_ranks(
    name, num_microbatches, num_ranks
):
    simulation = simulate(made(name, num_ranks, num_microbatches), UNIT)
    work = num_microbatches * (UNIT.forward + UNIT.backward)
    assert simulation.makespan == work + simulation.bubble


def test_four_schedules_take_any_sizes():
    assert TAKES_ANY == ["gpipe", "1f1b", "paired_1f1b", "zero_bubble"]


@each
def test_a_kind_says_of_its_schedule_what_is_so(name):
    kind, schedule = SCHEDULES[name], made(name, 4, 8, 3)
    assert schedule.name == kind.name == name
    assert schedule.num_chunks == kind.chunks(3)
    assert schedule.num_copies == kind.num_copies
    assert schedule.num_stages == kind.num_stages(4, 3)
    assert schedule.splits_backward == kind.splits_backward
    assert bool(kind.needs) == (kind.rule is not None)


@each
def test_the_chunks_of_the_ranks_are_each_stage_once_a_copy(name):
    schedule = made(name, 4, 8, 3)
    held = [stage for rank in range(4) for stage in schedule.stages_of(rank)]
    assert sorted(held) == sorted([*range(schedule.num_stages)] * schedule.num_copies)


def test_dualpipe_mirrors_its_stages_and_dualpipev_folds_them():
    assert [made("dualpipe", 4, 8).stages_of(rank) for rank in range(4)] == [
        (0, 3), (1, 2), (2, 1), (3, 0)
    ]  # fmt: skip
    assert [made("dualpipev", 4, 8).stages_of(rank) for rank in range(4)] == [
        (0, 7), (1, 6), (2, 5), (3, 4)
    ]  # fmt: skip
    assert made("dualpipe", 4, 8).directions == (0, 0, 0, 0, 1, 1, 1, 1)


REFUSED = [
    ("gpipe", (0, 4, 1), "num_ranks=0"),
    ("1f1b", (4, 0, 1), "num_microbatches=0"),
    ("interleaved", (4, 8, 0), "num_chunks=0"),
    ("interleaved", (4, 6, 2), "num_microbatches=6 is not a multiple of num_ranks=4: .*4 or 8"),
    ("interleaved", (4, 3, 2), "num_microbatches=3 is not a multiple of num_ranks=4: .* Use 4 m"),
    ("dualpipe", (3, 12, 2), "num_ranks=3 is odd"),
    ("dualpipe", (4, 9, 2), "num_microbatches=9 is odd: .*Use 10"),
    ("dualpipe", (4, 6, 2), "num_microbatches=6 is fewer than 2 x num_ranks=8"),
    ("dualpipev", (4, 7, 2), "num_microbatches=7 is fewer than 2 x num_ranks=8"),
    ("dualpipe3", (4, 8, 2), "no schedule is called 'dualpipe3'; use one of gpipe, 1f1b"),
]


@pytest.mark.parametrize(("name", "sizes", "reason"), REFUSED)
def test_what_a_schedule_cannot_take_is_refused_with_the_numbers_and_the_way_out(
    name, sizes, reason
):
    with pytest.raises(ScheduleError, match=reason):
        made(name, *sizes)


def test_the_way_out_that_a_refusal_names_is_taken():
    assert SCHEDULES["dualpipe"].refuses(4, 5) == (
        "num_microbatches=5 is odd: half of them go in each direction. "
        "Use 8 micro-batches, or paired_1f1b"
    )
    assert SCHEDULES["dualpipe"].refuses(4, 8) is None


# Published bubble of a rank with P stages, F, B = I + W, F&B (DualPipe's table).
BUBBLES = {
    "1f1b": lambda p, c: (p - 1) * (c.forward + c.backward),
    "zero_bubble": lambda p, c: (p - 1) * (c.forward + c.backward - 2 * c.weight_grad),
    "dualpipe": lambda p, c: (p // 2 - 1) * (c.pair + c.backward - 3 * c.weight_grad),
    "dualpipev": lambda p, c: (p // 2 - 1) * (c.pair + c.backward - 3 * c.weight_grad),
}
PEAKS = {"1f1b": 0, "zero_bubble": 0, "dualpipe": 1, "dualpipev": 1}


def with_stages(name, num_stages, num_microbatches):
    ranks = num_stages // 2 if name == "dualpipev" else num_stages
    return made(name, ranks, num_microbatches)


@pytest.mark.parametrize("name", BUBBLES)
@pytest.mark.parametrize("num_stages", [4, 8, 16])
@pytest.mark.parametrize("extra", [0, 6])
def test_bubble_and_peak_are_the_published_formulas_exactly(name, num_stages, extra):
    simulation = simulate(with_stages(name, num_stages, 2 * num_stages + extra), UNIT)
    assert set(simulation.bubbles) == {BUBBLES[name](num_stages, UNIT)}
    assert max(simulation.peaks) == num_stages + PEAKS[name]


@pytest.mark.parametrize("num_stages", [4, 8, 16])
def test_what_1f1b_keeps_falls_by_one_a_rank_and_zero_bubble_keeps_as_much_everywhere(num_stages):
    plain = simulate(with_stages("1f1b", num_stages, 2 * num_stages), UNIT)
    cut = simulate(with_stages("zero_bubble", num_stages, 2 * num_stages), UNIT)
    assert plain.peaks == tuple(range(num_stages, 0, -1))
    assert cut.peaks == (num_stages,) * num_stages


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(num_chunks):
    # A chunk of a stage takes that part of the time, so the bubble in chunks stays.
    simulation = simulate(made("interleaved", 8, 32, num_chunks), UNIT)
    assert set(simulation.bubbles) == {7 * (UNIT.forward + UNIT.backward)}


def test_at_other_costs_dualpipes_formula_is_its_worst_rank():
    costs = Costs(forward=1, input_grad=1.2, weight_grad=0.8, pair=2.5)
    simulation = simulate(made("dualpipe", 8, 20), costs)
    assert BUBBLES["dualpipe"](8, costs) == pytest.approx(6.3)
    assert min(simulation.bubbles) == pytest.approx(4.7)
    assert max(simulation.bubbles) == pytest.approx(5.7)


# Makespan, bubble share, share lost in lockstep, at 16 and at 32 micro-batches; peaks.
MEASURED = [
    ("gpipe", 8, (69, 0.304, 0.304), (117, 0.179, 0.179), None),
    ("1f1b", 8, (69, 0.304, 0.429), (117, 0.179, 0.351), (8, 7, 6, 5, 4, 3, 2, 1)),
    ("paired_1f1b", 8, (69, 0.304, 0.304), (117, 0.179, 0.179), (15, 13, 11, 9, 7, 5, 3, 1)),
    ("interleaved", 8, (117, 0.179, 0.314), (213, 0.099, 0.284), (23, 21, 19, 17, 15, 13, 11, 9)),
    ("zero_bubble", 8, (55, 0.127, 0.127), (103, 0.068, 0.068), (8,) * 8),
    ("dualpipe", 8, (54, 0.111, 0.200), (102, 0.059, 0.111), (9,) * 8),
    ("dualpipev", 4, (102, 0.059, 0.111), (198, 0.030, 0.059), (9,) * 4),
    ("dualpipev", 8, (110, 0.127, 0.250), (206, 0.068, 0.143), (17,) * 8),
]


@pytest.mark.parametrize(("name", "num_ranks", "at_16", "at_32", "peaks"), MEASURED)
def test_makespan_bubble_lockstep_and_peaks_at_the_formulas_costs(
    name, num_ranks, at_16, at_32, peaks
):
    for num_microbatches, expected in ((16, at_16), (32, at_32)):
        schedule = made(name, num_ranks, num_microbatches)
        freely, together = simulate(schedule, UNIT), lockstep(schedule, UNIT)
        found = (freely.makespan, round(freely.bubble_share, 3), round(together.bubble_share, 3))
        assert found == expected
        assert freely.peaks == together.peaks == (peaks or (num_microbatches,) * num_ranks)


# With the forward pass computed again: the share lost in lockstep at 16, 32 and 64 micro-batches.
RECOMPUTED = {
    ("1f1b", 8): (0.475, 0.413, 0.376),
    ("zero_bubble", 8): (0.393, 0.380, 0.372),
    ("paired_1f1b", 8): (0.304, 0.179, 0.099),
    ("dualpipe", 8): (0.256, 0.147, 0.079),
    ("dualpipev", 4): (0.147, 0.079, 0.041),
}


@pytest.mark.parametrize(("name", "num_ranks"), RECOMPUTED)
def test_in_lockstep_the_schedules_that_pair_lose_least_when_a_backward_pass_is_long(
    name, num_ranks
):
    costs = Costs(forward=1, input_grad=2.1, weight_grad=0.9, pair=4)
    lost = [lockstep(made(name, num_ranks, m), costs).bubble_share for m in (16, 32, 64)]
    assert tuple(round(share, 3) for share in lost) == RECOMPUTED[name, num_ranks]


# At what a stage of four MLP layers took on an H200, in milliseconds: at 16 and 32 micro-batches.
ON_H200 = {
    "1f1b": (0.600, 0.629),
    "paired_1f1b": (0.842, 0.914),
    "dualpipev": (0.856, 0.923),
    "dualpipe": (0.939, 0.969),
}


@pytest.mark.parametrize("name", ON_H200)
def test_lockstep_efficiency_at_the_times_of_a_gpu(name):
    costs = Costs(forward=6.7, input_grad=14.1, weight_grad=6.6)
    found = [lockstep(made(name, 4, m), costs).efficiency for m in (16, 32)]
    assert found == pytest.approx(ON_H200[name], abs=1e-3)


def test_a_pair_takes_its_own_time_but_not_when_b_follows_its_own_f():
    costs = Costs(forward=1, input_grad=1, weight_grad=1, pair=2)
    pair = (Action("F", 3, 0), Action("B", 1, 0))
    assert costs.duration(pair) == 2
    assert costs.duration((Action("F", 3, 0), Action("B", 3, 0))) == 3
    assert costs.duration((Action("F", 3, 0), Action("I", 1, 0))) == 2
    assert Costs(1, 1, 1).duration(pair) == 3


def test_a_simulation_says_when_every_step_runs():
    simulation = simulate(made("1f1b", 2, 2), UNIT)
    times = [[("".join(a.op for a in s), start, end) for s, start, end in r]
             for r in simulation.steps]  # fmt: skip
    assert times == [
        [("F", 0, 1), ("F", 1, 2), ("B", 4, 6), ("B", 7, 9)],
        [("F", 1, 2), ("B", 2, 4), ("F", 4, 5), ("B", 5, 7)],
    ]
    assert simulation.bubbles == (3, 3)


def steps(*names):
    """Steps of the only stage of a rank, e.g. `F0+B1`."""
    return tuple(
        tuple(Action(part[0], int(part[1:]), 0) for part in name.split("+")) for name in names
    )


def alone(*names, num_microbatches=1):
    """A schedule of one rank and one stage."""
    directions = (0,) * num_microbatches
    return Schedule("mine", 1, 1, num_microbatches, ((Place(0, 0),),), directions, (steps(*names),))


BROKEN = [
    (alone("B0"), "has no F .* of micro-batch 0 at stage 0"),
    (alone("F0", "F0", "B0"), "has 2 times F"),
    (alone("F0", "B0", "F0"), "has 2 times F"),
    (alone("F0", "B0", "B0"), "has 2 times B"),
    (alone("F0"), r"has no B \(or I and W\)"),
    (alone("F0", "I0"), "has no W after I"),
    (alone("F0", "W0"), "has no I before W"),
    (alone("F0", "I0", "W0", "W0"), "has 2 times W"),
    (alone("F0", "B0", "W0"), "B and its halves I or W"),
    (alone("F0", "B0", "I0", "W0"), "B and its halves I or W"),
    (alone("B0", "F0"), "has B of micro-batch 0 at stage 0 before F"),
    (alone("I0", "F0", "W0"), "has I of micro-batch 0 at stage 0 before F"),
    (alone("F0", "W0", "I0"), "has W of micro-batch 0 at stage 0 before I"),
    (alone("F0", "F1", "B0+B1", num_microbatches=2), "has a step of B .* the F first"),
    (alone("F0+F1", "B0", "B1", num_microbatches=2), "has a step of F"),
    (alone("F0", "I0", "F1+W0", "B1", num_microbatches=2), "has a step of F"),
    (alone("F0", "B0+F1", "B1", num_microbatches=2), "has a step of B"),
    (alone("F0", "F1+B0+I1", "W1", num_microbatches=2), "has a step of F"),
    (replace(alone("F0", "B0"), orders=(((), *steps("F0", "B0")),)), "a step of nothing"),
    (alone("F0", "B0", "F1", "B1"), "F of micro-batch 1 .* there are 1 micro-batches"),
    (replace(made("gpipe", 2, 1), orders=made("gpipe", 2, 1).orders[::-1]), "rank 1 holds that"),
    (replace(made("gpipe", 2, 1), orders=made("gpipe", 2, 1).orders[:1]), "orders for 1 of 2"),
]


@pytest.mark.parametrize(("schedule", "reason"), BROKEN)
def test_a_broken_schedule_is_refused_for_its_own_reason(schedule, reason):
    with pytest.raises(ScheduleError, match=reason):
        check(schedule)


def crossed():
    """Rank 1 wants micro-batch 1 first, but rank 0 sends it after a gradient of rank 1's."""
    late = (Action("F", 0, 0),), (Action("B", 0, 0),), (Action("F", 1, 0),), (Action("B", 1, 0),)
    rank_1 = tuple((Action(op, m, 1),) for m in (1, 0) for op in ("F", "B"))
    return replace(made("gpipe", 2, 2), orders=(late, rank_1))


@pytest.mark.parametrize("run", [check, lambda s: simulate(s, UNIT), place_ticks])
def test_ranks_that_wait_for_each_other_are_named(run):
    with pytest.raises(ScheduleError, match="deadlocks") as refused:
        run(crossed())
    assert "rank 0 before B of micro-batch 0 at stage 0 for B of micro-batch 0 at stage 1" in str(
        refused.value
    )
    assert "rank 1 before F of micro-batch 1 at stage 1 for F of micro-batch 1 at stage 0" in str(
        refused.value
    )
