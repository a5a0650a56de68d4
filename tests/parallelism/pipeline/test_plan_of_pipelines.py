"""A plan knows its pipeline: stages, state, slots, waiting and traffic, counted by hand."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.face import make_plan as plan_of_config
from jaxfound.models import describe
from jaxfound.parallelism import ParallelPlan, PlanError, make_plan
from jaxfound.parallelism.compute import part_flops
from jaxfound.parallelism.legal import layout_of
from jaxfound.parallelism.memory import adam_slots
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.parallelism.pipeline.facts import lockstep_work, pipeline_of
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.parallelism.pipeline.stages import NO_LAYER
from jaxfound.parallelism.search import search
from jaxfound.resources.topology import Topology
from tests.models.tiny import model_config, run_config

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
S25 = json.loads((ROOT / "tests" / "data" / "S25" / "layouts.json").read_text())
# Three layers of a matrix and a norm, an embedding that is the head too.
TABLE = ParamTable(
    (
        ParamSpec("embedding.table", (64, 32), "float32", ("vocab", "embed")),
        ParamSpec("final_norm.scale", (32,), "float32", (None,)),
        ParamSpec("layers.ffn.up.kernel", (3, 32, 48), "float32", ("layers", "embed", "ffn")),
        ParamSpec("layers.mixer_norm.scale", (3, 32), "float32", ("layers", None)),
    )
)  # fmt: skip
EMBEDDING, FINAL, UP, NORM = 64 * 32, 32, 32 * 48, 32


def plan(
    *,
    layers=3,
    table: ParamTable | None = TABLE,
    rows=16,
    model=None,
    topology=None,
    train=None,
    **parallel,
):
    """A plan of a tiny dense model on as many devices as its axes need, or on a topology."""
    model = model or model_config("gqa", num_layers=layers)
    cfg = run_config(model, rows=rows, parallel=parallel, train=train or {})
    count = math.prod(parallel.get(axis, 1) for axis in AXES)
    return make_plan(cfg, topology or count, params=table or describe(model))


def verdict(**sections):
    """The plan, or the refusal's text."""
    try:
        return plan(**sections)
    except PlanError as refusal:
        return str(refusal)


def layers_of_stages(found):
    """The layers of each stage of a plan, in the order of the stages, masked places left out."""
    table, schedule = found.stages.table(), found.schedule
    chunks = {}
    for rank in range(schedule.num_ranks):
        for chunk, stage in enumerate(schedule.stages_of(rank)):
            held = [n for n in table[rank, chunk].tolist() if n != NO_LAYER]
            assert chunks.setdefault(stage, held) == held
    return [chunks[stage] for stage in range(schedule.num_stages)]


@pytest.mark.parametrize(("layers", "stages"), S25["layers_stages"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_hold_every_layer_in_order_or_the_schedule_is_refused(schedule, layers, stages):
    found = verdict(layers=layers, table=None, rows=24, pipeline=stages, schedule=schedule,
                    num_microbatches=12 if stages != 5 else 24)  # fmt: skip
    if isinstance(found, str):
        assert (schedule, stages % 2) in {("dualpipe", 1), ("interleaved", 1)}, found
        assert "Use " in found
        return
    held = layers_of_stages(found)
    assert [n for stage in held for n in stage] == list(range(layers))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    most = max(map(len, held))
    assert found.stages.num_masked == found.schedule.num_copies * (len(held) * most - layers)


@pytest.mark.parametrize(("layers", "ranks"), S25["two_chunks_per_rank"])
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_two_chunks_a_rank_hold_every_layer(schedule, layers, ranks):
    found = plan(layers=layers, table=None, pipeline=ranks, schedule=schedule, chunks=2,
                 num_microbatches=4)  # fmt: skip
    held = layers_of_stages(found)
    assert len(held) == 2 * ranks
    assert [n for stage in held for n in stage] == list(range(layers))


@pytest.mark.parametrize(("pieces", "ranks"), S25["microbatches_stages"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_are_run_or_refused_with_the_next_number(schedule, pieces, ranks):
    found = verdict(layers=4, table=None, rows=30, pipeline=ranks, schedule=schedule,
                    num_microbatches=pieces)  # fmt: skip
    if isinstance(found, ParallelPlan):
        assert found.schedule.num_microbatches == pieces
        assert SCHEDULES[schedule].rule is None or pieces >= ranks
        return
    assert f"parallel.pipeline={ranks}, parallel.schedule={schedule}: " in found
    assert f"num_microbatches={pieces}" in found
    assert "Use " in found
    assert "paired_1f1b" in found


# Places that hold layers on a rank, of four in all.
HELD = {"paired_1f1b": 2, "1f1b": 2, "dualpipev": 2, "dualpipe": 4}
# Layers of four whose gradients are there at once, beside one in use: a step's, or W's chunk.
AT_ONCE = [("paired_1f1b", 1, 1), ("gpipe", 2, 2), ("gpipe", "all", 4), ("zero_bubble", 1, 4)]


@pytest.mark.parametrize("schedule", HELD)
def test_a_rank_stores_its_places_masked_ones_too_and_the_ends_whole(schedule):
    found = plan(pipeline=2, schedule=schedule, num_microbatches=4).ledger
    # dualpipe has two copies of stages of two places.
    elements = HELD[schedule] * (UP + NORM) + EMBEDDING + FINAL
    assert found.of("parameters") == 4 * elements
    assert found.of("gradients") == 4 * elements
    assert found.of("optimizer") == 2 * 4 * elements + 4


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_of_gradients_are_whole_whatever_the_zero_stage(stage):
    found = plan(pipeline=2, fsdp=2, zero_stage=stage, num_microbatches=4).ledger
    matrices, vectors = 2 * UP + EMBEDDING, 2 * NORM + FINAL
    assert found.of("parameters") == found.of("gradients") == 4 * (matrices + vectors)
    cut = 2 if stage else 1
    assert found.of("optimizer") == 2 * 4 * (matrices // cut + vectors) + 4


def test_slots_are_those_of_the_tables_and_one_of_each_kind_for_what_nobody_needs():
    found = plan(pipeline=2, num_microbatches=4, rows=16)
    # In the tick after it comes the last rank uses an input, and the first a gradient: one each.
    row_bytes = 16 // 4 * 16 * 32 * 4
    assert found.ledger.of("stage slots") == (1 + 1 + 1 + 1) * row_bytes
    assert "1 + 1 inputs, 1 + 1 gradients of stages" in found.explain()


def test_slots_have_a_devices_part_of_a_cut_stream():
    whole, part = (
        plan(pipeline=2, tensor=2, num_microbatches=4, rows=16, activations=activations)
        for activations in ("replicated", "sequence")
    )
    assert 2 * part.ledger.of("stage slots") == whole.ledger.of("stage slots")


def test_a_cut_backward_pass_keeps_what_the_gradients_of_weights_are_made_from():
    found = plan(pipeline=2, schedule="zero_bubble", num_microbatches=4, rows=16)
    tokens = 16 // 4 * 16
    # Four of the stream's width, queries of 4 heads and keys and values of 2 with their gradients,
    # and three of the feed-forward; of two layers.
    kept = 2 * tokens * (4 * 32 + 2 * (4 + 2) * 8 + 3 * 48) * 4
    rows = tokens * 32 * 4
    staged = found.pipeline
    assert staged.num_kept_slots > 0
    inputs = staged.num_input_slots + staged.num_grad_slots + 2
    assert found.ledger.of("stage slots") == inputs * rows + (staged.num_kept_slots + 1) * kept


@pytest.mark.parametrize(("schedule", "step", "layers"), AT_ONCE)
def test_gradients_are_there_before_they_are_added_up(schedule, step, layers):
    model = model_config("gqa", num_layers=8)
    found = plan(pipeline=2, num_microbatches=4, schedule=schedule, layers_per_scan_step=step,
                 model=model, table=None).ledger  # fmt: skip
    of_layer = sum(s.size for s in describe(model) if s.path.startswith("layers.")) // 8
    # While a layer's attention goes back.
    assert found.of("buffers") == 4 * layers * of_layer


def test_the_gradients_of_the_last_stages_end_are_there_where_it_outweighs_a_layer():
    model = model_config("gqa", num_layers=3, vocab_size=4096)
    wide = plan(pipeline=2, num_microbatches=4, model=model, train={"loss_chunk": 0}).ledger
    # The last stage's end: the head in use, and its gradients and the last norm's.
    assert wide.of("buffers") == 4 * EMBEDDING + 4 * (EMBEDDING + FINAL)
    # In float32, and in the format of compute, which is float32 here.
    assert wide.of("logits") == 4 * 16 * 4096 * (4 + 4)
    assert wide.of("gradients") == plan(pipeline=2, num_microbatches=4).ledger.of("gradients")


def test_stages_keep_what_one_micro_batch_needs_however_many_are_in_flight():
    few, many = (plan(pipeline=2, num_microbatches=n, rows=4 * n).ledger for n in (2, 8))
    assert few.of("activations") == many.of("activations")


def test_zero_3_with_stages_is_refused_with_the_reason_where_it_is_asked_for():
    with pytest.raises(PlanError) as refusal:
        plan(pipeline=2, fsdp=2, zero_stage=3, num_microbatches=4)
    for words in ("zero_stage=3", "pipeline=2", "every tick", "Set parallel.zero_stage=2"):
        assert words in str(refusal.value)


def test_zero_is_2_where_nobody_said_and_the_plan_says_so():
    unsaid = plan(pipeline=2, fsdp=2, num_microbatches=4)
    assert unsaid.rules.zero_stage == 2
    assert any("ZeRO stage 2 and not 3" in note for note in unsaid.notes)
    asked = plan(pipeline=2, fsdp=2, zero_stage=2, num_microbatches=4)
    assert asked.ledger == unsaid.ledger
    assert not any("and not 3" in note for note in asked.notes)
    # Without fsdp there is nothing to cut, and nothing to refuse.
    assert isinstance(verdict(pipeline=2, zero_stage=3, num_microbatches=4), ParallelPlan)


def test_chunks_of_more_layers_than_are_unrolled_are_refused_where_backward_passes_are_cut():
    text = verdict(layers=18, table=None, pipeline=2, schedule="dualpipe", num_microbatches=4)
    for words in ("parallel.schedule=dualpipe", "8 at most", "a chunk has 9",
                  "parallel.schedule=paired_1f1b", "parallel.pipeline=4 or more"):  # fmt: skip
        assert words in text
    for schedule, ranks in (("paired_1f1b", 2), ("dualpipe", 4), ("dualpipev", 2)):
        legal = verdict(layers=18, table=None, pipeline=ranks, schedule=schedule,
                        num_microbatches=8)  # fmt: skip
        assert isinstance(legal, ParallelPlan), legal


def test_a_tick_is_as_long_as_its_busiest_rank():
    one = pipeline_of(Pipelining("paired_1f1b", 2, 1), num_layers=2)
    # F of the first stage; B of the last, with its F; B of the first, which runs it again.
    assert lockstep_work(one, layer=10.0, first=1.0, last=2.0) == 11 + (30 + 6) + 33
    two = pipeline_of(Pipelining("paired_1f1b", 2, 2), num_layers=2)
    # F; F beside the last's B; B beside the last's B; B.
    assert lockstep_work(two, layer=10.0, first=1.0, last=2.0) == 11 + 36 + 36 + 33


def seconds(num_layers, **parallel):
    """Arithmetic of a step on H200s of a tiny dense model, in 8 micro-batches, and its notes."""
    model = model_config("gqa", num_layers=num_layers)
    cfg = run_config(model, precision={"compute": "bfloat16"}, rows=64,
                     parallel={"num_microbatches": 8, **parallel})  # fmt: skip
    found = make_plan(cfg, Topology.parse("4:h200"), params=describe(model))
    return found.terms, found.notes


def test_the_seconds_of_arithmetic_are_those_of_the_ticks():
    model = model_config("gqa", num_layers=4)
    cfg = run_config(model)
    flops = part_flops(layout_of(cfg, dict.fromkeys(AXES, 1), describe(model))[0])
    layer, head = flops.layer, flops.last
    # Ranks 0 to 3 do F in ticks rank to rank + 7 and B in ticks 6 - rank to 13 - rank; the last
    # rank's F is in its B. So 3 ticks of F, then the last's B beside F, 6 pairs in which it is the
    # busiest or the others are, its B beside theirs, and 3 of B.
    ends = 3 * layer + 3 * head
    ticks = 3 * layer + 2 * ends + 6 * max(4 * layer, ends) + 9 * layer
    # Of a rank's own work: F, the same again, and a backward pass of twice as much.
    evenly = 8 * 4 * (4 * layer + head) / 4
    staged, _ = seconds(4, pipeline=4)
    assert staged.total / staged.busy == pytest.approx(ticks / evenly, rel=1e-12)
    whole, _ = seconds(4)
    assert whole.total == whole.busy


def test_stages_that_are_not_alike_are_named_with_what_they_add():
    (note,) = [n for n in seconds(5, pipeline=4)[1] if n.startswith("pipeline:")]
    assert "3 of 8 places hold no layer" in note
    assert "the first stage's own part is 0.0 layers of work" in note
    assert not any(n.startswith("pipeline:") for n in seconds(40, pipeline=4)[1])


def test_what_is_handed_on_and_summed_over_the_ranks():
    found = plan(pipeline=2, num_microbatches=4, rows=16)
    sent = [(w.collective, w.num_bytes, w.calls) for w in found.wires]
    row_bytes = 16 // 4 * 16 * 32 * 4
    # M + 2 (P - 1) ticks, an output and a gradient in each; embedding and last norm once a step.
    assert sent == [("permute", 6 * 2 * row_bytes, 6), ("all_reduce", 4 * (EMBEDDING + FINAL), 2)]


def test_copies_of_stages_exchange_their_gradients_and_two_directions_hand_on_twice():
    found = plan(pipeline=4, schedule="dualpipe", num_microbatches=8, rows=16)
    ticks, shared, copies = [(w.collective, w.num_bytes, w.calls) for w in found.wires]
    row_bytes = 16 // 8 * 16 * 32 * 4
    assert ticks == ("permute", found.pipeline.num_ticks * 4 * row_bytes, found.pipeline.num_ticks)
    assert shared[0] == "all_reduce"
    # Two chunks of one place.
    assert copies == ("permute", 4 * 2 * (UP + NORM), 2)


def test_gradients_are_cut_once_a_step_at_every_stage_that_cuts_moments():
    def sent(stage):
        found = plan(pipeline=2, fsdp=2, zero_stage=stage, num_microbatches=4)
        return {(w.collective, w.num_bytes) for w in found.wires if w.axis == "fsdp"}

    whole = 4 * (2 * (UP + NORM) + EMBEDDING + FINAL)
    assert sent(0) == {("all_reduce", whole)}
    assert sent(1) == sent(2) == {("reduce_scatter", whole), ("all_gather", whole)}


def test_the_data_of_a_plan_has_its_pipeline_as_a_name_and_numbers():
    staged = plan(pipeline=2, schedule="zero_bubble", num_microbatches=4)
    data = json.loads(json.dumps(staged.as_data()))
    assert data["schedule"] == "zero_bubble"
    assert data["pipeline"]["layers_a_chunk"] == 2
    assert data["pipeline"]["masked_places"] == 1
    assert data["pipeline"]["bubble"] == pytest.approx(staged.pipeline.bubble)
    assert data["memory_bytes"]["stage slots"] == staged.ledger.of("stage slots")
    single = make_plan(run_config(model_config("gqa")), 1, params=describe(model_config("gqa")))
    assert single.schedule is single.stages is None
    assert (single.as_data()["schedule"], single.as_data()["pipeline"]) == (None, None)
    assert "stage slots" not in single.as_data()["memory_bytes"]


def test_a_plan_with_stages_survives_comparison_and_hashing():
    one, two = (plan(pipeline=2, num_microbatches=4) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != plan(pipeline=2, num_microbatches=4, schedule="1f1b")


def test_the_explanation_is_the_golden_one():
    model = model_config("mla_moe_mtp", num_layers=4, mtp_depth=1)
    found = plan(model=model, table=None, pipeline=2, schedule="dualpipev", fsdp=2, rows=16,
                 num_microbatches=4, topology=Topology.parse("4:h200"))  # fmt: skip
    text = found.explain() + "\n"
    assert text == (GOLDEN / "pipeline2_dualpipev_fsdp2.txt").read_text()


def searched(topology="4:h200", **parallel):
    model = model_config("gqa", num_layers=4)
    cfg = run_config(model, rows=16, precision={"compute": "bfloat16"}, parallel=parallel)
    table = describe(model)
    found = search(cfg, Topology.parse(topology), params=table, slots=adam_slots(table))
    return cfg, table, found


def test_a_search_looks_at_every_schedule_and_says_why_each_lost():
    cfg, table, found = searched(pipeline=2)
    ranked = [c for c in found if c.outcome == "ranked"]
    assert {c.change["schedule"] for c in ranked} == set(SCHEDULES)
    assert all(c.why for c in ranked[1:])
    assert {c.change["zero_stage"] for c in ranked if "zero_stage" in c.change} == {2}
    for one in (ranked[0], ranked[-1]):
        again = run_config(cfg.model, rows=16, precision={"compute": "bfloat16"},
                           parallel=dict(one.change))  # fmt: skip
        own = make_plan(again, Topology.parse("4:h200"), params=table)
        assert one.step_s == pytest.approx(own.compute_s + own.wire_s, rel=1e-12)
        assert one.total_bytes == own.ledger.total_bytes


def test_a_search_gives_the_rule_of_a_schedule_that_no_number_of_micro_batches_suits():
    _, _, found = searched("3:h200", pipeline=3)
    why = {c.change["schedule"]: c.why for c in found if c.outcome == "illegal"}
    assert set(why) == {"dualpipe", "interleaved"}
    assert "num_ranks=3 is odd" in why["dualpipe"]


def test_a_way_out_names_the_schedule_that_holds_less():
    model = model_config("gqa", num_layers=4)
    roomy = plan(model=model, table=None, pipeline=2, schedule="dualpipe", num_microbatches=4)
    memory = int(roomy.ledger.total_bytes * 0.9)
    tight = plan(model=model, table=None, pipeline=2, schedule="dualpipe", num_microbatches=4,
                 topology=Topology(1, 2, "small", memory))  # fmt: skip
    (way_out,) = [n for n in tight.notes if n.startswith("way out")]
    assert "parallel.schedule=1f1b" in way_out
    assert "zero_stage=3" not in way_out


def test_the_published_layout_of_deepseek_v3_is_planned_in_ten_seconds():
    path, cluster = ROOT / "configs" / "deepseek-v3.yaml", "256x8:h800:ib400"
    layout = [
        "parallel.pipeline=16", "parallel.expert=64", "parallel.fsdp=2", "parallel.zero_stage=1",
        "parallel.schedule=dualpipev", "parallel.num_microbatches=120",
    ]  # fmt: skip
    # The command in a process of its own, where no type is checked at every call; the CPU time of
    # that one, beside which those of other tests may end.
    command = ["-m", "jaxfound.cli.main", "plan", str(path), *layout, "--topology", cluster]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as child:
        printed = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert used.ru_utime + used.ru_stime < 10
    found = plan_of_config(load(path, layout), Topology.parse(cluster))
    text = found.explain()
    assert printed == text + "\n"
    assert found.num_devices == 2048
    assert "16 ranks of 2 chunks, 32 stages of 2 layers, 6 masked places, 1 copy" in text
    # 4 layers of 4 experts on a rank, and the further prediction's.
    experts = (4 + 1) * 256 // 64 * 3 * 7168 * 2048
    assert found.ledger.of("parameters") > 4 * experts
