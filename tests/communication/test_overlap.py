"""What is covered, by hand: programs of a few lines whose seconds can be added up on paper."""

import pytest

from jaxfound.communication.hlo import collective_of
from jaxfound.communication.overlap import timeline
from jaxfound.communication.program import read_program

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=4\n"
GROUPS = "replica_groups={{0,1},{2,3}}"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*lines, before=""):
    """A program whose entry runs these lines in this order."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"{HEADER}{ADD}{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n"
    return read_program(f"{text}  %x = f32[8]{{0}} parameter(0)\n{body}\n}}\n")


def computation(name, *lines):
    """A computation of those lines, of one array."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"\n%{name} (p: f32[8]) -> f32[8] {{\n  %{name}.p = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
    )


def gather(name, of="x"):
    """A start and an end of a collective of 64 bytes."""
    start = f"((f32[8]{{0}}), f32[16]{{0}}) all-gather-start(%{of}), {GROUPS}, dimensions={{0}}"
    return (
        f"%{name} = {start}",
        f"%{name}.end = f32[16]{{0}} all-gather-done(%{name})",
    )


def work(name, of="x"):
    """An operation that `run` takes for `name`'s number of seconds."""
    return f"%{name} = f32[8]{{0}} negate(%{of})"


def run(found, *, wire_s=4.0, **others):
    """The timeline where %work.3 takes three seconds and every collective `wire_s`."""

    def seconds(operation):
        kind, _, number = operation.name.partition(".")
        return float(number.split(".")[0]) if kind == "work" else 0.0

    return timeline(found, work=seconds, wire=lambda collective, num_bytes: wire_s, **others)


def seconds_of(line):
    return [(e.beside_s, e.waited_s) for e in line.exchanges]


def test_what_runs_between_a_start_and_its_end_covers_the_collective():
    start, end = gather("g")
    found = run(program(start, work("work.1"), work("work.2"), end, work("work.9")))
    assert seconds_of(found) == [(3.0, 1.0)]
    (exchange,) = found.exchanges
    assert (exchange.is_async, exchange.covered) == (True, 0.75)
    assert (found.work_s, found.waited_s, found.total_s) == (12.0, 1.0, 13.0)


def test_a_collective_without_a_start_stops_everything():
    line = f"%r = f32[8]{{0}} all-reduce(%x), {GROUPS}, to_apply=%add"
    found = run(program(work("work.5"), line, work("work.6")))
    assert seconds_of(found) == [(0.0, 4.0)]
    assert (found.exchanges[0].is_async, found.exchanges[0].covered) == (False, 0.0)


def test_two_at_a_time_share_the_wires_and_the_second_waits_for_the_first():
    (one, one_end), (two, two_end) = gather("one"), gather("two")
    found = run(program(one, two, work("work.5"), one_end, two_end))
    assert seconds_of(found) == [(5.0, 0.0), (5.0, 3.0)]


def test_a_collective_that_is_over_before_it_is_asked_for_costs_nothing():
    start, end = gather("g")
    assert seconds_of(run(program(start, work("work.7"), end))) == [(7.0, 0.0)]


LOOP = "%loop = f32[8]{0} while(%x), condition=%check, body=%body"
KNOWN = f'{LOOP}, backend_config={{"known_trip_count":{{"n":"5"}}}}'
BODY = computation("body", *gather("g", "body.p"), work("work.2", "body.p")) + computation(
    "check", work("work.1", "check.p")
)


def test_a_loop_counts_as_often_as_it_runs_and_checks_once_more():
    found = run(program(KNOWN, before=BODY))
    (exchange,) = found.exchanges
    assert (exchange.calls, exchange.num_bytes) == (5, 64)
    # Per round: nothing beside the collective, then two seconds of work; six checks of a second.
    assert (found.work_s, found.waited_s, found.unknown_loops) == (5 * 2.0 + 6, 5 * 4.0, ())


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    found = run(program(LOOP, before=BODY))
    assert (found.exchanges[0].calls, found.unknown_loops) == (1, ("loop",))


def test_loops_inside_loops_multiply():
    outer = computation("outer", KNOWN.replace("%x", "%outer.p").replace("%loop", "%inner"))
    lines = BODY + outer
    around = KNOWN.replace("%body", "%outer").replace('"5"', '"3"')
    found = run(program(around, before=lines))
    assert found.exchanges[0].calls == 15


def test_work_in_a_loop_covers_a_collective_that_goes_on_around_it():
    start, end = gather("g")
    quiet = computation("body", work("work.2", "body.p")) + computation("check")
    found = run(program(start, KNOWN, end, before=quiet), wire_s=12.0)
    assert seconds_of(found) == [(10.0, 2.0)]


BRANCHES = {
    "two": "conditional(%p, %x, %x), true_computation=%left, false_computation=%right",
    "many": "conditional(%p, %x, %x), branch_computations={%left, %right}",
}


@pytest.mark.parametrize("spelling", BRANCHES)
def test_of_a_conditional_the_cheapest_branch_runs_and_all_that_may_be_sent_is_told(spelling):
    left = computation("left", work("work.8", "left.p"), *gather("g", "left.p"))
    right = computation("right", work("work.3", "right.p"))
    choose = f"%c = f32[8]{{0}} {BRANCHES[spelling]}"
    start, end = gather("outside")
    found = run(program("%p = pred[] constant(true)", start, choose, end, before=left + right))
    assert [(e.operation, e.in_branch) for e in found.exchanges] == [
        ("outside", False),
        ("g", True),
    ]
    assert (found.work_s, found.waited_s) == (3.0, 1.0)


def test_branches_whose_shares_are_known_count_as_often_as_they_run():
    left = computation("left", work("work.8", "left.p"), *gather("g", "left.p"))
    right = computation("right", work("work.3", "right.p"))
    choose = f"%c = f32[8]{{0}} {BRANCHES['many']}"
    text = program("%p = s32[] constant(0)", choose, before=left + right)
    found = run(text, shares=lambda operation: [0.25, 0.75])
    ((exchange,), alone) = found.exchanges, run(text, computation="left")
    assert (exchange.calls, exchange.in_branch) == (0.25, False)
    assert found.work_s == 0.25 * 8 + 0.75 * 3
    assert found.waited_s == 0.25 * alone.waited_s > 0
    assert run(text, shares=lambda operation: [0, 1]).exchanges == ()


def test_what_a_plain_call_does_is_done_in_its_place():
    inside = computation("inside", *gather("g", "inside.p"), work("work.2", "inside.p"))
    found = run(program("%c = f32[8]{0} call(%x), to_apply=%inside", before=inside))
    assert (found.work_s, found.waited_s, len(found.exchanges)) == (2.0, 4.0, 1)


WRAPPED = computation(
    "wrapped", f"ROOT %w = f32[4]{{0}} reduce-scatter(%wrapped.p), {GROUPS}, dimensions={{0}}"
)
FUSED = computation(
    "all-reduce-scatter.7",
    f"%sum.1 = f32[8]{{0}} all-reduce(%all-reduce-scatter.7.p), {GROUPS}, to_apply=%add",
    "ROOT %part = f32[4]{0} slice(%sum.1), slice={[0:4]}",
)
# Lines of the entry → kind, bytes of one device in a call, whether others may run beside it.
SPELLINGS = {
    "a start with its operands": (gather("g"), ("all_gather", 64, True)),
    "a start with one result": (
        (
            f"%r = f32[8]{{0}} all-reduce-start(%x), {GROUPS}, to_apply=%add",
            "%e = f32[8]{0} all-reduce-done(%r)",
        ),
        ("all_reduce", 32, True),
    ),
    "several arrays in one": (
        (
            f"%r = ((f32[8]{{0}}, bf16[2]{{0}}), (f32[8]{{0}}, bf16[2]{{0}})) "
            f"all-reduce-start(%x, %x), {GROUPS}, to_apply=%add",
            "%e = (f32[8]{0}, bf16[2]{0}) all-reduce-done(%r)",
        ),
        ("all_reduce", 36, True),
    ),
    "a permute with its contexts": (
        (
            "%r = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            "%e = f32[8]{0} collective-permute-done(%r)",
        ),
        ("permute", 32, True),
    ),
    "a scatter in the background": (
        (
            f"%r = ((f32[8]{{0}}), f32[4]{{0}}) reduce-scatter-start(%x), {GROUPS}",
            "%e = f32[4]{0} reduce-scatter-done(%r)",
        ),
        ("reduce_scatter", 32, True),
    ),
    "a scatter": (
        (f"%r = f32[4]{{0}} reduce-scatter(%x), {GROUPS}, dimensions={{0}}, to_apply=%add",),
        ("reduce_scatter", 32, False),
    ),
    "an exchange of parts": (
        (f"%r = (f32[4]{{0}}, f32[4]{{0}}) all-to-all(%x, %x), {GROUPS}",),
        ("all_to_all", 32, False),
    ),
    "an exchange of ragged parts": (
        # Room for 32 numbers to come, and 8 that go.
        (f"%r = f32[32]{{0}} ragged-all-to-all(%x, %x, %x, %x, %x, %x), {GROUPS}",),
        ("ragged_all_to_all", 32, False),
    ),
    "wrapped in a computation": (
        (
            "%r = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped",
            "%u = ((f32[8]{0}), f32[4]{0}, u32[]) async-update(%r), calls=%wrapped",
            "%e = f32[4]{0} async-done(%u), calls=%wrapped",
        ),
        ("reduce_scatter", 32, True),
    ),
    "a sum fused with the cut of it": (
        ("%r = f32[4]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.7",),
        ("reduce_scatter", 32, False),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_collective_is_counted_once_with_its_bytes(spelling):
    lines, expected = SPELLINGS[spelling]
    started, *ends = lines
    found = run(program(started, work("work.3"), *ends, before=WRAPPED + FUSED))
    (exchange,) = found.exchanges
    assert (exchange.collective.kind, exchange.num_bytes, exchange.is_async) == expected
    assert exchange.collective.groups == ((0, 1), (2, 3)) or exchange.collective.kind == "permute"
    assert exchange.waited_s == (1.0 if exchange.is_async else 4.0)


def test_a_copy_in_the_background_is_no_collective():
    copied = computation("copied", "ROOT %n = f32[8]{0} negate(%copied.p)")
    start = "%f = ((f32[8]{0}), f32[8]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%copied"
    found = program(start, "%e = f32[8]{0} fusion-done(%f)", before=copied)
    assert run(found).exchanges == ()
    assert collective_of(found.computations["main"][1], found) is None
