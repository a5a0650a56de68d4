"""Every schedule, with every other axis at least once, against one device.

Stages are short, micro-batches fewer than stages, embeddings tied, experts and predictions of
further tokens split: each in some layout here, each schedule in one at least.
"""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.training.lattice import MAIN_LAYERS
from jaxfound.training.trial import Trial
from jaxfound.training.verify import findings

pytestmark = pytest.mark.multidevice

CONFIGS = Path(__file__).parents[3] / "configs"
# The residual stream cut along the sequence.
CUT = {"tensor": 2, "activations": "sequence"}
# Latent attention, one dense layer before those with experts, prediction of further tokens.
EXPERTS = [
    {"pipeline": 2, "data": 2, "tensor": 2, "schedule": "paired_1f1b", "num_microbatches": 2},
    {"pipeline": 2, "expert": 2, "context": 2, "schedule": "zero_bubble"},
    {"pipeline": 2, "expert": 2, "schedule": "paired_1f1b"} | CUT,
    {"pipeline": 2, "fsdp": 2, "context": 2, "schedule": "dualpipe", "zero_stage": 2},
    {"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipev"},
    {"pipeline": 2, "expert": 2, "tensor": 2, "schedule": "dualpipe"},
]
DENSE = [
    {"pipeline": 4, "tensor": 2, "schedule": "gpipe", "num_microbatches": 2},
    {"pipeline": 2, "fsdp": 2, "context": 2, "schedule": "1f1b", "zero_stage": 1},
    {"pipeline": 2, "data": 2, "schedule": "interleaved"} | CUT,
    {"pipeline": 4, "fsdp": 2, "schedule": "paired_1f1b", "zero_stage": 0, "num_microbatches": 1},
    {"pipeline": 2, "fsdp": 2, "schedule": "dualpipe"},
    {"pipeline": 2, "schedule": "dualpipev"} | CUT,
]
# The largest programs here; three axes that virtual CPU devices do not always get through
# (`training.run.check_virtual`) are among them.
SLOW = [layout for layout in EXPERTS if layout["schedule"] != "zero_bubble"]
ALSO = {"num_microbatches": 4, "zero_stage": 2}
CASES = [
    pytest.param(
        name,
        ALSO | layout,
        id="-".join([name, layout["schedule"], *(axis for axis in AXES if axis in layout)]),
        marks=[pytest.mark.slow] if layout in SLOW else [],
    )
    for name, layouts in (("tiny-mla-moe", EXPERTS), ("tiny-dense", DENSE))
    for layout in layouts
]


# In every schedule F, B, I and W of a micro-batch have one mask, and one device has the same.
KEYS = {"tiny-mla-moe": [], "tiny-dense": ["model.tie_embeddings=true", "model.dropout=0.1"]}


@cache
def trial_of(name):
    keys = ["parallel.num_microbatches=4", *KEYS[name]]
    cfg = load(CONFIGS / f"{name}.yaml", keys)
    trial = Trial(cfg, dict.fromkeys(AXES, 2), main_layers=MAIN_LAYERS)
    return trial, trial.run({"num_microbatches": 1}, jax.devices())


def test_the_layouts_that_are_not_slow_hold_every_schedule_and_every_axis():
    layouts = [one for one in EXPERTS + DENSE if one not in SLOW]
    assert {one["schedule"] for one in layouts} == set(SCHEDULES)
    assert {axis for one in layouts for axis in one if axis in AXES} == set(AXES)


@pytest.mark.parametrize(("name", "parallel"), CASES)
def test_a_pipeline_is_equal_to_one_device_and_really_parallel(name, parallel):
    trial, one = trial_of(name)
    found = list(findings(trial, parallel, jax.devices(), one=one))
    assert [finding for finding in found if not finding.holds] == []
    split = [axis for axis in AXES if axis in parallel]
    assert sum("is real" in finding.question for finding in found) == len(split)


def test_both_copies_of_a_bidirectional_schedule_stay_equal():
    trial, one = trial_of("tiny-dense")
    parallel = ALSO | {"pipeline": 2, "schedule": "dualpipe"}
    placed = trial.place(parallel, jax.devices())
    moved = trial.move(parallel, jax.devices(), grads=one.grads, natural=False)
    table = placed.frame.stages.table().reshape(-1)
    for path, array in moved.items():
        if path.startswith("layers."):
            for layer in range(MAIN_LAYERS):
                first, second = np.flatnonzero(table == layer)
                np.testing.assert_array_equal(array[first], array[second])
