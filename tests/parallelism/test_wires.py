"""Bytes that each axis sends in a step, and FLOPs of a step, counted by hand."""

import json

import pytest

from jaxfound.config import PRESETS, ModelConfig, parse
from jaxfound.config.parallel import AXES
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.models import describe
from jaxfound.models.summary import summarize
from jaxfound.parallelism import make_plan
from jaxfound.parallelism.compute import (
    compute_seconds,
    compute_terms,
    forward_flops,
    made_bytes,
    memory_bytes,
    product_flops,
    token_flops,
)
from jaxfound.parallelism.legal import layout_of
from jaxfound.parallelism.traffic import TRAFFIC
from jaxfound.resources.topology import Topology
from tests.models.tiny import model_config, run_config

# Two layers of 32 channels: up 32 x 48, down 48 x 32, out 4 heads x 8 x 32.
TABLE = ParamTable(
    (
        ParamSpec("layers.ffn.down.kernel", (2, 48, 32), "float32", ("layers", "ffn", "embed")),
        ParamSpec("layers.ffn.up.kernel", (2, 32, 48), "float32", ("layers", "embed", "ffn")),
        ParamSpec("layers.mixer.out.kernel", (2, 4, 8, 32), "float32",
                  ("layers", "heads", "head_dim", "embed")),
    )
)  # fmt: skip
H200, H200S = Topology.parse("1:h200"), Topology.parse("8:h200")
SIZE = 2 * (48 * 32 + 32 * 48 + 32 * 32)
ROWS, LENGTH = 8, 16


def wires(*, model=None, rows=ROWS, compute="bfloat16", table=TABLE, **parallel):
    cfg = run_config(model or model_config("gqa"), rows=rows, length=LENGTH, parallel=parallel,
                     precision={"compute": compute})  # fmt: skip
    degrees = [n for a, n in parallel.items() if a in AXES]
    total = 1
    for n in degrees:
        total *= n
    plan = make_plan(cfg, total, params=table)
    found = {}
    for w in plan.wires:
        found.setdefault((w.axis, w.collective), []).append((w.num_bytes, w.calls))
    return {kind: sent[0] if len(sent) == 1 else sent for kind, sent in found.items()}


def test_replicas_sum_float32_gradients_of_every_micro_batch():
    assert wires(data=4) == {("data", "all_reduce"): (SIZE * 4, 2)}
    assert wires(data=4, num_microbatches=2) == {("data", "all_reduce"): (SIZE * 4 * 2, 4)}


BY_STAGE = {
    # Whole weights in bfloat16, forward and backward; gradients in float32.
    3: {("fsdp", "all_gather"): (SIZE * 2 * 2, 4), ("fsdp", "reduce_scatter"): (SIZE * 4, 2)},
    2: {("fsdp", "reduce_scatter"): (SIZE * 4, 2), ("fsdp", "all_gather"): (SIZE * 4, 3)},
    1: {("fsdp", "all_reduce"): (SIZE * 4, 2), ("fsdp", "all_gather"): (SIZE * 4, 3)},
    0: {("fsdp", "all_reduce"): (SIZE * 4, 2)},
}


@pytest.mark.parametrize("stage", BY_STAGE)
def test_each_zero_stage_sends_what_it_cuts(stage):
    assert wires(fsdp=4, zero_stage=stage) == BY_STAGE[stage]


def test_replicas_of_shards_sum_only_their_shard():
    assert wires(data=2, fsdp=2)["data", "all_reduce"] == (SIZE * 4 // 2, 2)


def test_tensor_sums_rows_forward_and_inputs_backward():
    # Two layers: out and down forward, up's input backward, 32 channels each, float32.
    tokens = ROWS * LENGTH
    assert wires(tensor=2) == {("tensor", "all_reduce"): (2 * 3 * 32 * tokens * 4, 6)}
    # Recomputed, the mixer's sum once more.
    again = wires(tensor=2, remat="full")
    assert again == {("tensor", "all_reduce"): (2 * 4 * 32 * tokens * 4, 8)}


def test_a_cut_stream_scatters_the_same_sums_and_gathers_tokens():
    norms = ParamSpec("layers.ffn_norm.scale", (2, 32), "float32", ("layers", None))
    table = ParamTable((*TABLE.specs, norms))
    tokens = ROWS * LENGTH
    found = wires(tensor=2, activations="sequence", table=table)
    assert found["tensor", "reduce_scatter"] == (2 * 3 * 32 * tokens * 4, 6)
    # Twice a layer forward, twice again backward and the gradients of two sums; and of the ends the
    # head's input twice and the embedding's gradient. In bfloat16.
    calls = 2 * (2 + 4) + 3
    assert found["tensor", "all_gather"] == (calls * 32 * tokens * 2, calls)
    assert found["tensor", "all_reduce"] == (2 * 32 * 4, 1)


def test_stages_hand_on_their_part_of_a_cut_stream():
    whole = wires(pipeline=2, tensor=2, num_microbatches=4)
    part = wires(pipeline=2, tensor=2, num_microbatches=4, activations="sequence")
    of_whole, of_part = (found["pipeline", "permute"] for found in (whole, part))
    assert of_part == (of_whole[0] // 2, of_whole[1])


def test_the_latents_of_latent_attention_are_summed_whole():
    model = model_config("mla")
    table = ParamTable(tuple(s for s in describe(model) if ".mixer." in s.path))
    # Gradients of the latent, of 16 channels, from keys and from values; two layers.
    found = wires(model=model, table=table, tensor=2, activations="sequence")
    assert found["tensor", "all_reduce"] == (2 * 2 * 16 * ROWS * LENGTH * 4, 4)


def test_context_gathers_keys_and_values_of_whole_rows():
    # 2 heads x 8 channels of keys and of values, two layers, bfloat16, in both directions.
    whole = 2 * 2 * 2 * 8 * ROWS * LENGTH * 2
    found = wires(context=2)
    assert found["context", "all_gather"] == (whole, 2)
    assert found["context", "reduce_scatter"] == (whole, 2)
    assert found["context", "all_reduce"] == (SIZE * 4, 2)


def test_context_gathers_the_latent_of_latent_attention():
    found = wires(model=model_config("mla"), context=2)
    # 16 channels of the latent and 4 of the shared key.
    assert found["context", "all_gather"] == (2 * (16 + 4) * ROWS * LENGTH * 2, 2)


def test_experts_get_a_token_once_a_device_and_send_home_an_output_a_choice():
    model = model_config("mla_moe_mtp", mtp_depth=1)
    table = describe(model)
    found = wires(model=model, table=table, expert=4)
    # One layer and one prediction ahead, forward and backward; 32 channels, bfloat16.
    row, calls = ROWS // 4 * LENGTH * 32 * 2, 4
    # 2 of 8 experts, of which a device has 2: both elsewhere in 6/8 x 5/7 of the choices.
    touched = 4 * (1 - 6 / 8 * 5 / 7)
    assert found["expert", "all_to_all"] == [(round(touched * row * calls), calls),
                                             (2 * row * calls, calls)]  # fmt: skip
    shared = sum(s.size for s in table if s.kind == "param" and "experts" not in s.dims)
    assert found["expert", "all_reduce"][0] == shared * 4


def test_stages_hand_on_their_rows_in_every_tick_and_sum_gradients_once():
    # Four micro-batches of one row a replica in 4 + 2 ticks: activations on, gradients back.
    found = wires(pipeline=2, data=2, num_microbatches=4)
    assert found["pipeline", "permute"] == (2 * 6 * 1 * LENGTH * 32 * 2, 6)
    assert found["data", "all_reduce"] == (SIZE // 2 * 4, 3)


def test_a_stage_sums_again_what_it_runs_again():
    # One of two layers: out and down forward, up's input backward; in B out and down once more.
    tokens = ROWS // 2 * LENGTH
    found = wires(pipeline=2, tensor=2, num_microbatches=2)
    assert found["tensor", "all_reduce"] == (2 * 5 * 32 * tokens * 4, 2 * 5)


def test_every_axis_has_its_traffic():
    assert tuple(TRAFFIC) == AXES
    assert all(row.axis == axis for axis, rows in TRAFFIC.items() for row in rows)


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v2-lite", "tiny-dense"])
def test_flops_of_a_token_are_those_of_the_models_summary(name):
    model = ModelConfig.model_validate_json(json.dumps(PRESETS[name]))
    assert forward_flops(layout(name)) == summarize(model, seq_len=128).flops_causal


def test_a_prediction_ahead_costs_its_block_its_join_and_the_head_again():
    deep = layout("tiny-mla-moe")
    model = deep.cfg.model
    main = summarize(model, seq_len=128)
    head = 2 * model.vocab_size * model.embed_dim
    join = 2 * 2 * model.embed_dim * model.embed_dim
    block = [s for s in deep.params if s.path.startswith("mtp.0.block") and s.is_matrix]
    products = sum(2 * s.size // (4 if "experts" in s.dims else 1) for s in block)
    scores = 2 * model.num_heads * (model.mla.qk_head_dim + model.mla.v_head_dim) * 129 // 2
    assert forward_flops(deep) == main.flops_causal + head + join + products + scores


def layout(name, *, rows=8, precision=None, **parallel):
    cfg = parse({"preset": name, "parallel": parallel, "precision": precision or {},
                 "train": {"steps": 1, "batch_size": rows, "seq_len": 128}})  # fmt: skip
    degrees = {axis: parallel.get(axis, 1) for axis in AXES}
    return layout_of(cfg, degrees, describe(cfg.model))[0]


def test_flops_of_a_token_are_its_products_and_its_scores():
    found = token_flops(layout("tiny-mla-moe"))
    assert found.causal == forward_flops(layout("tiny-mla-moe"))
    # Five mixers, four heads that contract 32 and 24 channels, rows of 128.
    assert found.scores == 2 * 5 * 4 * (32 + 24) * 128
    assert found.full - found.products == found.scores


def test_products_take_the_stated_share_of_the_published_peak():
    dense = layout("tiny-dense", data=8)
    flops = token_flops(dense)
    terms = compute_terms(dense, H200S)
    assert terms.products == pytest.approx(3 * flops.products * 128 / (989.4e12 * 0.71))
    share = 0.8 * 0.61 * 128 / (128 + 700)
    scores = 3.5 * (flops.causal - flops.products) * 128
    assert terms.attention == pytest.approx(scores / (989.4e12 * share))
    assert compute_seconds(dense, H200S) == terms.total == terms.busy
    assert compute_terms(dense, Topology.parse("8:cpu")) is None


def test_what_is_computed_again_takes_its_time_again():
    least, most = (compute_terms(layout("tiny-dense", remat=r), H200) for r in ("none", "full"))
    head = 2 * 128 * 259
    products = token_flops(layout("tiny-dense")).products
    assert most.products / least.products == pytest.approx((4 * products - head) / (3 * products))
    assert most.attention / least.attention == pytest.approx(4.5 / 3.5)


def test_operations_in_eight_bits_take_the_peak_of_that_format():
    rules = {"rules": [{"pattern": "layers.ffn.*", "format": "fp8"}]}
    found = product_flops(layout("tiny-dense", precision=rules))
    assert found["float8"] == 3 * 2 * 4 * 3 * 128 * 344
    # Rounding: gate, up and down of 4 layers, 128 channels on one side and 344 on the other, 4.3
    # bytes of each at 2.6 TB/s where a copy reaches 4.3.
    more = memory_bytes(layout("tiny-dense", precision=rules)) - memory_bytes(layout("tiny-dense"))
    assert more == pytest.approx(4.3 / 2.6 * 4.3 * 8 * 128 * 4 * 3 * (128 + 344))
    whole = product_flops(layout("tiny-dense"))
    assert whole == {"bfloat16": sum(found.values()), "float8": 0}


def test_each_micro_batch_uses_the_weights_anew():
    one, four = (memory_bytes(layout("tiny-dense", num_microbatches=n)) for n in (1, 4))
    elements = layout("tiny-dense").params.size
    assert four - one == pytest.approx((4 * 30 - 18) * elements)


def test_an_even_router_sends_each_device_its_share():
    # Twice the devices, twice the rows: each has as much to do.
    one, two = (made_bytes(layout("tiny-mla-moe", rows=8 * n, expert=n)) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "paired_1f1b"])
def test_stages_wait_by_the_formula_of_their_schedule(schedule):
    staged = layout("tiny-dense", pipeline=4, num_microbatches=8, schedule=schedule)
    assert staged.pipeline.bubble == pytest.approx(3 / 11)
    assert layout("tiny-dense").pipeline is None
