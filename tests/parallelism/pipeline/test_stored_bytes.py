"""What devices of a pipeline store is what the ledger says, byte for byte."""

import math

import jax
import pytest

from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from tests.models.tiny import model_config, run_config

STORED = [
    {"pipeline": 2, "fsdp": 2, "tensor": 2, "schedule": "paired_1f1b"},
    {"pipeline": 4, "data": 2, "schedule": "dualpipe"},
    {"pipeline": 2, "expert": 2, "fsdp": 2, "zero_stage": 1, "schedule": "interleaved"},
]


@pytest.mark.multidevice
@pytest.mark.parametrize("parallel", STORED, ids=lambda p: p["schedule"])
def test_a_device_stores_what_the_ledger_says(parallel):
    model = model_config("mla_moe_mtp", num_layers=4)
    cfg = run_config(model, rows=64, parallel={**parallel, "num_microbatches": 8})
    found = make_plan(cfg, 8, params=describe(model))
    frame = Frame(model, execution=execution_of(found, cfg.precision))
    mesh = build_mesh(found, devices=jax.devices()[:8])
    shapes, places = frame.shapes(), frame.shardings(mesh)

    def held(shapes, places):
        return sum(4 * math.prod(places[p].shard_shape(s.shape)) for p, s in shapes.items())

    assert found.ledger.of("parameters") == held(shapes.params, places.params)
    moments = held(shapes.params, frame.slot_shardings(mesh))
    assert found.ledger.of("optimizer") == 2 * moments + 4
    # Each token is four int32 and a mask; the step and the random state are three words.
    rows = 64 // (8 // parallel["pipeline"] // parallel.get("tensor", 1))
    biases = held(shapes.buffers, places.buffers)
    assert found.ledger.of("inputs") == biases + rows * 16 * 17 + 12
