"""The loop: labels, snapshots, bad steps, honest events; driven by fakes (cases S12, S13)."""

from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.data.batch import Batch
from jaxfound.parallelism.layout import PackedRows
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.training.batches import execution_for, most_documents, packed_rows
from jaxfound.training.evaluate import EvalResult
from jaxfound.training.events import NonFiniteError
from jaxfound.training.loop import Parts, fit, never
from jaxfound.training.run import start
from jaxfound.training.state import TrainState
from jaxfound.training.step import StepMetrics
from pallas_kernels.flash_attention.op import MAX_SEGMENTS, default_max_segments
from tests.training.tiny import StopAfter, tiny

LIKE = {
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "params": {"probe": jax.ShapeDtypeStruct((), jnp.float32)},
    "buffers": {},
    "optimizer": (),
    "rng": jax.ShapeDtypeStruct((2,), jnp.uint32),
}


def probe_state():
    """The parameter is minus the number of updates it has seen."""
    return TrainState(
        jnp.zeros((), jnp.int32), {"probe": jnp.zeros(())}, {}, (), jnp.zeros(2, jnp.uint32)
    )


def fake_step(bad=()):
    """A step that subtracts one, but skips the update at the steps in `bad`."""

    @jax.jit
    def compiled(state, ok):
        probe = jnp.where(ok, state.params["probe"] - 1, state.params["probe"])
        return state._replace(step=state.step + 1, params={"probe": probe})

    def step(state, batch):
        done = int(state.step) + 1
        ok = done not in bad
        number = jnp.asarray(1.0 if ok else jnp.nan)
        metrics = StepMetrics(number, number, number, number, number, number, number, jnp.bool_(ok))
        return compiled(state, ok), metrics

    return step


def drive(tmp_path, *overrides, bad=(), stop=never, evaluate=None, demote=None):
    cfg = tiny(tmp_path, "optimizer.warmup_steps=0", *overrides)
    there = RunDirectory(tmp_path / "run")
    batch = Batch(*(np.zeros((1, 2), np.int32) for _ in range(5)))
    saving = cfg.checkpoint
    with CheckpointManager(there.checkpoints, keep=saving.keep, mode=saving.mode) as checkpoints:
        parts = Parts(
            step=fake_step(bad),
            batches=(batch for _ in count()),
            evaluate=evaluate,
            checkpoints=checkpoints,
            host_batch=lambda step: batch._replace(tokens=np.full((1, 2), step)),
        )
        if demote is not None:
            parts = parts._replace(demote=lambda state, step: demote(parts, state, step))
        events, error = [], None
        try:
            for event in fit(cfg, probe_state(), parts, stop=stop, directory=there):
                events.append(event)
        except NonFiniteError as raised:
            error = raised
        checkpoints.wait()
        saved = {s: checkpoints.restore(s, like=LIKE).state for s in checkpoints.steps()}
    return SimpleNamespace(events=events, error=error, saved=saved, there=there)


def test_a_bad_step_without_a_cause_in_fp8_ends_the_run(tmp_path):
    asked = []

    def demote(parts, state, step):
        asked.append(step)

    run = drive(tmp_path, "train.non_finite=demote", bad={3}, demote=demote)
    assert asked == [3]
    assert run.error.step == 3
    assert [e.step for e in run.events if e.kind == "demoted"] == []
    assert sorted(run.saved) == [4]


def test_the_step_that_takes_over_is_used_from_the_next_batch_on(tmp_path):
    def demote(parts, state, step):
        return parts._replace(step=fake_step(), demoted=("layers.1.*",), demote=None)

    run = drive(tmp_path, "train.non_finite=demote", bad=range(3, 99), demote=demote)
    assert run.error is None
    # Step 4 was in flight when the numbers of step 3 came.
    assert [e.step for e in run.events if e.kind == "non_finite"] == [3, 4]
    assert [e.step for e in run.events if e.kind == "demoted"] == [4]
    assert run.saved[20]["params"]["probe"] == -(20 - 2)


def test_label_state_and_number_of_updates_agree_in_every_checkpoint(tmp_path):
    found = drive(tmp_path, "train.steps=5", "checkpoint.every=2")
    assert sorted(found.saved) == [2, 4, 5]
    for step, state in found.saved.items():
        assert float(state["params"]["probe"]) == -step
        assert int(state["step"]) == step


def test_the_final_state_is_saved_once_when_it_falls_on_a_checkpoint(tmp_path):
    found = drive(tmp_path, "train.steps=4", "checkpoint.every=2")
    assert [e.step for e in found.events if e.kind == "checkpoint"] == [2, 4]


def test_a_stop_saves_the_step_that_was_running_and_says_who_asked(tmp_path):
    found = drive(tmp_path, "train.steps=9", stop=StopAfter(3))
    assert sorted(found.saved) == [3]
    assert found.events[-1].kind == "stopped"
    assert found.events[-1].values == {"signal": "TEST", "steps": 9}


def test_every_step_is_told_once_and_in_order(tmp_path):
    found = drive(tmp_path, "train.steps=7", "checkpoint.every=3")
    assert [e.step for e in found.events if e.kind == "step"] == list(range(1, 8))


def test_records_are_kept_every_so_many_steps_and_at_the_end(tmp_path):
    found = drive(tmp_path, "train.steps=7", "train.log_every=3")
    assert [e.step for e in found.events if e.kind == "train"] == [3, 6, 7]


def test_evaluation_comes_every_so_many_steps_and_at_the_end(tmp_path):
    found = drive(
        tmp_path,
        "train.steps=7",
        "train.eval_every=3",
        evaluate=lambda state: EvalResult(float(-state.params["probe"]), 10),
    )
    evals = [(e.step, e.values["eval_loss"]) for e in found.events if e.kind == "eval"]
    assert evals == [(3, 3.0), (6, 6.0), (7, 7.0)]


def test_a_bad_step_stops_the_run_with_its_batch_and_the_state_saved(tmp_path):
    found = drive(tmp_path, "train.steps=9", bad={4})
    assert found.error is not None
    assert "step 4" in str(found.error)
    with np.load(found.there.bad_batches / "step-4.npz") as batch:
        assert (batch["tokens"] == 3).all()
    (step,) = found.saved
    # One more step was on its way; the bad one changed nothing.
    assert step == 5
    assert float(found.saved[step]["params"]["probe"]) == -4


def test_a_bad_step_is_skipped_when_that_is_asked_for(tmp_path):
    found = drive(tmp_path, "train.steps=9", "train.non_finite=skip", bad={4, 6})
    assert found.error is None
    assert [e.step for e in found.events if e.kind == "non_finite"] == [4, 6]
    assert float(found.saved[9]["params"]["probe"]) == -7


def test_too_many_bad_steps_in_a_row_end_the_run_also_when_skipping(tmp_path):
    rules = ("train.steps=20", "train.non_finite=skip", "train.max_skipped=3")
    assert drive(tmp_path / "a", *rules, bad={4, 5, 7, 8}).error is None
    found = drive(tmp_path / "b", *rules, bad={4, 5, 6})
    assert found.error is not None
    assert "3 in a row" in str(found.error)


def test_a_bad_last_step_is_noticed(tmp_path):
    found = drive(tmp_path, "train.steps=5", bad={5})
    assert found.error is not None
    assert sorted(found.saved) == [5]


@pytest.mark.parametrize("key", ["loss", "learning_rate", "tokens_per_s", "step_time_s", "eta_s"])
def test_a_record_has_what_a_reader_looks_for(tmp_path, key):
    found = drive(tmp_path, "train.steps=3")
    assert all(key in e.values for e in found.events if e.kind == "train")


def test_rows_of_more_documents_than_attention_has_places_for_are_said(tmp_path, caplog):
    run = start(tiny(tmp_path))
    places = MAX_SEGMENTS
    caplog.clear()
    assert execution_for(run.plan, run.cfg, most_pieces=places).documents == "checked"
    assert not caplog.records
    assert execution_for(run.plan, run.cfg, most_pieces=places + 1).documents == "runs"
    (said,) = caplog.records
    assert said.getMessage() == "attention.too_many_documents"
    assert (said.in_a_row, said.places) == (places + 1, places)


def test_a_run_vouches_for_its_own_rows_and_knows_the_fullest(tmp_path):
    run = start(tiny(tmp_path))
    rows = np.asarray(run.prepared.train.segment_ids)
    assert run.prepared.train.most_pieces == rows.max()
    assert run.frame.execution.documents == "checked"
    places = most_documents(run.cfg, most_pieces=int(rows.max()))
    assert run.frame.execution.most_documents == places
    assert packed_rows(run.cfg, most_pieces=places) == PackedRows(places, fit=True)
    # More than a row this short has by the kernel's default.
    assert packed_rows(run.cfg, most_pieces=MAX_SEGMENTS) == PackedRows(MAX_SEGMENTS, fit=True)
    fit = packed_rows(run.cfg, most_pieces=MAX_SEGMENTS + 1)
    assert fit == PackedRows(default_max_segments(run.cfg.train.seq_len), fit=False)
    joined = start(tiny(tmp_path, "train.documents=joined", "runs_dir=" + str(tmp_path / "other")))
    assert joined.frame.execution.documents == "joined"
    assert joined.frame.execution.most_documents is None
    assert packed_rows(joined.cfg, most_pieces=1) is None
