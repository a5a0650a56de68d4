"""Schedules are timed beside a stage alone, compute one loss, and leave nothing on the devices."""

import gc
import json
from contextlib import nullcontext
from dataclasses import replace

import jax
import pytest

from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.parallelism.pipeline.facts import pipeline_of
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.training import measure_pipeline as measuring
from jaxfound.training.events import TrainingError
from jaxfound.training.measure_pipeline import (
    candidates,
    changed,
    check_first_losses,
    measure_pipeline,
)
from jaxfound.training.pipeline_record import as_record, expected
from tests.training.tiny import MOE, tiny

PIPELINE = ("parallel.pipeline=2", "parallel.num_microbatches=2")
# dualpipe wants two micro-batches a rank.
NAMES = ("paired_1f1b", "dualpipe")


def staged(folder, *overrides, model=None):
    return tiny(folder, *PIPELINE, *overrides, model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A measurement: its config, its rows, and the arrays on the devices before and at each row."""
    cfg = staged(tmp_path_factory.mktemp("pipeline"), "parallel.data=1")
    # Arrays of earlier tests that hang in cycles.
    gc.collect()
    held, rows = [len(jax.live_arrays())], []
    with pytest.MonkeyPatch.context() as patch:
        # How long the compiler takes is no test's business.
        patch.setattr(measuring.deviceless, "without_cache", nullcontext)
        for row in measure_pipeline(cfg, schedules=NAMES, rounds=1):
            rows.append(row)
            held.append(len(jax.live_arrays()))
    return cfg, rows, held


@pytest.mark.multidevice
def test_a_stage_alone_comes_first_and_every_layout_computes_one_loss(run):
    _, rows, _ = run
    names = [row.candidate.name for row in rows]
    assert names == ["alone", *NAMES, "fsdp=2"]
    assert [row.candidate.num_devices for row in rows] == [1, 2, 2, 2]
    assert [row.candidate.cfg.model.num_layers for row in rows] == [1, 2, 2, 2]
    alone, paired, _, fsdp = (row.timed for row in rows)
    assert fsdp.losses == pytest.approx(paired.losses, rel=1e-5)
    assert fsdp.grad_norms == pytest.approx(paired.grad_norms, rel=1e-4)
    # Weights move, so that later losses compare gradients too.
    assert paired.losses[2] < paired.losses[1] < paired.losses[0] != alone.losses[0]


@pytest.mark.multidevice
def test_figures_follow_from_the_rounds_and_the_compiler_agrees_with_the_plan(run):
    _, (alone, paired, *_), _ = run
    (step_ms,) = paired.timed.rounds_ms
    assert paired.efficiency == alone.timed.rounds_ms[0] / step_ms
    assert paired.tokens_per_s == pytest.approx(8 * 16 / (step_ms / 1e3))
    assert alone.bound is alone.expected is None
    # Two ranks and two micro-batches in three ticks of F and B, with remat=none.
    assert paired.bound == pytest.approx(2 / 3)
    arguments, *_ = paired.timed.planned
    assert arguments.compiled == arguments.planned == paired.timed.memory.arguments


@pytest.mark.multidevice
def test_what_a_schedule_refuses_is_a_row_with_the_reason(run):
    _, rows, _ = run
    refused = rows[2]
    assert refused.timed is refused.efficiency is refused.tokens_per_s is None
    assert refused.note.startswith("refused: ")
    assert "num_microbatches=2" in refused.note


@pytest.mark.multidevice
def test_nothing_of_a_layout_is_on_the_devices_when_the_next_begins(run):
    _, _, held = run
    assert held == [held[0]] * len(held)


@pytest.mark.multidevice
def test_a_record_names_what_was_measured_and_how(run):
    cfg, rows, _ = run
    found = as_record(cfg, rows, commit="abc", date="2026-11-30", devices=jax.devices()[:2])
    record = json.loads(json.dumps(found))
    assert (record["format_version"], record["commit"], record["num_devices"]) == (1, "abc", 2)
    assert record["shapes"]["batch_size"] == 8
    alone, paired, refused, *_ = record["rows"]
    assert "step_ms" not in refused
    assert paired["step_ms"]["median"] == paired["rounds_ms"][0]
    assert paired["parallel"]["schedule"] == "paired_1f1b"
    assert alone["parallel"]["pipeline"] == 1
    for figure in ("efficiency", "bound", "expected", "step_ms", "compile_s", "losses", "planned"):
        assert figure in paired
        assert figure in record["explained"]


@pytest.mark.multidevice
def test_memory_that_runs_out_is_a_row_and_lets_go_of_the_state(tmp_path, monkeypatch):
    def out_of_memory(cfg):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nat length")

    monkeypatch.setattr(measuring, "random_tokens", out_of_memory)
    before = len(jax.live_arrays())
    rows = measure_pipeline(staged(tmp_path, "parallel.data=1"), rounds=1)
    assert next(rows).note == "failed: RESOURCE_EXHAUSTED: no room"
    assert len(jax.live_arrays()) == before


def test_without_names_every_schedule_is_timed_and_open_data_takes_what_is_left(tmp_path):
    found = candidates(staged(tmp_path), (), num_devices=8)
    assert [one.name for one in found] == ["alone", *SCHEDULES, "fsdp=2"]
    assert [one.num_devices for one in found] == [4, *[8] * len(SCHEDULES), 8]
    assert {one.cfg.parallel.data for one in found} == {4}
    assert found[-1].cfg.parallel.num_microbatches == 1
    assert found[-1].cfg.parallel.zero_stage == 3


def test_leading_dense_layers_stay_with_the_stage_alone(tmp_path):
    cfg = staged(tmp_path, "model.num_layers=5", model=MOE)
    alone, *_ = candidates(cfg, (), num_devices=2)
    assert (alone.cfg.model.num_layers, alone.cfg.model.num_leading_layers) == (3, 1)


@pytest.mark.parametrize(
    ("overrides", "schedules", "said"),
    [
        (["parallel.pipeline=1"], (), "parallel.pipeline=1 has no stages"),
        (["model.num_layers=3"], (), "Use model.num_layers=4"),
        (["parallel.fsdp=4", "parallel.data=2"], (), "multiply to 16, but there are 8"),
        ([], ("1f1b", "2f2b"), "'2f2b'"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_runs(tmp_path, overrides, schedules, said):
    with pytest.raises(TrainingError, match=said):
        candidates(staged(tmp_path, *overrides), schedules, num_devices=8)


def test_a_stage_alone_that_is_not_legal_is_refused(tmp_path):
    cfg = staged(tmp_path, "parallel.tensor=4")
    with pytest.raises(PlanError):
        next(measure_pipeline(cfg, rounds=1))


@pytest.mark.multidevice
def test_another_first_loss_is_refused_and_a_rounding_is_not(run):
    _, (_, paired, *_, fsdp), _ = run
    first = paired.timed.losses[0]

    def with_loss(loss):
        return replace(fsdp, timed=replace(fsdp.timed, losses=(loss, 0.0, 0.0)))

    check_first_losses(paired, with_loss(first * 1.0009))
    for wrong in (first * 1.0011, first * 0.9989, float("nan")):
        with pytest.raises(TrainingError, match=r"fsdp=2 and .* with paired_1f1b"):
            check_first_losses(paired, with_loss(wrong))


@pytest.mark.parametrize(
    ("name", "remat", "alone", "ticks"),
    [
        # Rank 0 has 16 F one after the other, then both have B in turn, 17 of them.
        ("gpipe", "none", 3 * 16, 16 + 3 * 17),
        ("gpipe", "full", 4 * 16, 16 + 4 * 17),
        # F of rank 0, a B of rank 1, 14 pairs of rank 0, two B.
        ("paired_1f1b", "none", 3 * 16, 1 + 3 + 14 * 4 + 2 * 3),
        ("paired_1f1b", "full", 4 * 16, 1 + 4 + 14 * 5 + 2 * 4),
    ],
)
def test_expected_efficiency_counts_the_passes_that_run(name, remat, alone, ticks):
    pipeline = pipeline_of(Pipelining(name, 2, 16), num_layers=8)
    assert expected(pipeline, remat=remat) == pytest.approx(alone / ticks)


def test_masked_places_cost_what_layers_do():
    even, odd = (pipeline_of(Pipelining("gpipe", 2, 16), num_layers=n) for n in (8, 7))
    assert expected(odd, remat="none") == pytest.approx(7 / 8 * expected(even, remat="none"))


def test_what_nobody_set_stays_unset(tmp_path):
    cfg = changed(staged(tmp_path), {"parallel.schedule": "gpipe"})
    assert cfg.parallel.schedule == "gpipe"
    assert "zero_stage" not in cfg.parallel.model_fields_set
    assert cfg.model == staged(tmp_path).model
