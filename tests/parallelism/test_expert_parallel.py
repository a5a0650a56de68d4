"""Experts on several devices give what they give on one, by all_to_all over `expert` alone."""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxfound.config.parallel import AXES
from jaxfound.config.precision import PrecisionConfig
from jaxfound.models import describe
from jaxfound.models.execution import Execution
from jaxfound.models.layers import expert_parallel, expert_tiles
from jaxfound.models.layers.moe import mix_experts
from jaxfound.parallelism import PlanError, make_plan
from jaxfound.parallelism.axes import ShardingRules
from pallas_kernels import deviceless
from tests.models.published import DATA
from tests.models.tiny import EXPERTS as TINY_EXPERTS
from tests.models.tiny import model_config, packed_batch, relative_error, run_config
from tests.parallelism.expert_layer import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    MESHES,
    ROUTINGS,
    ROWS,
    TOKENS,
    WIDTH,
    crossed,
    layer_on,
    lowered,
    operands,
)
from tests.parallelism.layouts import DOCUMENTS, LENGTH, MODELS, on_layout

pytestmark = pytest.mark.multidevice

each_mesh = pytest.mark.parametrize("mesh", MESHES)
# The layer's float32 sums in another order: of channels over `tensor`, of tokens in gradients.
ROUNDING = 1e-6


each_routing = pytest.mark.parametrize("routing", ROUTINGS)


@each_routing
@each_mesh
def test_the_layer_and_its_gradients_are_those_of_one_device(mesh, routing):
    ours, one = layer_on(mesh).results(routing), layer_on("one").results(routing)
    errors = {name: relative_error(ours[name], one[name]) for name in one}
    assert {name: e for name, e in errors.items() if e > ROUNDING} == {}


@pytest.mark.parametrize("routing", ["even", "every token to the same three experts"])
@pytest.mark.parametrize("mesh", ["expert2", "expert8"])
def test_in_fp8_all_rows_of_an_expert_are_rounded_as_on_one_device(mesh, routing):
    """Which tokens share a scale of the kernels' gradients does not depend on who sent them."""
    plain = layer_on("one").results(routing)
    ours, one = (layer_on(name, "fp8").results(routing) for name in (mesh, "one"))
    assert 1e-3 < relative_error(one["mixed"], plain["mixed"]) < 0.1
    errors = {name: relative_error(ours[name], one[name]) for name in one}
    assert {name: e for name, e in errors.items() if e > ROUNDING} == {}
    assert all(relative_error(one[name], plain[name]) < 0.1 for name in one)


@each_mesh
def test_experts_without_tokens_have_gradients_of_zero_on_every_device(mesh):
    results = layer_on(mesh).results("half of the experts get nothing")
    for name in ("gate", "up", "down"):
        assert not results[name][4:].any()
        assert results[name][:4].any(axis=(1, 2)).all()


@each_mesh
def test_only_all_to_all_crosses_expert(mesh):
    """Neither tokens nor kernels are gathered, no gradient of an expert is summed over `expert`."""
    found = crossed(layer_on(mesh).compiled.as_text(), MESHES[mesh])
    # Rows, their experts' numbers, outputs; and the gradients of outputs and of rows.
    assert [kind for kind, axes in found if "expert" in axes] == ["all_to_all"] * 5
    assert {axes for kind, axes in found if kind == "all_to_all"} == {("expert",)}


def test_kernels_are_gathered_over_fsdp_and_their_gradients_reduced_into_shards():
    mesh = "fsdp2_expert2_tensor2"
    found = crossed(layer_on(mesh).compiled.as_text(), MESHES[mesh])
    over_fsdp = sorted(kind for kind, axes in found if "fsdp" in axes)
    assert over_fsdp == ["all_gather"] * 3 + ["reduce_scatter"] * 3


@pytest.mark.parametrize(
    ("mesh", "part"), [("expert2", 2), ("expert8", 8), ("fsdp2_expert2_tensor2", 8)]
)
def test_a_device_holds_its_part_of_the_kernels(mesh, part):
    layer = layer_on(mesh)
    for kernel, place in zip(operands()[2:], layer.places[2:5], strict=True):
        assert np.prod(place.shard_shape(kernel.shape)) * part == kernel.size


def scaled_rows(rows, kernels, tiles, product=None):
    """In place of the experts: the row times 1 + the expert's number, exact in every program.

    `gate` carries the numbers.
    """
    number = kernels[0][tiles.expert_of_tile, 0, 0]
    return rows * jnp.repeat(number, expert_tiles.TILE_ROWS)[:, None]


def numbered_kernels():
    gate = np.broadcast_to(1.0 + np.arange(EXPERTS)[:, None, None], (EXPERTS, WIDTH, HIDDEN))
    return gate.astype(np.float32), *operands()[3:]


# As outside of tests, where a product and a sum may become one operation.
AS_IN_USE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def on_expert_axis(fn, num_devices, *arguments):
    """`fn` run by each device along `expert` on its part of every argument's first dim."""
    mesh = Mesh(jax.devices()[:num_devices], ("expert",), axis_types=(AxisType.Auto,))
    split = jax.sharding.PartitionSpec("expert")
    with jax.set_mesh(mesh):
        run = jax.shard_map(fn, in_specs=split, out_specs=split, check_vma=False)
        placed = jax.device_put(arguments, NamedSharding(mesh, split))
        return jax.tree.map(np.asarray, jax.jit(run, compiler_options=AS_IN_USE)(*placed))


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_device_receives_its_tokens_bit_for_bit_each_once(num_devices):
    here = EXPERTS // num_devices

    def received(x, experts):
        ways = expert_parallel.ways_of(*experts.shape, experts_here=here)
        packed_rows = ways.out.packed_rows
        sent = expert_parallel.plan_of(experts, experts_here=here, packed_rows=packed_rows)
        got = expert_parallel.dispatch(x, sent, ways.out)
        return got.rows[None], got.numbers[None]

    x, experts = operands()[0].reshape(-1, WIDTH), ROUTINGS["even"].astype(np.int32)
    rows, numbers = on_expert_axis(received, num_devices, x, experts)
    senders = np.split(np.arange(len(x)), num_devices)
    for device in range(num_devices):
        owned = experts // here == device
        for sender, tokens in enumerate(senders):
            mine = tokens[owned[tokens].any(axis=1)]
            block, choices = rows[device, sender], numbers[device, sender]
            np.testing.assert_array_equal(block[: len(mine)], x[mine])
            np.testing.assert_array_equal(
                choices[: len(mine)],
                np.where(owned[mine], experts[mine] - device * here + 1, 0),
            )
            assert not block[len(mine) :].any()
            assert not choices[len(mine) :].any()


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_equal_outputs_of_experts_combine_to_equal_bits(num_devices, monkeypatch):
    """Each product is rounded to float32, then added in the router's order, on any layout."""
    for module in (expert_parallel, expert_tiles):
        monkeypatch.setattr(module, "swiglu", scaled_rows)
    x, weights = operands()[:2]
    experts = ROUTINGS["even"].reshape(ROWS, TOKENS, CHOICES).astype(np.int32)
    outputs = x[:, :, None, :] * (1 + experts[..., None]).astype(np.float32)
    products = outputs * weights[..., None]
    expected = (products[:, :, 0] + products[:, :, 1]) + products[:, :, 2]
    arguments = (x, experts, weights, *numbered_kernels())
    mixed = on_expert_axis(mix_experts, num_devices, *arguments)
    np.testing.assert_array_equal(mixed, expected)


def test_tokens_are_exchanged_in_pieces_when_the_worst_case_is_large(monkeypatch):
    """Four pieces of eight tokens on each of two devices; the gradients are those of one piece."""
    x, weights = (a.reshape(-1, a.shape[2]) for a in operands()[:2])
    experts = ROUTINGS["even"].astype(np.int32)

    def on_one(x, weights, experts, *kernels):
        def total(x, *kernels):
            outputs = expert_parallel.outputs_of_choices(x, experts, kernels)
            return (outputs * weights[:, :, None]).sum()

        return jax.grad(total, (0, 1, 2, 3))(x, *kernels)

    arguments = (x, weights, experts, *operands()[2:])
    whole = on_expert_axis(on_one, 2, *arguments)
    # Two devices' tokens with all their choices on one of them.
    monkeypatch.setattr(expert_parallel, "PIECE_BYTES", CHOICES * x.nbytes // 4)
    in_pieces = on_expert_axis(on_one, 2, *arguments)
    for ours, one in zip(in_pieces, whole, strict=True):
        assert relative_error(ours, one) <= ROUNDING


@pytest.mark.parametrize(
    ("room", "pieces"), [(1, 1), (2, 2), (3, 3), (5, 6), (6, 6), (7, 8), (10**6, 24)]
)
def test_pieces_are_equal_and_no_more_than_needed(room, pieces, monkeypatch):
    """24 tokens of 4 bytes, two choices each on one of eight devices, with 1/room of that."""
    monkeypatch.setattr(expert_parallel, "PIECE_BYTES", max(24 * 2 * 8 * 4 // room, 1))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((8,), ("expert",))):
        ways = expert_parallel.ways_of(24, 2, experts_here=4)
        assert expert_parallel.num_pieces(ways, row_bytes=4) == pieces


@cache
def model_on(layout):
    """The whole model; the rows of the last device are padding."""
    name, changes = MODELS["experts"]
    batch = packed_batch([*DOCUMENTS[:12], [], [], [], []], length=LENGTH)
    return on_layout(model_config(name, **changes), LAYOUTS[layout], batch)


LAYOUTS = {
    "one": {},
    "fsdp2_expert2_tensor2": MESHES["fsdp2_expert2_tensor2"],
    "expert8": {"expert": 8},
    "data2_expert4_microbatches2": {"data": 2, "expert": 4, "num_microbatches": 2},
}
each_layout = pytest.mark.parametrize(
    "layout",
    [
        "fsdp2_expert2_tensor2",
        pytest.param("expert8", marks=pytest.mark.slow),
        pytest.param("data2_expert4_microbatches2", marks=pytest.mark.slow),
    ],
)


@each_layout
def test_the_model_with_its_gradients_is_that_of_one_device(layout):
    ours, one = model_on(layout), model_on("one")
    assert ours.loss == pytest.approx(one.loss, rel=1e-5)
    assert ours.norm == pytest.approx(one.norm, rel=1e-5)
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in ours.grads.items()}
    assert {path: e for path, e in errors.items() if e > 1e-5} == {}


@each_layout
def test_an_experts_load_counts_the_tokens_of_all_devices(layout):
    for path, counts in model_on("one").expert_counts.items():
        np.testing.assert_array_equal(model_on(layout).expert_counts[path], counts)


@each_layout
def test_the_models_experts_are_split_and_nothing_is_gathered_over_expert(layout):
    ours, one = model_on(layout), model_on("one")
    assert ours.param_bytes < one.param_bytes
    assert ours.plan.param_bytes == ours.param_bytes
    found = crossed(ours.text, LAYOUTS[layout])
    over_expert = {kind for kind, axes in found if "expert" in axes}
    # Gradients of what is not the experts' are summed over it.
    assert {"all_to_all", "all_reduce"} <= over_expert
    assert "all_gather" not in over_expert


def test_the_gathered_kernels_of_all_layers_are_never_held_at_once():
    """Shards of the two layers' gates are there together, whole over fsdp only one at a time."""
    text = model_on("fsdp2_expert2_tensor2").text
    assert "f32[2,4,16,8]" in text
    assert "f32[2,4,32,8]" not in text


S25 = json.loads((DATA / "S25" / "layouts.json").read_text())
NEAREST = {(8, 3): [2, 4], (6, 4): [3, 6], (2, 4): [2]}


@pytest.mark.parametrize(("num_experts", "degree"), S25["experts_ep"])
def test_experts_that_do_not_divide_are_refused_with_the_nearest_degrees(num_experts, degree):
    moe = {**TINY_EXPERTS, "num_experts": num_experts, "num_groups": 1, "top_groups": 1}
    cfg = run_config(model_config("mla_moe_mtp", moe=moe), rows=degree, parallel={"expert": degree})
    with pytest.raises(PlanError) as refusal:
        make_plan(cfg, degree, params=describe(cfg.model))
    nearest = NEAREST[num_experts, degree]
    assert f"expert={degree} does not divide experts={num_experts}" in str(refusal.value)
    assert f"Nearest expert: {nearest}" in str(refusal.value)


def test_a_model_without_experts_does_not_split_them():
    cfg = run_config(model_config("gqa"), parallel={"expert": 2})
    with pytest.raises(PlanError, match=r"no experts to split.*give its devices to data or fsdp"):
        make_plan(cfg, 2, params=describe(cfg.model))


REASON = deviceless.missing()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_h200s_exchange_raggedly_and_multiply_by_the_grouped_kernel():
    """No device copies a matrix for every tile of rows."""
    width, hidden = 1024, 512
    shapes = [
        jax.ShapeDtypeStruct((8, 1024, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 1024, 4), jnp.float32),
        *(jax.ShapeDtypeStruct((16, width, hidden), jnp.float32),) * 2,
        jax.ShapeDtypeStruct((16, hidden, width), jnp.float32),
        jax.ShapeDtypeStruct((8, 1024, 4), jnp.int32),
    ]
    degrees = MESHES["data2_expert4"]
    rules = ShardingRules(degrees=tuple(degrees.get(axis, 1) for axis in AXES))
    execution = Execution(precision=PrecisionConfig(compute="bfloat16"), rules=rules)
    with deviceless.without_cache():
        devices = deviceless.topology("NVIDIA H200", devices_per_host=8)
        text = lowered(degrees, devices, shapes, execution=execution)[0].compile().as_text()
    found = crossed(text, degrees)
    over_expert = sorted(kind for kind, axes in found if "expert" in axes)
    assert over_expert == ["all_to_all"] + ["ragged_all_to_all"] * 5
    # Three products forward, and two more of each backward.
    assert text.count('custom_call_target="mosaic_gpu') == 9
    stacks = re.findall(rf"\[(\d+),(?:{width},{hidden}|{hidden},{width})\]", text)
    assert max(int(n) for n in stacks) == 4, "the experts of one device"
