"""The ledger: state to the byte by hand, the peak's two places, verdicts and ways out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfound.config import PRESETS, ModelConfig, parse
from jaxfound.config.load import load
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models import describe
from jaxfound.parallelism import make_plan
from jaxfound.parallelism.backward import FUSED_HEAD_DIM
from jaxfound.parallelism.layout import PackedRows
from jaxfound.parallelism.legal import layout_of, resolve_degrees
from jaxfound.parallelism.memory import Slots, adam_slots
from jaxfound.parallelism.weights import copied_bytes, regathered_bytes
from jaxfound.resources.topology import Topology
from jaxfound.training.optimizer import optimizer_slots
from pallas_kernels.flash_attention import cudnn
from tests.models.tiny import model_config, run_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
H200 = Topology.parse("8:h200")
# Two matrices and a norm of two layers, an embedding, and a router's bias that no optimizer moves.
TABLE = ParamTable(
    (
        ParamSpec("embedding.table", (64, 32), "float32", ("vocab", "embed")),
        ParamSpec("layers.ffn.up.kernel", (2, 32, 48), "float32", ("layers", "embed", "ffn")),
        ParamSpec("layers.ffn.router.bias", (2, 8), "float32", ("layers", None), "buffer"),
        ParamSpec("layers.mixer.out.kernel", (2, 4, 8, 32), "float32",
                  ("layers", "heads", "head_dim", "embed")),
        ParamSpec("layers.mixer_norm.scale", (2, 32), "float32", ("layers", None)),
    )
)  # fmt: skip
EMBEDDING, UP, OUT, NORM, BIAS = 64 * 32, 2 * 32 * 48, 2 * 4 * 8 * 32, 2 * 32, 2 * 8


def plan(topology=H200, *, slots=None, rows=16, train=None, vocab_size=61, **parallel):
    model = model_config("gqa", vocab_size=vocab_size)
    cfg = run_config(model, rows=rows, parallel=parallel, train=train or {})
    return make_plan(cfg, topology, params=TABLE, optimizer_slots=slots)


# Layout: elements on one device of parameters, of gradients, of one moment.
WHOLE = EMBEDDING + UP + OUT + NORM
STATE = [
    ({"data": 8}, (WHOLE, WHOLE, WHOLE)),
    ({"fsdp": 8, "zero_stage": 3}, (WHOLE // 8 + NORM * 7 // 8,) * 3),
    ({"fsdp": 8, "zero_stage": 2}, (WHOLE, *((WHOLE // 8 + NORM * 7 // 8,) * 2))),
    ({"fsdp": 8, "zero_stage": 1}, (WHOLE, WHOLE, WHOLE // 8 + NORM * 7 // 8)),
    ({"data": 2, "fsdp": 2, "tensor": 2}, ((WHOLE - NORM) // 4 + NORM,) * 3),
    ({"data": 4, "tensor": 2}, ((WHOLE - NORM) // 2 + NORM,) * 3),
]


@pytest.mark.parametrize(("parallel", "elements"), STATE)
def test_state_is_what_the_cuts_leave_on_one_device(parallel, elements):
    ledger = plan(**parallel).ledger
    parameters, gradients, moment = elements
    assert ledger.of("parameters") == 4 * parameters
    assert ledger.of("gradients") == 4 * gradients
    # Two moments, and the count of updates.
    assert ledger.of("optimizer") == 4 * 2 * moment + 4


def test_micro_batches_hold_their_own_gradients_beside_the_sum():
    one, two = plan(data=8), plan(data=8, num_microbatches=2)
    assert two.ledger.of("gradients") == 2 * one.ledger.of("gradients")


@pytest.mark.parametrize(("num_microbatches", "at_once"), [(1, 4), (2, 6)])
def test_layers_that_compute_apart_are_copied_out_of_their_stack(num_microbatches, at_once):
    """The longest segment; in a loop over micro-batches every segment stays."""
    parallel = {"data": 8, "num_microbatches": num_microbatches}
    policies = [{}, {"rules": [{"pattern": "layers.0-1.ffn.*", "format": "bfloat16"}]}]
    cfg = run_config(model_config("gqa", num_layers=6), rows=16, parallel=parallel)
    table = describe(cfg.model)
    buffers = []
    for policy in policies:
        precision = PrecisionConfig.model_validate({"compute": "float32", **policy}, strict=False)
        asked = cfg.model_copy(update={"precision": precision})
        buffers.append(make_plan(asked, H200, params=table).ledger.of("buffers"))
    of_layers = sum(spec.size for spec in table if spec.path.startswith("layers."))
    assert buffers[1] - buffers[0] == 4 * of_layers * at_once // 6


@pytest.mark.parametrize(
    ("parallel", "copies"), [({"data": 8}, 1), ({"fsdp": 8, "zero_stage": 3}, 0)], ids=str
)
def test_weights_in_8_bit_are_a_byte_each_unless_fsdp_cuts_them(parallel, copies):
    cfg = run_config(model_config("gqa", num_layers=6), rows=16, parallel=parallel)
    table = describe(cfg.model)
    rules = (PrecisionRule(pattern="layers.*", format="fp8"),)
    in_fp8 = cfg.model_copy(update={"precision": PrecisionConfig(compute="float32", rules=rules)})
    before, after = (
        make_plan(each, H200, params=table).ledger.of("buffers") for each in (cfg, in_fp8)
    )
    kernels = [s for s in table if s.path.startswith("layers.") and s.path.endswith(".kernel")]
    assert after - before == copies * sum(spec.size for spec in kernels)


def test_arguments_are_state_and_batch():
    found = plan(data=2, fsdp=2, tensor=2).ledger
    # 4 of 16 rows of 16 tokens: four int32 and a mask; the step, the random state, the biases.
    batch = 4 * 16 * (4 * 4 + 1) + 4 + 8 + 4 * BIAS
    assert found.of("inputs") == batch
    assert found.argument_bytes == found.of("parameters") + found.of("optimizer") + batch


def test_rows_arrive_whole_on_every_device_of_the_context_axis():
    cut, whole = plan(data=4, context=2).ledger, plan(data=4, tensor=2).ledger
    assert cut.of("inputs") == whole.of("inputs")


def test_what_an_update_rule_keeps_is_asked_of_the_rule():
    cfg = run_config(model_config("mla_moe_mtp"), optimizer={"name": "muon"})
    table = describe(cfg.model)
    slots = optimizer_slots(cfg.optimizer, table)
    matrices = {s.path for s in table if s.is_matrix and "vocab" not in s.dims}
    assert {p for p, n in slots.by_path.items() if n == 1} == matrices
    assert {p for p, n in slots.by_path.items() if n == 2} == {
        s.path for s in table if s.kind == "param"
    } - matrices
    adam = optimizer_slots(run_config(cfg.model).optimizer, table)
    assert adam == adam_slots(table)


def test_slots_that_are_given_are_what_is_counted():
    none = plan(data=8, slots=Slots({}, 0)).ledger
    assert none.of("optimizer") == 0
    assert none.argument_bytes == none.of("parameters") + none.of("inputs")


@pytest.mark.parametrize(
    ("name", "mesh", "each"),
    [("llama3-8b", {"fsdp": 8}, 16), ("50b", {"fsdp": 8}, 16)],
)
def test_a_presets_state_is_sixteen_bytes_a_parameter(name, mesh, each):
    model = ModelConfig.model_validate_json(json.dumps(PRESETS[name]))
    cfg = parse({"preset": name, "parallel": mesh,
                 "train": {"steps": 1, "batch_size": 256, "seq_len": 128}})  # fmt: skip
    table = describe(model)
    found = make_plan(cfg, next(iter(mesh.values())), params=table)
    assert found.state_bytes == each * table.size
    kinds = [found.ledger.of(k) for k in ("parameters", "gradients", "optimizer")]
    # Norms are whole on every device, which is little.
    assert sum(kinds) == pytest.approx(found.state_bytes / found.num_devices, rel=1e-3)


def test_a_wide_vocabulary_peaks_at_the_loss_and_a_narrow_one_in_a_layer():
    # 128 rows of 16 tokens on a device, all logits at one time, of a run that computes in float32.
    train = {"loss_chunk": 0}
    wide = plan(data=8, rows=1024, train=train, vocab_size=4096).ledger
    assert wide.of("logits") == 128 * 16 * 4096 * (4 + 4)
    # Gradients have their room before the loss: XLA fills it with zeros as early as that.
    assert wide.of("gradients") == 4 * WHOLE
    narrow = plan(data=8, rows=1024, train=train).ledger
    assert narrow.of("logits") == 0
    assert narrow.of("gradients") == 4 * WHOLE
    (entry,) = [e for e in narrow.entries if e.kind == "logits"]
    assert f"{128 * 16 * 64 * (4 + 4):,} B, freed before the peak" in entry.how


@pytest.mark.parametrize("policy", ["none", "matmul_outputs", "full"])
def test_more_micro_batches_hold_fewer_activations(policy):
    few, many = (plan(data=8, rows=64, num_microbatches=n, remat=policy) for n in (1, 4))
    assert many.ledger.of("activations") < few.ledger.of("activations")


def test_recomputing_more_keeps_less():
    kept = [plan(data=8, remat=p).ledger.of("activations")
            for p in ("none", "matmul_outputs", "full")]  # fmt: skip
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def workspace(preset="llama3-8b", topology="8:h200", **sections):
    """What the ledger says of cuDNN's workspace, of one row of 4,096 tokens a device."""
    train = {"steps": 1, "batch_size": 8, "seq_len": 4096}
    cfg = parse({"preset": preset, "train": train, **sections})
    table = describe(cfg.model)
    ledger = make_plan(cfg, Topology.parse(topology), params=table).ledger
    return next((entry.how for entry in ledger.entries if entry.kind == "workspace"), None)


def test_cudnn_has_room_for_a_whole_row_in_every_document_slot():
    # 32 slots of 4,096 rows of 32 heads of 128: the query's gradient in float32, a sum a row, and
    # each query head's share of the gradients of a key and a value that four read.
    assert f"{32 * 4096 * 32 * (4 * (128 + 1) + 2 * 2 * 128):,} B" in (workspace() or "")
    # Latent attention has a key head for each query head, 192 wide as values are padded to be.
    latent = workspace("deepseek-v2-lite", parallel={"fsdp": 8})
    assert f"{32 * 4096 * 16 * 4 * (192 + 1):,} B" in (latent or "")
    halved = workspace(parallel={"tensor": 2, "data": 4, "num_microbatches": 2})
    assert f"{32 * 4096 * 16 * (4 * (128 + 1) + 2 * 2 * 128):,} B" in (halved or "")


@pytest.mark.parametrize(
    "sections",
    [
        {"topology": "8:cpu"},
        {"topology": "8:a100"},
        {"precision": {"compute": "float32"}},
        {"parallel": {"context": 2, "data": 4, "num_microbatches": 2}},
    ],
    ids=str,
)
def test_attention_that_is_not_cudnns_asks_it_for_nothing(sections):
    assert workspace(**sections) is None


def test_the_plan_and_the_kernels_agree_where_attention_is_cudnns():
    kernels = {a: cudnn.MAX_HEAD_DIM[a] for a in cudnn.OFFSET_ARCHITECTURES}
    assert kernels == FUSED_HEAD_DIM


def test_parameters_that_are_gathered_along_another_dim_than_their_first_are_copied():
    # fsdp cuts the embedding and the attention's result along their last dim, the rest along the
    # first below the layers.
    cut = plan(fsdp=8, zero_stage=3)
    assert copied_bytes(layout_of_plan(fsdp=8)) == 4 * (EMBEDDING + OUT) // 8
    assert copied_bytes(layout_of_plan(fsdp=8, zero_stage=2)) == 0
    assert copied_bytes(layout_of_plan(data=8)) == 0
    assert cut.ledger.of("buffers") >= 4 * (EMBEDDING + OUT) // 8


def test_parameters_that_only_moments_cut_lie_twice_when_they_are_updated():
    # All but the norm are cut along a dim behind the first.
    for stage in (1, 2):
        found = regathered_bytes(layout_of_plan(fsdp=8, zero_stage=stage))
        assert found == 4 * (EMBEDDING + UP + OUT)
    assert regathered_bytes(layout_of_plan(fsdp=8, zero_stage=3)) == 0
    assert regathered_bytes(layout_of_plan(fsdp=8, zero_stage=0)) == 0
    assert regathered_bytes(layout_of_plan(data=8)) == 0


def layout_of_plan(**parallel):
    cfg = run_config(model_config("gqa", vocab_size=61), rows=16, parallel=parallel)
    degrees = resolve_degrees(cfg, 8)
    return layout_of(cfg, degrees, TABLE)[0]


def small(memory_bytes):
    return replace(H200, memory_bytes=memory_bytes)


def test_a_plan_fits_where_its_total_and_the_margin_do():
    need = plan(Topology(1, 8, "any", 0), data=8).ledger.total_bytes
    assert plan(Topology(1, 8, "any", 0), data=8).ledger.fits is None
    enough = int(need / 0.95) + 2
    assert plan(small(enough), data=8).ledger.fits is True
    assert plan(small(enough - 100), data=8).ledger.fits is False
    assert "verdict: fits" in plan(small(enough), data=8).explain()


def test_auto_is_the_fastest_that_fits_where_seconds_are_known():
    loop = {"data": 8, "remat": "auto"}
    assert plan(H200, **loop).remat == "matmul_outputs"
    assert plan(H200, **loop, layers_per_scan_step="all").remat == "none"


def test_auto_recomputes_no_more_than_it_must():
    total = {p: plan(Topology(1, 8, "any", 0), data=8, remat=p).ledger.total_bytes
             for p in ("none", "matmul_outputs", "full")}  # fmt: skip
    for policy, need in total.items():
        unknown = replace(small(int(need / 0.95) + 2), device_kind="any")
        assert plan(unknown, data=8, remat="auto").remat == policy
    assert plan(small(1), data=8, remat="auto").remat == "full"
    assert plan(Topology(1, 8, "any", 0), data=8, remat="auto").remat == "none"


def way_out(memory_bytes, **parallel):
    found = plan(small(memory_bytes), **parallel)
    assert found.ledger.fits is False
    assert "verdict: does not fit" in found.explain()
    return next(note for note in found.notes if note.startswith("way out"))


def test_a_plan_that_does_not_fit_names_each_key_that_would_make_it_fit():
    need = plan(Topology(1, 8, "any", 0), data=8, rows=64).ledger.total_bytes
    text = way_out(int(need * 0.99), data=8, rows=64)
    assert "parallel.remat=full" in text
    assert "parallel.fsdp=8 parallel.data=1" in text
    assert "; or " in text


def test_keys_that_fit_only_together_are_named_together():
    sharded = plan(Topology(1, 8, "any", 0), fsdp=8, remat="full", rows=64, num_microbatches=8)
    text = way_out(int(sharded.ledger.total_bytes / 0.95) + 2, data=8, rows=64)
    assert "; or " not in text
    assert "parallel.fsdp=8" in text
    assert "parallel.remat=full" in text
    assert "parallel.num_microbatches=8" in text


def test_a_model_that_fits_nowhere_asks_for_devices():
    text = way_out(1000, data=8)
    assert "more devices, or a smaller model" in text
    assert "even with" in text


def test_packed_rows_that_are_known_have_the_places_that_they_need():
    cfg = load(CONFIGS / "dense-100m.yaml")
    table = describe(cfg.model)

    def needs(packed):
        found = make_plan(cfg, Topology.parse("1:h200"), params=table, packed=packed).ledger
        margin = found.of("margin")
        return found.of("activations"), found.of("workspace"), found.total_bytes - margin

    # 2,048 tokens have 16 places unless the text is known to need others.
    assert needs(None) == needs(PackedRows(16, fit=True))
    two, sixteen = (needs(PackedRows(n, fit=True)) for n in (2, 16))
    unfit = needs(PackedRows(16, fit=False))
    # One float32 for each token, head and place in each layer; cuDNN's workspace likewise.
    assert sixteen[0] - two[0] == 14 * 4 * 32 * 2048 * 8 * cfg.model.num_layers
    assert sixteen[1] == 8 * two[1]
    # Rows without places take attention that writes scores out, beside cuDNN's.
    assert unfit[2] > sixteen[2]
    joined = cfg.model_copy(update={"train": cfg.train.model_copy(update={"documents": "joined"})})
    alone = make_plan(joined, Topology.parse("1:h200"), params=table).ledger
    assert alone.of("activations") < two[0]
