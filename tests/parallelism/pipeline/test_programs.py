"""Programs of pipelines: as long for 64 micro-batches as for 8, a tick for each of the table."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.communication.program import Operation
from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.pipeline.pipelining import schedule_of
from jaxfound.parallelism.pipeline.ticks import place_ticks, tick_table
from jaxfound.training.aot import abstract_step, memory_of
from jaxfound.training.compiled_traffic import tick_shares
from jaxfound.training.lattice import MAIN_LAYERS
from jaxfound.training.objective import token_counts
from jaxfound.training.step import gradients
from jaxfound.training.trial import FAST_TO_COMPILE, Trial
from tests.models.tiny import model_config, run_config

pytestmark = pytest.mark.multidevice
CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dense.yaml"
RANKS = {"pipeline": 2, "zero_stage": 2}


def placed_for(pieces, **parallel):
    keys = [f"parallel.num_microbatches={pieces}", f"train.batch_size={pieces}"]
    cfg = load(CONFIG, keys)
    trial = Trial(cfg, dict.fromkeys(AXES, 1) | {"pipeline": 2}, main_layers=MAIN_LAYERS)
    rows = trial.cfg.train.model_copy(update={"batch_size": pieces})
    trial.cfg = trial.cfg.model_copy(update={"train": rows})
    trial.batch = jax.tree.map(lambda a: np.resize(a, (pieces, *a.shape[1:])), trial.batch)
    return trial.place(RANKS | {"num_microbatches": pieces} | parallel, jax.devices())


def step_of(placed):
    def step(state, batch):
        with jax.sharding.use_abstract_mesh(placed.mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=0)
            return gradients(state, batch, frame=placed.frame, cfg=placed.cfg, counts=counts)

    return partial(step, placed.state, placed.batch)


@pytest.mark.parametrize("schedule", ["paired_1f1b", "dualpipe"])
def test_a_program_is_as_long_for_64_micro_batches_as_for_8(schedule):
    lengths = {}
    for pieces in (8, 64):
        step = step_of(placed_for(pieces, schedule=schedule))
        lengths[pieces] = jax.jit(step).lower().as_text().count("\n")
    assert lengths[8] == lengths[64]


def memory_of_gradients(layers_of_a_stage):
    """Temporary bytes of a step's gradients, and the bytes of a layer's.

    Layers are computed again: what they would keep of their rows grows with their number.
    """
    model = model_config("gqa", num_layers=2 * layers_of_a_stage, ffn_dim=2048)
    parallel = {"pipeline": 2, "num_microbatches": 4, "remat": "full"}
    cfg = run_config(model, rows=4, parallel=parallel)
    table = describe(model)
    found = make_plan(cfg, 2, params=table)
    mesh = build_mesh(found, devices=jax.devices()[:2])
    _, state, batch = abstract_step(cfg, found, mesh)
    frame = Frame(model, execution=execution_of(found, cfg.precision))

    def step(state, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            counts = token_counts(batch, num_depths=0)
            return gradients(state, batch, frame=frame, cfg=cfg, counts=counts)

    compiled = jax.jit(step).lower(state, batch).compile(FAST_TO_COMPILE["cpu"])
    layers = sum(4 * s.size for s in table if s.path.startswith("layers."))
    return memory_of(compiled).temporaries, layers // model.num_layers


@pytest.mark.slow
def test_no_more_room_is_taken_beside_the_sums_for_six_layers_a_stage_than_for_two():
    (few, of_a_layer), (many, _) = memory_of_gradients(2), memory_of_gradients(6)
    assert many - few < of_a_layer


@pytest.mark.parametrize("schedule", ["gpipe", "paired_1f1b", "zero_bubble", "dualpipev"])
def test_the_step_scans_over_the_ticks_of_the_simulator(schedule):
    placed = placed_for(6, schedule=schedule)
    pipelining = placed.frame.execution.pipelining
    lengths = [eqn.params["length"] for eqn in equations(jax.make_jaxpr(step_of(placed))().jaxpr)]
    assert len(place_ticks(schedule_of(pipelining))) in lengths


def equations(jaxpr):
    """Every scan of a program, those in its inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def conditional(num_branches):
    names = ", ".join(f"%branch.{i}" for i in range(num_branches))
    return Operation("c", "conditional", "f32[]", (), f"branch_computations={{{names}}}")


def test_the_branches_of_a_tick_have_the_ticks_of_their_kind_and_no_others_do():
    plan = placed_for(4, schedule="zero_bubble").plan
    table = tick_table(plan.schedule)
    shares = tick_shares(conditional(len(table.kinds)), plan=plan)
    assert sum(shares) == pytest.approx(1.0)
    # Every rank does F but the last, and I and W once for each of four micro-batches.
    runs = dict(zip(table.kinds, shares, strict=True))
    assert runs["I"] == runs["W"] == 4 / table.num_ticks
    assert runs["F"] == 4 / table.num_ticks / 2
    assert tick_shares(conditional(2), plan=plan) is None
    flat = placed_for(4, pipeline=1).plan
    assert tick_shares(conditional(len(table.kinds)), plan=flat) is None
