"""Forward passes alone: every stage of every micro-batch once, in order; the loss of one device."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.config import load
from jaxfound.config.parallel import AXES
from jaxfound.parallelism.pipeline.builders import make_schedule
from jaxfound.parallelism.pipeline.forward import forward_table
from jaxfound.training.lattice import MAIN_LAYERS
from jaxfound.training.pipelined import pipelined_nats
from jaxfound.training.trial import Trial

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dense.yaml"
CASES = [
    ("1f1b", 4, 3, 1),
    ("paired_1f1b", 2, 1, 1),
    ("interleaved", 2, 4, 3),
    ("dualpipe", 4, 8, 2),
    ("dualpipev", 3, 6, 2),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_every_input_is_read_from_where_it_arrived(name, ranks, microbatches, chunks):
    schedule = make_schedule(
        name, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks
    )
    table = forward_table(schedule)
    places = {place: stage for stage, place in enumerate(schedule.places[0])}
    waiting, done = {}, set()
    for tick in range(len(table.columns["runs"])):
        at = {key: column[tick] for key, column in table.columns.items()}
        made = {}
        for rank in np.flatnonzero(at["runs"]):
            microbatch, stage = at["microbatch"][rank], places[rank, at["chunk"][rank]]
            assert at["first"][rank] == (stage == 0)
            assert at["last"][rank] == (stage == schedule.num_stages - 1)
            if stage:
                assert waiting[rank, at["slot"][rank]] == (microbatch, stage)
            assert (microbatch, stage) not in done
            done.add((microbatch, stage))
            made[rank] = (microbatch, stage + 1)
        for hop in table.hops:
            for receiver, slot in enumerate(at[f"arrives_{hop}"]):
                waiting[receiver, slot] = made.get((receiver - hop) % ranks)
    assert len(done) == microbatches * schedule.num_stages


def test_a_pipeline_of_single_chunks_takes_a_tick_for_each_micro_batch_and_stage_before():
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    assert len(forward_table(schedule).columns["runs"]) == 8 + 4 - 1


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", [
    {"pipeline": 2, "tensor": 2, "schedule": "paired_1f1b"},
    {"pipeline": 2, "context": 2, "schedule": "dualpipev"},
])  # fmt: skip
def test_evaluation_has_the_loss_of_one_device(layout):
    trial = Trial(
        load(CONFIG, ["parallel.num_microbatches=4"]),
        dict.fromkeys(AXES, 2),
        main_layers=MAIN_LAYERS,
    )
    one = trial.run({"num_microbatches": 1}, jax.devices())
    parallel = {"num_microbatches": 4, "zero_stage": 2, **layout}
    placed = trial.place(parallel, jax.devices())

    def nats(state, batch):
        with jax.sharding.use_abstract_mesh(placed.mesh.abstract_mesh):
            return pipelined_nats(
                state.params, state.buffers, batch, frame=placed.frame, cfg=placed.cfg,
                pipelining=placed.frame.execution.pipelining,
            )  # fmt: skip

    found = float(jax.jit(nats)(placed.state, placed.batch))
    assert found == pytest.approx(one.loss * trial.batch.loss_mask.sum(), rel=1e-6)
