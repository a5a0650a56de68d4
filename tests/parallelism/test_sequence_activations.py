"""Activations cut along the sequence over tensor: really cut, on rows that divide or refused."""

import jax
import jax.numpy as jnp
import pytest

from jaxfound.config.parallel import AXES
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import PlanError, build_mesh, make_plan
from jaxfound.parallelism.activations import kept_bytes
from jaxfound.parallelism.legal import layout_of
from jaxfound.resources.topology import Topology
from jaxfound.training.aot import compile_step
from pallas_kernels import deviceless
from tests.models.tiny import jit, model_config, relative_error, run_config, tokens_of, weights_of
from tests.parallelism.layouts import LENGTH, ROWS, documents, on_layout, result_of

REASON = deviceless.missing()
CUT = {"tensor": 2, "activations": "sequence", "remat": "full"}


def plan_of(*, model="gqa", num_devices=2, train=None, **parallel):
    cfg = run_config(model_config(model), parallel=parallel, train=train or {})
    return make_plan(cfg, num_devices, params=describe(cfg.model))


@pytest.mark.multidevice
def test_what_layers_keep_is_cut_and_the_gradients_are_those_of_one_device():
    ours, one = on_layout(model_config("gqa"), CUT, documents()), result_of("dense", "one")
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in ours.grads.items()}
    assert {path: e for path, e in errors.items() if e > 1e-5} == {}
    # Inputs of two layers, kept for the backward pass: a device has half of each row's tokens.
    assert f"f32[2,{ROWS},{LENGTH // 2},32]" in ours.text
    assert f"f32[2,{ROWS},{LENGTH},32]" not in ours.text


@pytest.mark.multidevice
def test_rows_that_tensor_does_not_divide_are_whole_when_a_model_is_called():
    cfg = run_config(model_config("gqa"), parallel={"tensor": 2, "activations": "sequence"})
    plan = make_plan(cfg, 2, params=describe(cfg.model))
    mesh = build_mesh(plan, devices=jax.devices()[:2])
    frame = Frame(cfg.model, execution=execution_of(plan, cfg.precision))
    arrays, tokens = weights_of(frame), jnp.asarray(tokens_of(2, 7))

    def logits(params, buffers):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return frame.bind(params, buffers)(tokens)

    placed = jax.device_put(arrays, frame.shardings(mesh))
    expected = jit(lambda params, buffers: Frame(cfg.model).bind(params, buffers)(tokens))(*arrays)
    assert relative_error(jit(logits)(*placed), expected) < 1e-5


def test_rows_that_do_not_divide_are_refused_with_the_nearest_that_do():
    told = r"train.seq_len=15.* over tensor=2: 15 % 2 = 1. Nearest seq_len: \[14, 16\]"
    with pytest.raises(PlanError, match=told):
        plan_of(tensor=2, activations="sequence", train={"seq_len": 15})
    # Four chunks of 5 tokens: a device of context has 10, which 4 does not divide.
    told = r"the 10 tokens of a row .* over tensor=4: 10 % 4 = 2. Nearest seq_len: \[16, 32\]"
    with pytest.raises(PlanError, match=told):
        plan_of(
            num_devices=8, context=2, tensor=4, activations="sequence", train={"seq_len": 20}
        )  # fmt: skip
    assert plan_of(tensor=2, train={"seq_len": 15}).num_devices == 2


def test_a_plan_says_what_is_cut_and_that_one_device_cuts_nothing():
    text = plan_of(tensor=2, activations="sequence").explain()
    assert "activations: between blocks a device has one of 2 parts of the sequence" in text
    assert "reduce_scatter of activations, partial sums" in text
    alone = plan_of(num_devices=1, activations="sequence")
    assert alone.notes == ("activations=sequence cuts nothing: it is cut over tensor, which is 1",)
    assert plan_of(tensor=2).as_data()["activations"] == "replicated"


def test_a_device_keeps_its_part_of_what_blocks_read():
    def kept(policy, **parallel):
        model = model_config("gqa")
        cfg = run_config(model, parallel={"tensor": 2, "remat": policy, **parallel})
        degrees = dict.fromkeys(AXES, 1) | {"tensor": 2}
        return kept_bytes(layout_of(cfg, degrees, describe(model))[0]).main

    # Of two layers, 8 rows of 16 tokens: half of the input's width; of all that is computed, half
    # of four float32 arrays and two others, which are float32 here too.
    tokens, layers, width = 8 * 16, 2, 32 * 4
    assert kept("full", activations="sequence") == kept("full") // 2 == layers * tokens * width // 2
    assert kept("none") - kept("none", activations="sequence") == layers * tokens * 6 * width // 2


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_an_h200_program_scatters_the_sums_of_blocks_and_needs_less_memory():
    steps = {}
    for activations in ("replicated", "sequence"):
        cfg = run_config(
            model_config("gqa", num_layers=4),
            rows=32,
            length=128,
            # In float32 the gradients of one input's products are added before they are scattered.
            precision={"compute": "bfloat16"},
            parallel={"tensor": 2, "remat": "full", "activations": activations},
        )
        plan = make_plan(cfg, Topology.parse("1x2:h200"), params=describe(cfg.model))
        steps[activations] = compile_step(cfg, plan), plan
    (whole, _), (part, plan) = steps["replicated"], steps["sequence"]
    assert part.memory.temporaries < whole.memory.temporaries
    assert not [e for e in whole.sent if e.collective == "reduce_scatter"]
    scattered = [e for e in part.sent if e.collective == "reduce_scatter"]
    planned = [w for w in plan.wires if w.collective == "reduce_scatter"]
    assert sum(e.step_bytes for e in scattered) == pytest.approx(planned[0].num_bytes, rel=0.1)
