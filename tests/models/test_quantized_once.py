"""Weights in fp8 are quantised once a step, whatever the micro-batches and the recomputation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxfound.config.parallel import AXES
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models.build import Frame, describe
from jaxfound.models.execution import Execution
from jaxfound.parallelism.legal import layout_of
from jaxfound.parallelism.weights import quantized_bytes
from jaxfound.training import step as training_step
from jaxfound.training.objective import token_counts
from jaxfound.training.state import TrainState
from jaxfound.training.step import gradients
from tests.models.tiny import jit, model_config, on_device, packed_batch, run_config, weights_of

LAYERS = 3
# Two operations, of which one is in fp8 in some layers only.
RULES = (
    PrecisionRule(pattern="layers.ffn.up", format="fp8"),
    PrecisionRule(pattern="layers.1-2.mixer.out", format="fp8"),
)
EXECUTION = Execution(precision=PrecisionConfig(compute="float32", rules=RULES), remat="full")
BATCH = on_device(packed_batch([[16], [9, 7]], length=16))


def case(execution=EXECUTION, *, pieces=2, model="gqa"):
    """Gradients as a function of parameters, and parameters."""
    parallel = {"num_microbatches": pieces}
    cfg = run_config(model_config(model, num_layers=LAYERS), rows=2, parallel=parallel)
    frame = Frame(cfg.model, execution=execution)
    params, buffers = weights_of(frame)
    counts = token_counts(BATCH, num_depths=0)

    def of(params):
        zero, rng = jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32)
        state = TrainState(zero, params, buffers, (), rng)
        return gradients(state, BATCH, frame=frame, cfg=cfg, counts=counts)[0]

    return of, params


def quantisations(program, loops=()):
    """Shapes of what becomes 8-bit, each with the lengths of the loops it is in."""
    found = []
    for eqn in program.eqns:
        to = eqn.params.get("new_dtype")
        if eqn.primitive.name == "convert_element_type" and to == jnp.float8_e4m3fn:
            found.append((eqn.outvars[0].aval.shape, loops))
        inside = (*loops, eqn.params["length"]) if eqn.primitive.name == "scan" else loops
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(value):
                found += quantisations(getattr(value, "jaxpr", value), inside)
    return found


def is_program(value):
    return isinstance(value, Jaxpr | ClosedJaxpr)


def of_weights(**changes):
    of, params = case(**changes)
    found = quantisations(jax.make_jaxpr(of)(params).jaxpr)
    # Kernels of 32 x 48 and 32 x 32 are padded to one square of 128 x 128 each.
    return [(shape[:-4], loops) for shape, loops in found if shape[-4:] == (1, 128, 1, 128)]


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_weight_is_quantised_once_before_all_loops(pieces):
    assert of_weights(pieces=pieces) == [((LAYERS,), ())] * 2


def test_where_fsdp_cuts_parameters_each_is_quantised_behind_its_gather():
    """Of two micro-batches, and again where the backward pass recomputes."""
    degrees = (1, 1, 2, 1, 1, 1)
    rules = replace(EXECUTION.rules, degrees=degrees)
    found = of_weights(execution=replace(EXECUTION, rules=rules))
    assert found
    assert all(loops[0] == 2 for _, loops in found)


# A stack of two layers with experts, of which one has them in fp8.
OF_EXPERTS = replace(
    EXECUTION,
    precision=PrecisionConfig(
        compute="float32", rules=(PrecisionRule(pattern="layers.2.ffn.experts", format="fp8"),)
    ),
)


def test_experts_are_quantised_once_before_all_loops():
    # Kernels of 8 experts, each padded to one square.
    found = of_weights(execution=OF_EXPERTS, model="mla_moe_yarn")
    assert found == [((LAYERS - 1, 8), ())] * 3


@pytest.mark.parametrize(
    ("execution", "model"),
    [
        pytest.param(EXECUTION, "gqa", id="gqa"),
        pytest.param(OF_EXPERTS, "mla_moe_yarn", id="moe", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_weights_that_are_quantised_in_every_use(
    execution, model, monkeypatch
):
    of, params = case(execution, model=model)
    once = jit(of)(params)
    monkeypatch.setattr(training_step, "quantized_once", lambda frame, params: {})
    again = jit(case(execution, model=model)[0])(params)
    for path, grad in once.items():
        np.testing.assert_allclose(grad, again[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(("pieces", "copies"), [(1, 1), (2, 2)])
def test_the_plan_counts_a_byte_a_weight_and_their_transposes_where_they_stay(pieces, copies):
    rules = [{"pattern": "layers.ffn.*", "format": "fp8"}]
    cfg = run_config(
        model_config("gqa", num_layers=LAYERS),
        rows=2,
        parallel={"num_microbatches": pieces},
        precision={"compute": "bfloat16", "rules": rules},
    )
    layout, _ = layout_of(cfg, dict.fromkeys(AXES, 1), describe(cfg.model))
    weights = 3 * LAYERS * cfg.model.embed_dim * cfg.model.ffn_dim
    assert quantized_bytes(layout) == copies * weights
