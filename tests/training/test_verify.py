"""Verification of a layout: small models divide as the large ones do, faults have names."""

import math
from pathlib import Path

import numpy as np
import pytest

from jaxfound.communication import Collective
from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.models import describe
from jaxfound.parallelism.axes import ShardingRules
from jaxfound.training.shrink import shrunk, small_degrees, smaller
from jaxfound.training.trial import Trial
from jaxfound.training.verify import (
    EXACT,
    ROUNDED,
    axis_is_real,
    differing_leaves,
    limits_of,
    moved_share,
    relative_error,
    scattering,
    scatters_on_gpu,
    verify,
)
from pallas_kernels import deviceless

CONFIGS = Path(__file__).parent.parent.parent / "configs"
NAMES = ("llama3-8b", "deepseek-v2-lite", "deepseek-v3", "50b", "tiny-dense", "tiny-mla-moe")
REASON = deviceless.missing()
LAYOUTS = (
    {"tensor": 2, "fsdp": 2},
    {"tensor": 8},
    {"fsdp": 3, "tensor": 2},
    {"expert": 4, "context": 2},
)


def degrees(**some):
    return {axis: some.get(axis, 1) for axis in AXES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_is_cut_along_the_dims_that_the_large_one_is_cut_along(name, layout):
    cfg, asked = load(CONFIGS / f"{name}.yaml"), degrees(**layout)
    small = shrunk(cfg, asked)
    rules = ShardingRules(degrees=tuple(asked.values()))
    large = {spec.path: spec for spec in describe(cfg.model)}
    for spec in describe(small.model):
        # A stack of leading layers and a further depth may be fewer, none is of another kind.
        twin = large[spec.path]
        assert spec.dims == twin.dims
        assert rules.param_axes(spec.dims, spec.shape) == rules.param_axes(twin.dims, twin.shape)
        assert spec.size <= 64**3
    assert {spec.path for spec in describe(small.model)} == {
        path for path in large if not path.startswith("mtp.") or path.startswith("mtp.0.")
    }


def test_sizes_divide_just_where_they_did():
    assert smaller(7168, 32, degrees=[2, 4]) == 32
    assert smaller(7168, 32, degrees=[3]) == 32
    assert smaller(576, 32, degrees=[3]) == 33
    assert smaller(129_280, 61, degrees=[8]) == 64
    assert smaller(16, 32, degrees=[3]) == 16


def test_a_cluster_too_large_for_a_laptop_keeps_its_axes():
    asked = degrees(data=3, fsdp=8, tensor=8)
    assert small_degrees(asked, most=16) == degrees(data=3, fsdp=2, tensor=2)
    assert small_degrees(degrees(fsdp=4, tensor=4), most=16) == degrees(fsdp=4, tensor=4)


@pytest.mark.slow
@pytest.mark.multidevice
def test_a_run_as_it_is_holds_in_bfloat16():
    """Its own sizes and formats; XLA's compiler for CPUs added up bfloat16 in shards, and lived."""
    changes = ["model.num_layers=2", "model.mtp_depth=0", "train.seq_len=32", "train.batch_size=4"]
    cfg = load(CONFIGS / "tiny-mla-moe.yaml", [*changes, "precision.compute=bfloat16"])
    found = list(verify(cfg, degrees(fsdp=2, expert=2), whole=True))
    assert [one.question for one in found if not one.holds] == []
    by_name = {one.question: one.detail for one in found}
    assert {"loss", "every gradient", "tokens of every expert", "state of a device"} < set(by_name)
    # Of bfloat16's own rounding, and none of float32's.
    assert 1e-4 < float(by_name["every gradient"].split()[-1]) < 0.1


def test_limits_are_those_of_a_run_s_formats():
    float32 = load(CONFIGS / "tiny-dense.yaml", ["precision.compute=float32"])
    assert limits_of(float32) == EXACT
    assert limits_of(load(CONFIGS / "tiny-dense.yaml", ["precision.compute=bfloat16"])) == ROUNDED
    rules = ['precision.rules=[{pattern: "layers.*", format: fp8}]']
    in_fp8 = load(CONFIGS / "tiny-dense.yaml", ["precision.compute=float32", *rules])
    assert limits_of(in_fp8) == ROUNDED


def test_choices_that_moved_are_counted_once():
    assert moved_share(np.array([3, 1, 4]), np.array([4, 0, 4])) == 1 / 8
    assert moved_share(np.zeros(2), np.zeros(2)) == 0


def test_zeros_and_nan_are_compared_exactly():
    zeros, ones = np.zeros(3), np.ones(3)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(ones, zeros) == math.inf
    found = {"a": ones, "b": ones * np.nan, "c": ones}
    assert differing_leaves(found, {"a": ones, "b": ones, "c": ones * 1.001}) == ["b", "c"]


def collective(kind, shape="f32[4,8]{1,0}"):
    return Collective(kind, shape, ((0, 1),))


@pytest.mark.parametrize(
    ("axis", "found", "holds"),
    [
        ("expert", ["all_to_all"], True),
        ("expert", ["all_reduce", "all_gather"], False),
        ("tensor", ["all_reduce"], True),
        ("tensor", ["all_reduce", "all_gather"], False),
        ("context", ["all_gather", "reduce_scatter"], True),
        ("context", ["all_gather"], False),
        ("fsdp", ["all_reduce"], False),
        ("fsdp", ["all_reduce", "all_gather"], True),
        ("data", [], False),
    ],
)
def test_an_axis_without_its_collectives_or_with_one_that_undoes_it_is_not_real(axis, found, holds):
    crossings = [(collective(kind), (axis,)) for kind in found]
    finding = axis_is_real(axis, crossings, degree=2, zero_stage=3, matrix_sizes={32})
    assert finding.holds is holds


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("axis", "key", "scatters"),
    [
        pytest.param("fsdp", "zero_stage=0", False, marks=pytest.mark.slow),
        ("fsdp", "zero_stage=2", True),
        pytest.param("tensor", "activations=replicated", False, marks=pytest.mark.slow),
        pytest.param("tensor", "activations=sequence", True, marks=pytest.mark.slow),
    ],
)
def test_what_is_to_be_scattered_is_looked_for_in_the_program_for_h200s(axis, key, scatters):
    cfg = load(CONFIGS / "tiny-dense.yaml", [f"parallel.{key}"])
    (found,) = scatters_on_gpu(Trial(cfg, degrees(**{axis: 2})), [axis])
    assert found.holds is scatters, found.detail
    assert "all_reduce" in found.detail


def test_a_step_is_to_scatter_what_zero_cuts_and_what_the_sequence_cuts():
    both = ["parallel.zero_stage=2", "parallel.activations=sequence"]
    cfg = load(CONFIGS / "tiny-dense.yaml", both)
    assert scattering(cfg, degrees(fsdp=2, tensor=2)) == ["fsdp", "tensor"]
    assert scattering(cfg, degrees(tensor=2)) == ["tensor"]
    assert scattering(load(CONFIGS / "tiny-dense.yaml"), degrees(tensor=2)) == []


def test_tensor_may_gather_tokens_and_no_matrix():
    sizes = {"degree": 2, "zero_stage": 3, "matrix_sizes": {32}}

    def holds(shape, lengths):
        gathered = collective("all_gather", shape)
        crossings = [(collective("all_reduce"), ("tensor",)), (gathered, ("tensor",))]
        return axis_is_real("tensor", crossings, **sizes, lengths=lengths).holds

    assert holds("f32[2,4,4]{2,1,0}", {4})
    assert not holds("f32[2,4,4]{2,1,0}", {8})
    # Of two dims it is a matrix, whatever its sizes.
    assert not holds("f32[4,8]{1,0}", {4})
