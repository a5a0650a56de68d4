"""Layouts are decided, explained or refused before anything compiles."""

import json
from pathlib import Path

import pytest

from jaxfound.config.parallel import AXES
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import ParallelPlan, PlanError, make_plan
from tests.models.tiny import model_config, run_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
S25 = json.loads((GOLDEN.parent / "data" / "S25" / "layouts.json").read_text())

# Layout by the name of its golden file: model, devices, parallel section.
LAYOUTS = {
    "one_device": ("gqa", 1, {}),
    "data8": ("gqa", 8, {"data": 8}),
    "data2_fsdp2_tensor2": ("mla_moe_mtp", 8, {"fsdp": 2, "tensor": 2}),
    "tensor4_whole_kv_heads": ("gqa", 4, {"tensor": 4}),
    "data4_microbatches2_no_scan": (
        "gqa",
        4,
        {"num_microbatches": 2, "layers_per_scan_step": "all", "remat": "full"},
    ),
}


def plan_of(model, num_devices, **sections):
    cfg = run_config(model, **sections)
    return make_plan(cfg, num_devices, params=describe(cfg.model))


def layout(name):
    model, num_devices, parallel = LAYOUTS[name]
    return plan_of(model_config(model), num_devices, parallel=parallel)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_explanation_is_the_golden_one(name):
    assert layout(name).explain() + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_survives_comparison_and_hashing(name):
    assert layout(name) == layout(name)
    assert hash(layout(name)) == hash(layout(name))


def test_data_auto_takes_the_devices_the_other_axes_leave():
    plan = plan_of(model_config("gqa"), 8, parallel={"data": "auto", "fsdp": 2, "tensor": 2})
    assert dict(zip(AXES, plan.degrees, strict=True)) == {
        "pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2,
    }  # fmt: skip
    assert plan.num_devices == 8
    assert plan.batch_degree == 4


@pytest.mark.parametrize(
    ("num_devices", "parallel", "words"),
    [
        (8, {"fsdp": 3}, ["fsdp=3", "8 devices", "8 % 3 = 2", "[1, 2, 4, 8]"]),
        (4, {"fsdp": 8}, ["fsdp=8", "4 devices"]),
        (8, {"data": 3}, ["data=3", "8 devices", "parallel.data=8", "parallel.data=auto"]),
        (8, {"data": 3, "tensor": 2}, ["data=3 x tensor=2 = 6", "8 devices", "parallel.data=4"]),
        (8, {"pipeline": 3}, ["pipeline=3", "8 devices", "8 % 3 = 2"]),
        (8, {"expert": 4}, ["parallel.expert=4", "parallel.expert=1"]),
        (8, {"context": 5}, ["context=5", "8 devices"]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else None,
)
def test_degrees_that_cannot_run_are_refused_with_the_way_out(num_devices, parallel, words):
    with pytest.raises(PlanError) as refusal:
        plan_of(model_config("gqa"), num_devices, parallel=parallel)
    assert [w for w in words if w not in str(refusal.value)] == []


def verdict(model, num_devices, **sections):
    """The plan, or the refusal's text."""
    try:
        return plan_of(model, num_devices, **sections)
    except PlanError as refusal:
        return str(refusal)


@pytest.mark.parametrize(("heads", "tensor"), S25["query_heads_tp"])
def test_query_heads_that_do_not_divide_are_refused_with_both_numbers(heads, tensor):
    gqa = {"num_kv_heads": 1, "head_dim": 8}
    # Wide enough feed-forward and vocabulary: the heads alone are at fault.
    model = model_config("gqa", num_heads=heads, gqa=gqa, ffn_dim=48, vocab_multiple=12)
    text = verdict(model, tensor, parallel={"tensor": tensor})
    assert f"tensor={tensor} does not divide heads={heads}" in text
    nearest = {(4, 3): [2, 4], (6, 4): [3, 6]}[(heads, tensor)]
    assert f"Nearest tensor: {nearest}" in text
    assert "ffn" not in text
    assert "vocab" not in text


@pytest.mark.parametrize(("kv_heads", "tensor"), S25["kv_heads_tp"])
def test_key_value_heads_that_do_not_divide_stay_whole_and_the_plan_says_so(kv_heads, tensor):
    model = model_config("gqa", num_heads=12, gqa={"num_kv_heads": kv_heads, "head_dim": 8})
    plan = plan_of(model, tensor, parallel={"tensor": tensor})
    whole = bool(kv_heads % tensor)
    assert plan.rules.unsplit == (("kv_heads",) if whole else ())
    said = f"num_kv_heads={kv_heads} does not divide over tensor={tensor}"
    assert (said in plan.explain()) == whole


@pytest.mark.parametrize(("vocab", "tensor"), S25["vocab_tp"])
def test_a_vocabulary_divides_by_its_padding_or_is_refused_with_both_numbers(vocab, tensor):
    padded = model_config("gqa", vocab_size=vocab, vocab_multiple=8)
    assert isinstance(verdict(padded, tensor, parallel={"tensor": tensor}), ParallelPlan)
    exact = model_config("gqa", vocab_size=vocab, vocab_multiple=1)
    text = verdict(exact, tensor, parallel={"tensor": tensor})
    assert f"tensor={tensor} does not divide vocab={vocab}" in text
    assert f"{vocab} % {tensor} = {vocab % tensor}" in text
    assert "model.vocab_multiple" in text


@pytest.mark.parametrize(("rows", "data"), S25["batch_dp"])
def test_rows_that_do_not_divide_are_refused_with_both_numbers(rows, data):
    text = verdict(model_config("gqa"), data, rows=rows, parallel={"data": data})
    nearest = {(6, 4): [4, 8], (1, 2): [2]}[(rows, data)]
    assert f"{rows} % {data} = {rows % data}" in text
    assert f"Nearest batch_size: {nearest}" in text
    for size in nearest:
        legal = verdict(model_config("gqa"), data, rows=size, parallel={"data": data})
        assert isinstance(legal, ParallelPlan)


@pytest.mark.parametrize(("length", "context"), S25["seq_cp"])
def test_rows_that_context_cannot_cut_are_refused_with_both_numbers(length, context):
    model = model_config("gqa", max_positions=64)
    text = verdict(model, context, length=length, parallel={"context": context})
    chunks = 2 * context
    assert f"train.seq_len={length}" in text
    assert f"{length} % {chunks} = {length % chunks}" in text
    nearest = [length // chunks * chunks, -(-length // chunks) * chunks]
    assert f"Nearest seq_len: {nearest}" in text
    for legal in nearest:
        plan = verdict(model, context, length=legal, parallel={"context": context})
        assert isinstance(plan, ParallelPlan)


@pytest.mark.parametrize(("experts", "degree"), S25["experts_ep"])
def test_experts_that_do_not_divide_are_refused_with_both_numbers(experts, degree):
    moe = {"num_experts": experts, "top_k": 1, "expert_dim": 16}
    model = model_config("mla_moe_mtp", moe=moe)
    text = verdict(model, degree, rows=degree, parallel={"expert": degree})
    assert f"expert={degree} does not divide experts={experts}" in text
    assert f"{experts} % {degree} = {experts % degree}" in text


def test_rows_of_a_microbatch_are_what_divides():
    parallel = {"data": 2, "fsdp": 2, "num_microbatches": 4}
    text = verdict(model_config("gqa"), 4, rows=8, parallel=parallel)
    assert "a micro-batch of 2 rows (train.batch_size=8 / num_microbatches=4)" in text
    assert "data=2 x fsdp=2 = 4 devices" in text
    assert "Nearest batch_size: [16]" in text
    assert isinstance(verdict(model_config("gqa"), 4, rows=16, parallel=parallel), ParallelPlan)


def test_every_fault_is_in_one_message():
    model = model_config("gqa", num_heads=4, ffn_dim=50, vocab_size=250, vocab_multiple=1)
    text = verdict(model, 3, rows=3, parallel={"tensor": 3})
    for part in ("heads=4", "ffn=50", "vocab=250"):
        assert f"tensor=3 does not divide {part}" in text


def test_a_width_that_fsdp_does_not_divide_is_cut_elsewhere_and_the_plan_says_so():
    plan = plan_of(model_config("gqa", embed_dim=36), 8, parallel={"fsdp": 8})
    assert "fsdp=8 divides neither embed nor latent" in plan.explain()


@pytest.mark.parametrize(
    ("parallel", "cut"), [({"data": 8}, 1), ({"fsdp": 8}, 8), ({"tensor": 4}, 4)]
)
def test_parameter_bytes_are_those_of_one_devices_shards(parallel, cut):
    model = model_config("gqa", tie_embeddings=False)
    num_devices = max(v for v in parallel.values())
    table = describe(model)
    plan = plan_of(model, num_devices, parallel=parallel)
    vectors = sum(s.size for s in table if not s.is_matrix)
    # Two key/value heads stay whole on four tensor-parallel devices.
    whole = 2 * 2 * 32 * 2 * 8 if "tensor" in parallel else 0
    matrices = table.size - vectors - whole
    assert plan.param_bytes == 4 * (vectors + whole + matrices // cut)


def test_a_plan_becomes_the_execution_of_its_model():
    cfg = run_config(model_config("gqa"), parallel={"layers_per_scan_step": "all", "remat": "full"})
    plan = make_plan(cfg, 8, params=describe(cfg.model))
    execution = execution_of(plan, cfg.precision)
    assert (execution.layers_per_scan_step, execution.remat) == (0, "full")
    assert execution.rules is plan.rules
    assert Frame(cfg.model, execution=execution).execution is execution
