"""How layers are walked and what is recomputed changes no result; depth changes no program."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jaxfound.config.parallel import ParallelConfig
from jaxfound.models import Execution, describe
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.remat import POLICIES, rematerialize
from jaxfound.training.optimizer import make_optimizer, make_schedule
from jaxfound.training.state import abstract_train_state
from jaxfound.training.step import make_train_step
from tests.models.tiny import (
    FAST_TO_COMPILE,
    jit,
    model_config,
    on_device,
    packed_batch,
    relative_error,
    run_config,
    tokens_of,
    weights_of,
)

# Of layers with experts: 2 does not divide them.
LAYERS = 3
# float32 roundings of sums that the compiler orders differently: about 1e-7 an operation.
ROUNDING = 3e-6


def logits_and_gradients(execution):
    frame = Frame(
        model_config("mla_moe_yarn", num_layers=LAYERS, num_dense_layers=0), execution=execution
    )
    params, buffers = weights_of(frame)
    tokens = jnp.asarray(tokens_of(2, 8))

    @jit
    def of(params):
        def objective(params):
            logits = frame.bind(params, buffers)(tokens)
            return jnp.sin(logits[..., :61]).mean(), logits

        return jax.grad(objective, has_aux=True)(params)

    grads, logits = of(params)
    return logits, grads


@pytest.fixture(scope="module")
def scanned():
    return logits_and_gradients(Execution())


@pytest.mark.parametrize(
    "execution",
    [
        Execution(layers_per_scan_step=2, remat="full"),
        Execution(layers_per_scan_step=0, remat="matmul_outputs"),
        # One at a time; 3 is between 2 and all.
        *(
            pytest.param(execution, marks=pytest.mark.slow)
            for execution in (
                Execution(layers_per_scan_step=2),
                Execution(layers_per_scan_step=3),
                Execution(layers_per_scan_step=0),
                Execution(remat="matmul_outputs"),
                Execution(remat="full"),
            )
        ),
    ],
    ids=lambda e: f"{e.layers_per_scan_step} layers a step, remat {e.remat}",
)
def test_scan_and_remat_change_no_result(scanned, execution):
    logits, grads = logits_and_gradients(execution)
    assert relative_error(logits[..., :61], scanned[0][..., :61]) <= ROUNDING
    worst = {path: relative_error(grad, scanned[1][path]) for path, grad in grads.items()}
    assert {path: error for path, error in worst.items() if error > ROUNDING} == {}


def test_remat_policies_are_the_words_of_the_config():
    words = ParallelConfig.model_fields["remat"].annotation.__args__
    # The plan replaces `auto` by one of the others.
    assert set(words) == {*POLICIES, "auto"}


def test_full_remat_keeps_nothing_of_the_forward_pass():
    def sines(x):
        return jnp.sin(jnp.sin(jnp.sin(x))).sum()

    def sines_in_backward(policy):
        fn = rematerialize(sines, policy, in_loop=False, drops_moves=True)
        text = str(jax.make_jaxpr(jax.grad(fn))(1.0))
        return text.count("= sin ")

    assert sines_in_backward("none") == 3
    # The forward pass and again what the backward pass needs.
    assert sines_in_backward("full") > 3


@cache
def step_program(name, num_layers):
    """The training step with the default scan, lowered."""
    cfg = run_config(model_config(name, num_layers=num_layers, mtp_depth=0), rows=2)
    table = describe(cfg.model)
    frame, tx = Frame(cfg.model), make_optimizer(cfg.optimizer, table)
    mesh = build_mesh(make_plan(cfg, 1, params=table), devices=jax.devices()[:1])
    step = make_train_step(cfg, frame, tx, schedule=make_schedule(cfg), mesh=mesh)
    batch = on_device(packed_batch([[16], [9, 7]], length=16))
    return step.lower(abstract_train_state(frame, tx, mesh=mesh), batch)


# The first layer of the model with experts is dense and outside the scan.
SHALLOW = {"gqa": 2, "mla_moe_mtp": 3}


@pytest.mark.parametrize("name", SHALLOW)
def test_the_step_of_twelve_layers_is_the_program_of_a_shallow_one(name):
    """Only sizes differ, so tracing takes no longer with depth."""
    few, many = step_program(name, SHALLOW[name]), step_program(name, 12)
    short, long = (lowered.as_text().splitlines() for lowered in (few, many))
    assert len(short) == len(long)


@pytest.mark.parametrize("name", ["gqa", pytest.param("mla_moe_mtp", marks=pytest.mark.slow)])
def test_the_compiled_step_of_twelve_layers_is_as_long_as_a_shallow_one(name):
    few, many = step_program(name, SHALLOW[name]), step_program(name, 12)
    short, long = (count_instructions(lowered.compile(FAST_TO_COMPILE)) for lowered in (few, many))
    assert abs(short - long) <= 0.01 * short


def count_instructions(compiled):
    return sum(" = " in line for line in compiled.as_text().splitlines())
