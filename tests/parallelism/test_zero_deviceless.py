"""What ZeRO sends, read from the real train step compiled for four H200s that are not there.

bfloat16 compute: a gradient is summed in float32 and rounded afterwards, and only a cut before the
rounding makes sum and cut one reduce_scatter.
"""

import math
import re
from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.parallel import AXES
from jaxfound.data.batch import Batch
from jaxfound.models import describe
from jaxfound.training.optimizer import make_schedule
from jaxfound.training.state import abstract_train_state
from jaxfound.training.step import batch_sharding, make_train_step
from pallas_kernels import deviceless
from tests.parallelism.layouts import LENGTH
from tests.parallelism.zero_stages import ROWS, laid_out, model_of

REASON = deviceless.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SLOW = pytest.mark.slow
# Nothing here is timed, and these two are half of the compile time.
CHEAP = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# Micro-batches of each stage. At stage 1 their sums are whole, and so are most of the reductions.
PIECES = {0: 2, 1: 1, 2: 2, 3: 2}
TYPE = re.compile(r"(bf16|f32|s32|pred)\[([\d,]+)\]")


class Sent(NamedTuple):
    """One array of one collective over fsdp.

    Attributes:
        kind: of the collective.
        dtype: in which it crosses.
        size: its elements where it is whole: after an all_gather, before a reduce_scatter.
    """

    kind: str
    dtype: str
    size: int


@cache
def sent(model, stage):
    """Every array that crosses fsdp in a step, on four devices that share what the stage says."""
    cfg, plan, mesh, frame, tx = laid_out(
        model,
        {"fsdp": 4, "zero_stage": stage, "num_microbatches": PIECES[stage]},
        devices=lambda n: deviceless.topology("NVIDIA H200", devices_per_host=n),
        precision={"compute": "bfloat16"},
    )
    step = make_train_step(cfg, frame, tx, schedule=make_schedule(cfg), mesh=mesh)
    rows = partial(
        jax.ShapeDtypeStruct, (ROWS[model], LENGTH), sharding=batch_sharding(frame, mesh)
    )
    batch = Batch(*(rows(jnp.int32) for _ in range(4)), rows(jnp.bool_))
    with deviceless.without_cache():
        lowered = step.lower(abstract_train_state(frame, tx, mesh=mesh), batch)
        text = lowered.compile(CHEAP).as_text()
    over_wires = [c for c in collectives(text) if not c.is_local]
    sizes = dict(zip(AXES, plan.degrees, strict=True))
    assert {axes_crossed(c, sizes) for c in over_wires} == {("fsdp",)}
    return [array for c in over_wires for array in arrays_of(c)]


def arrays_of(collective):
    """A collective carries several arrays; one that is started lists operands, then results."""
    found = [(t, math.prod(map(int, s.split(",")))) for t, s in TYPE.findall(collective.shape)]
    if collective.shape.startswith("(("):
        half = len(found) // 2
        pairs = zip(found[:half], found[half:], strict=True)
        return [Sent(collective.kind, a[0], max(a[1], b[1])) for a, b in pairs]
    scattered = 4 if collective.kind == "reduce_scatter" else 1
    return [Sent(collective.kind, t, n * scattered) for t, n in found]


def of_layer(spec):
    """Elements of one layer's part of a stack, or of an array that is no stack."""
    return spec.size // (spec.shape[0] if spec.dims[0] == "layers" else 1)


def cut(model):
    """The parameters that fsdp cuts."""
    return [s for s in describe(model_of(model)) if {"embed", "latent"} & set(s.dims)]


def of_kind(model, stage, kind):
    return [array for array in sent(model, stage) if array.kind == kind]


@SLOW
def test_at_stage_0_gradients_are_summed_whole_and_nothing_else_is_sent():
    assert {array.kind for array in sent("dense", 0)} == {"all_reduce"}
    assert max(array.size for array in sent("dense", 0)) >= max(map(of_layer, cut("dense")))


CASES = [
    ("dense", 1),
    pytest.param("dense", 2, marks=SLOW),
    pytest.param("dense", 3, marks=SLOW),
    pytest.param("experts", 3, marks=SLOW),
]
each_case = pytest.mark.parametrize(("model", "stage"), CASES)


@each_case
def test_from_stage_1_on_every_gradient_arrives_by_reduce_scatter(model, stage):
    scattered = of_kind(model, stage, "reduce_scatter")
    assert {array.size for array in scattered} == set(map(of_layer, cut(model)))
    # Norms, counts and the loss: what no device has a part of.
    whole = sum(s.size for s in describe(model_of(model)) if not s.is_matrix)
    assert sum(array.size for array in of_kind(model, stage, "all_reduce")) <= whole + 100


@each_case
def test_products_gradients_are_summed_in_float32(model, stage):
    """Those of experts are sums in the format of compute already."""
    rounded = {a.size for a in of_kind(model, stage, "reduce_scatter") if a.dtype != "f32"}
    table = [s for s in cut(model) if ".experts." in s.path]
    assert rounded <= set(map(of_layer, table))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=SLOW)])
def test_whole_parameters_are_gathered_once_a_step_in_float32(stage):
    gathered = of_kind("dense", stage, "all_gather")
    assert sorted(a.size for a in gathered) == sorted(s.size for s in cut("dense"))
    assert {a.dtype for a in gathered} == {"f32"}


@pytest.mark.parametrize("model", ["dense", pytest.param("experts", marks=SLOW)])
def test_at_stage_3_weights_are_gathered_in_the_format_of_compute_and_activations_are_not(model):
    gathered = of_kind(model, 3, "all_gather")
    assert {a.size for a in gathered} == set(map(of_layer, cut(model)))
    # The router's product is in float32, so its weights cross unrounded.
    routers = {of_layer(s) for s in cut(model) if ".router." in s.path}
    assert {a.size for a in gathered if a.dtype != "bf16"} <= routers
    # Once forward and once backward: kept between, all layers would be whole at once.
    numbers = Counter(a.size for a in gathered)
    stacks = [s for s in cut(model) if s.dims[0] == "layers"]
    for size, count in Counter(map(of_layer, stacks)).items():
        assert numbers[size] >= 2 * count
