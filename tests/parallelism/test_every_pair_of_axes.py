"""Every pair of axes and every ZeRO stage together at least once, each against one device.

Faults hide between two axes that are right alone. Four layouts of three axes hold all ten pairs
of the five axes; a stream that is cut along the sequence meets experts, context and ZeRO.
"""

from functools import cache
from itertools import combinations
from pathlib import Path

import jax
import pytest

from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.training.trial import Trial
from jaxfound.training.verify import findings

pytestmark = pytest.mark.multidevice

CONFIGS = Path(__file__).parent.parent.parent / "configs"
# Latent attention, experts and prediction of further tokens.
EXPERTS = [
    {"data": 2, "fsdp": 2, "expert": 2, "zero_stage": 1},
    {"data": 2, "context": 2, "tensor": 2, "num_microbatches": 1},
    {"fsdp": 2, "expert": 2, "context": 2, "zero_stage": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2, "zero_stage": 3, "activations": "sequence"},
]
DENSE = [
    {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 0},
    {"fsdp": 2, "context": 2, "tensor": 2, "zero_stage": 2, "activations": "sequence"},
]
# What stands beside these in `make test`: data and context in test_context_parallel.py, data and
# experts in a layer of test_expert_parallel.py, experts and context with stages in
# pipeline/test_pipelines_equal_one_device.py; every other pair in the layouts below them.
ELSEWHERE = EXPERTS[:3]
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.slow] if layout in ELSEWHERE else [])
    for name, layouts in (("tiny-mla-moe", EXPERTS), ("tiny-dense", DENSE))
    for layout in layouts
]
SPLIT = [axis for axis in AXES if axis != "pipeline"]


@cache
def trial_of(name):
    # Dense layers before those with experts are one more block to compile, and dense the other.
    # Masks of dropout are the same wherever they are drawn.
    keys = ["model.num_dense_layers=0", "model.dropout=0.1"] if name == "tiny-mla-moe" else []
    cfg = load(CONFIGS / f"{name}.yaml", ["parallel.num_microbatches=2", *keys])
    # Small sizes that every layout here divides, so that one device runs once for all.
    trial = Trial(cfg, {axis: 1 if axis == "pipeline" else 2 for axis in AXES})
    return trial, trial.run({}, jax.devices())


def test_the_layouts_hold_every_pair_of_axes_and_every_stage():
    pairs = {pair for one in EXPERTS for pair in combinations([a for a in SPLIT if a in one], 2)}
    assert pairs == set(combinations(SPLIT, 2))
    cut = [one for one in EXPERTS + DENSE if one.get("activations") == "sequence"]
    assert {axis for one in cut for axis in one if axis in AXES} == set(SPLIT) - {"data"}
    assert {one["zero_stage"] for one in EXPERTS + DENSE if "zero_stage" in one} == {0, 1, 2, 3}


@pytest.mark.parametrize(("name", "parallel"), CASES)
def test_a_layout_is_equal_to_one_device_and_really_parallel(name, parallel):
    trial, one = trial_of(name)
    found = list(findings(trial, parallel, jax.devices(), one=one))
    assert [finding for finding in found if not finding.holds] == []
    axes = [axis for axis in SPLIT if axis in parallel]
    assert sum("is real" in finding.question for finding in found) == len(axes)
