"""A run that starts from another run's weights has them at step 0, and nothing else of it."""

import jax
import numpy as np
import pytest

from jaxfound.models.build import Frame
from jaxfound.resources.checkpoint import CheckpointError
from jaxfound.training import start
from jaxfound.training.run import first_state
from tests.models.tiny import weights_of
from tests.training.tiny import DENSE, run, tiny
from tests.training.written import save_run

# A router's bias among the weights, and little to compile.
EXPERTS = {**DENSE, "num_layers": 1, "ffn": "moe", "moe": {"num_experts": 4, "top_k": 2}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run that holds weights nobody would draw."""
    cfg = tiny(tmp_path_factory.mktemp("source"), model=EXPERTS)
    arrays = weights_of(Frame(cfg.model))
    save_run(cfg, arrays)
    return cfg, arrays


def beginning(source, folder, *overrides, model=EXPERTS):
    """A run that starts from the source's weights, on the source's data."""
    cfg, _ = source
    place = (f"train.init_from={cfg.runs_dir}/tiny", f"data.prepared_dir={cfg.data.prepared_dir}")
    return tiny(folder, *place, *overrides, model=model)


def test_step_zero_has_the_weights_and_fresh_optimizer_state(source, tmp_path):
    cfg = beginning(source, tmp_path, "seed=5")
    state = first_state(start(cfg, devices=jax.devices()[:1]))
    _, saved = source
    for found, right in ((state.params, saved.params), (state.buffers, saved.buffers)):
        assert found.keys() == right.keys()
        assert all(np.array_equal(found[path], right[path]) for path in found)
    assert any(np.asarray(bias).any() for bias in state.buffers.values())
    assert int(state.step) == 0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.optimizer))


@pytest.mark.slow
def test_a_run_trains_on_from_them_and_resumes_from_its_own(source, tmp_path):
    short = ("train.steps=2", "optimizer.warmup_steps=0", "train.eval_batches=0")
    cfg = beginning(source, tmp_path, *short)
    run(cfg, stop_after=1)
    events = run(cfg)
    assert [e.step for e in events if e.kind == "resume"] == [1]


def test_a_place_without_weights_and_another_model_are_refused(source, tmp_path):
    nowhere = beginning(source, tmp_path, f"train.init_from={tmp_path}/nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        first_state(start(nowhere, devices=jax.devices()[:1]))
    other = beginning(source, tmp_path, model={**EXPERTS, "ffn_dim": 48, "ffn": "dense"})
    with pytest.raises(CheckpointError, match=r"shape|missing|not in"):
        first_state(start(other, devices=jax.devices()[:1]))
