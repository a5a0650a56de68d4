"""Which dim of which array fsdp cuts at each ZeRO stage, decided from names and sizes alone."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxfound.config import PRESETS
from jaxfound.config.model import ModelConfig
from jaxfound.config.parallel import AXES
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.precision import PrecisionConfig
from jaxfound.models import describe
from jaxfound.models.execution import Execution
from jaxfound.models.layers.embedding import TABLE, picked_rows
from jaxfound.parallelism import ParallelPlan, ShardingRules, build_mesh, make_plan, zero
from tests.models.tiny import model_config, run_config

FFN, OUT = ("layers", "embed", "ffn"), ("layers", "heads", "head_dim", "embed")
QUERY = ("layers", "embed", "heads", "head_dim")
FFN_SIZE = (48, 7168, 18432)


def rules_of(stage=3, *, unsplit=(), **degrees):
    sizes = tuple(degrees.get(axis, 1) for axis in AXES)
    return ShardingRules(unsplit=unsplit, zero_stage=stage, degrees=sizes)


@pytest.mark.parametrize(
    ("stage", "param", "grad", "slot"),
    [(0, "", "", ""), (1, "", "", "fsdp"), (2, "", "fsdp", "fsdp"), (3, "fsdp", "fsdp", "fsdp")],
)
def test_a_stage_cuts_moments_then_gradients_then_parameters(stage, param, grad, slot):
    rules = rules_of(stage, fsdp=4, tensor=2)
    for spec, cut in ((rules.param_spec, param), (rules.grad_spec, grad), (rules.slot_spec, slot)):
        assert spec(FFN, FFN_SIZE) == P("pipeline", cut or None, "tensor")
    assert rules.gathered_spec(FFN) == P("pipeline", None, "tensor")


# Dims, sizes, degrees → where fsdp cuts a parameter, and a moment.
CUTS = {
    "embed": (FFN, FFN_SIZE, {"fsdp": 4}, 1, 1),
    "the latent without embed": (
        ("layers", "latent", "heads", "head_dim"),
        (48, 512, 96, 96),
        {"fsdp": 4},
        1,
        1,
    ),
    "the latent that divides": (("embed", "latent"), (100, 48), {"fsdp": 3}, 1, 1),
    "the largest other dim": (FFN, FFN_SIZE, {"fsdp": 3}, 2, 2),
    "the largest of two": (OUT, (48, 48, 192, 7168), {"fsdp": 3}, 2, 2),
    "the first of equals": (OUT, (48, 96, 96, 7168), {"fsdp": 3}, 1, 1),
    "a free dim before a larger one that is cut": (
        QUERY,
        (48, 7168, 96, 48),
        {"fsdp": 3, "tensor": 2},
        3,
        3,
    ),
    "a cut dim when only that divides": (FFN, FFN_SIZE, {"fsdp": 3, "tensor": 2}, 2, 2),
    "a cut dim only with both": (FFN, (50, 7168, 18434), {"fsdp": 2, "tensor": 2}, 1, 1),
    "layers, of moments alone": (QUERY, (48, 7168, 56, 128), {"fsdp": 3}, None, 0),
    "layers of a stage": (QUERY, (48, 7168, 56, 128), {"fsdp": 3, "pipeline": 4}, None, 0),
    "layers that do not divide": (QUERY, (50, 7168, 56, 128), {"fsdp": 3}, None, None),
    "nothing": (("vocab", "embed"), (129280, 7168), {"fsdp": 3}, None, None),
    "never a dim without a name": (
        ("layers", "embed", None),
        (4, 7168, 9),
        {"fsdp": 3},
        None,
        None,
    ),
    "never a norm": (("layers", None), (48, 7168), {"fsdp": 4}, None, None),
}


@pytest.mark.parametrize(("dims", "shape", "degrees", "param", "slot"), CUTS.values(), ids=CUTS)
def test_where_a_dim_does_not_divide_another_is_cut(dims, shape, degrees, param, slot):
    rules = rules_of(3, **degrees)
    for axes, expected in (
        (rules.param_axes(dims, shape), param),
        (rules.grad_axes(dims, shape), slot),
        (rules.slot_axes(dims, shape), slot),
    ):
        assert [i for i, a in enumerate(axes) if "fsdp" in a] == (
            [] if expected is None else [expected]
        )
        used = rules.used_axes(dims)
        assert [tuple(a for a in cut if a != "fsdp") for cut in axes] == list(used)


def test_fsdp_cuts_what_tensor_left_so_that_a_gather_gives_tensors_part():
    rules = rules_of(3, fsdp=3, tensor=2)
    assert rules.param_spec(FFN, FFN_SIZE) == P("pipeline", None, ("tensor", "fsdp"))


def test_a_dim_that_stays_whole_is_not_cut_over_fsdp_either():
    dims, shape = ("embed", "kv_heads", "head_dim"), (7168, 3, 128)
    assert rules_of(3, fsdp=3).fsdp_dim(dims, shape, layers=False) == 1
    assert rules_of(3, fsdp=3, unsplit=("kv_heads",)).fsdp_dim(dims, shape, layers=False) is None


def test_without_sizes_the_dim_that_asks_is_cut():
    assert rules_of(3, fsdp=3).param_spec(("vocab", "embed")) == P("tensor", "fsdp")


STORED, WHOLE = P("fsdp", "tensor"), P(None, "tensor")


def pins_of(stage, used):
    """Where what `used` makes of a weight and its gradient is pinned, and in which format."""
    plan = ParallelPlan(degrees=(1, 1, 4, 1, 1, 2))
    mesh, rules = build_mesh(plan), rules_of(stage, fsdp=4, tensor=2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(jax.grad(partial(used, rules)))(jnp.ones((8, 4)))
    # What is not differentiated is a call of its own.
    inner = [getattr(e.params.get("call_jaxpr"), "eqns", [e]) for e in jaxpr.eqns]
    found = [e for part in inner for e in part if e.primitive.name == "sharding_constraint"]
    return [(e.params["sharding"].spec, e.outvars[0].aval.dtype.name) for e in found]


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("stage", "pins"),
    [
        (3, [STORED, WHOLE, STORED]),
        (2, [WHOLE, WHOLE, STORED]),
        (1, [WHOLE, WHOLE]),
    ],
)
def test_a_weight_is_pinned_in_its_format_of_use_and_its_gradient_where_it_is_summed(stage, pins):
    used = lambda rules, w: rules.gather(w.astype(jnp.bfloat16), "embed", "ffn").sum()
    assert pins_of(stage, used) == [(pin, "bfloat16") for pin in pins]


@pytest.mark.multidevice
def test_the_gradient_of_picked_rows_is_summed_whole_in_float32_and_then_cut():
    def used(rules, table):
        in_bfloat16 = PrecisionConfig(compute="bfloat16")
        run = Execution(precision=in_bfloat16, rules=rules)
        return picked_rows(table, jnp.zeros((2, 3), jnp.int32), run).sum()

    rules = rules_of(3, fsdp=4, tensor=2)
    stored, whole = rules.param_spec(TABLE, (8, 4)), rules.gathered_spec(TABLE)
    assert stored != whole
    assert pins_of(3, used) == [
        (stored, "bfloat16"), (whole, "bfloat16"), (whole, "float32"), (stored, "float32"),
    ]  # fmt: skip


DEGREES = [
    {"fsdp": f, "tensor": t, "pipeline": p} for f in (2, 3, 6, 8) for t in (1, 2) for p in (1, 2)
]


@cache
def table_of(preset):
    return describe(ModelConfig.model_validate(PRESETS[preset], strict=False))


def kept(spec, rules):
    """Elements on one device of parameter, gradient and moment; each cut must divide."""
    for axes in (rules.param_axes, rules.grad_axes, rules.slot_axes):
        found = axes(spec.dims, spec.shape)
        pieces = [rules.pieces(a) for a in found]
        assert all(n % p == 0 for n, p in zip(spec.shape, pieces, strict=True)), spec
        assert sum("fsdp" in a for a in found) <= 1, spec
        yield spec.size // math.prod(pieces)


@pytest.mark.parametrize("preset", ["50b", "deepseek-v3"])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_cut_divides_and_a_later_stage_keeps_less(preset, degrees):
    # That 61 layers are no two stages is the plan's to say.
    whole = {"layers"} if preset == "deepseek-v3" else set()
    totals = []
    for stage in (0, 1, 2, 3):
        rules = rules_of(stage, unsplit=tuple(whole), **degrees)
        totals.append(sum(sum(kept(spec, rules)) for spec in table_of(preset)))
    assert totals[0] > totals[1] > totals[2] >= totals[3]
    # 3 divides neither 7168 nor a head, so no parameter of the 50b; its moments go by layers.
    assert totals[2] > totals[3] or (preset == "50b" and degrees["fsdp"] % 3 == 0)


def test_the_plan_says_what_is_cut_elsewhere_and_what_stays_whole():
    """Three hosts as fsdp: 7168 channels and 56 heads do not divide, 48 layers do."""
    table = ParamTable(
        (
            ParamSpec("embedding.table", (129280, 7168), "float32", ("vocab", "embed")),
            ParamSpec("layers.mixer.query.kernel", (48, 7168, 56, 128), "float32", QUERY),
            ParamSpec("layers.ffn.gate.kernel", FFN_SIZE, "float32", FFN),
            ParamSpec("layers.ffn_norm.scale", (48, 7168), "float32", ("layers", None)),
        )
    )
    rules = rules_of(3, fsdp=3, tensor=2)
    assert zero.notes(table, rules) == [
        "parameters: fsdp=3 divides neither embed nor latent of some and cuts 1 along ffn",
        "parameters: fsdp=3 divides no dim of 2, which stay whole on every device, 6,785,859,584 "
        "bytes in float32: embedding.table, layers.mixer.query.kernel. With a "
        "model.vocab_multiple that 6 divides, ids are cut",
        "gradients, moments: fsdp=3 divides neither embed nor latent of some and cuts 1 along ffn, "
        "1 along layers",
        "gradients, moments: fsdp=3 divides no dim of 1, which stay whole on every device, "
        "1,853,358,080 bytes in float32: embedding.table. With a model.vocab_multiple that 6 "
        "divides, ids are cut",
    ]
    assert zero.notes(table, rules_of(3, fsdp=4, tensor=2)) == []
    assert zero.notes(table, rules_of(0, fsdp=3)) == []
    assert [note.partition(":")[0] for note in zero.notes(table, rules_of(1, fsdp=3))] == [
        "moments"
    ] * 2


def test_a_plan_over_devices_that_divide_nothing_is_made_and_says_so():
    cfg = run_config(model_config("gqa"), rows=9, parallel={"fsdp": 3})
    plan = make_plan(cfg, 3, params=describe(cfg.model))
    (elsewhere, whole) = [note for note in plan.notes if "fsdp=3" in note]
    assert "cuts 3 along ffn" in elsewhere
    assert "stay whole on every device" in whole
    assert elsewhere in plan.explain()


@pytest.mark.parametrize(
    ("stage", "parallel", "said"),
    [(2, {"data": 8}, True), (1, {"data": 8}, True), (3, {"data": 8}, False), (2, {}, False)],
)
def test_a_stage_that_was_asked_for_and_cuts_nothing_is_told_the_way(stage, parallel, said):
    cfg = run_config(model_config("gqa"), parallel={**parallel, "zero_stage": stage})
    plan = make_plan(cfg, parallel.get("data", 1), params=describe(cfg.model))
    way = f"zero_stage={stage} cuts nothing: state is shared over fsdp, and parallel.fsdp=1. "
    found = [note for note in plan.notes if note.startswith(way)]
    assert bool(found) == said
    if said:
        assert "parallel.fsdp=8 with parallel.data=1" in found[0]
