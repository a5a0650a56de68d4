"""A run that starts from another run's weights has them at step 0, and nothing else of it."""

import jax
import numpy as np
import pytest

from jaxfound.resources.checkpoint import CheckpointError
from jaxfound.training import start
from jaxfound.training.run import first_state
from tests.training.tiny import DENSE, MOE, run, state_at, tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    cfg = tiny(
        tmp_path_factory.mktemp("source"), "train.steps=2", "optimizer.warmup_steps=0", model=MOE
    )
    run(cfg)
    return cfg


def weights_of(state):
    found = {"params": state.params, "buffers": state.buffers}
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_step_zero_has_the_weights_and_fresh_optimizer_state(source, tmp_path):
    place = f"train.init_from={source.runs_dir}/tiny"
    cfg = tiny(
        tmp_path, place, "seed=5", f"data.prepared_dir={source.data.prepared_dir}", model=MOE
    )
    state = first_state(start(cfg, devices=jax.devices()[:1]))
    saved = state_at(source, 2)
    found = weights_of(state)
    assert found
    assert all(np.array_equal(found[name], saved[name]) for name in found)
    assert int(state.step) == 0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.optimizer))


def test_a_run_trains_on_from_them_and_resumes_from_its_own(source, tmp_path):
    place = f"train.init_from={source.runs_dir}/tiny"
    options = (
        place,
        "train.steps=2",
        "optimizer.warmup_steps=0",
        f"data.prepared_dir={source.data.prepared_dir}",
    )
    cfg = tiny(tmp_path, *options, model=MOE)
    run(cfg, stop_after=1)
    events = run(cfg)
    assert [e.step for e in events if e.kind == "resume"] == [1]


def test_a_place_without_weights_and_another_model_are_refused(source, tmp_path):
    data = f"data.prepared_dir={source.data.prepared_dir}"
    nowhere = tiny(tmp_path, f"train.init_from={tmp_path}/nowhere", data, model=MOE)
    with pytest.raises(CheckpointError, match="nowhere"):
        first_state(start(nowhere, devices=jax.devices()[:1]))
    other = tiny(tmp_path, f"train.init_from={source.runs_dir}/tiny", data, model=DENSE)
    with pytest.raises(CheckpointError, match=r"shape|missing|not in"):
        first_state(start(other, devices=jax.devices()[:1]))
