"""The state of a run on disk and on the mesh, whatever the ZeRO stage and the devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.training.state import TrainState, abstract_train_state, state_shardings
from tests.models.tiny import weights_of
from tests.parallelism.zero_stages import STAGES, laid_out

pytestmark = pytest.mark.multidevice

# A run that moves: shared by four, then by two that keep parameters whole, then alone, then by
# three, which divide neither 32 channels nor a latent of 16.
JOURNEY = (
    {"fsdp": 4, "zero_stage": 3},
    {"fsdp": 2, "zero_stage": 1},
    {},
    {"fsdp": 3, "zero_stage": 2},
    {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3},
)


def placed(parallel, *, rows=12):
    *_, mesh, frame, tx = laid_out("experts", parallel, rows=rows)
    return mesh, frame, tx


def made_up(frame, tx):
    """A state with no two arrays alike, made without compiling."""
    params, buffers = weights_of(frame)
    rng = np.random.default_rng(8)
    moments = jax.tree.map(
        lambda s: rng.normal(0, 1, s.shape).astype(s.dtype), jax.eval_shape(tx.init, params)
    )
    return TrainState(np.int32(7), params, buffers, moments, np.array([1, 2], np.uint32))


def test_a_run_goes_on_bit_equal_at_another_stage_and_on_other_devices(tmp_path):
    mesh, frame, tx = placed(JOURNEY[0])
    expected = made_up(frame, tx)
    state = jax.device_put(expected, state_shardings(frame, tx, mesh=mesh))
    for leg, parallel in enumerate(JOURNEY[1:]):
        with CheckpointManager(tmp_path / str(leg), keep=1, mode="sync") as checkpoints:
            checkpoints.save(7, state._asdict(), {})
            mesh, frame, tx = placed(parallel)
            like = abstract_train_state(frame, tx, mesh=mesh)
            found = checkpoints.restore_latest(like=like._asdict())
        state = TrainState(**found.state)
        for array, same, place in zip(*map(jax.tree.leaves, (state, expected, like)), strict=True):
            np.testing.assert_array_equal(array, same)
            assert array.sharding.is_equivalent_to(place.sharding, array.ndim)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_cut_from_stage_1_on_and_parameters_at_stage_3(name, stage):
    parallel = {"fsdp": 4, "zero_stage": stage}
    *_, mesh, frame, tx = laid_out("experts", parallel, optimizer={"name": name})
    places = state_shardings(frame, tx, mesh=mesh)
    path = "layers.ffn.experts.gate"
    assert places.params[path].spec == P(
        "pipeline", "expert", "fsdp" if stage == 3 else None, "tensor"
    )
    leaves = jax.tree_util.tree_leaves_with_path(places.optimizer)
    moments = [s.spec for keys, s in leaves if getattr(keys[-1], "key", None) == path]
    cut = "fsdp" if stage else None
    assert moments == [P("pipeline", "expert", cut, "tensor")] * (2 if name == "adamw" else 1)
