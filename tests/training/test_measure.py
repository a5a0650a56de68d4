"""The measurement of a run says what it measured."""

import json
import math

import jax
import numpy as np
import pytest

from jaxfound.training.compile_time import Compiles
from jaxfound.training.measure import (
    NUM_BATCHES,
    RATE,
    Asked,
    Measured,
    fresh_batches,
    measure_training,
    measured_config,
)
from jaxfound.training.run import start
from jaxfound.training.step_profile import KINDS_OF_WORK, PARTS
from tests.training.tiny import tiny

ASKED = Asked(steps=3, rounds=2, loop_rounds=1, profiled=2, ceiling=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    cfg = tiny(tmp_path_factory.mktemp("measure"), "parallel.num_microbatches=2")
    return measure_training(cfg, ASKED, devices=jax.devices()[:1])


def test_a_measurement_names_its_rounds_and_agrees_with_itself(measured):
    assert measured.tokens_per_step == 8 * 16
    assert len(measured.step_alone_s) == len(measured.ceiling_flops) - 1 == 2
    assert measured.tokens_per_s == pytest.approx(128 / np.median(measured.step_alone_s))
    assert {"jax", "python"} <= measured.versions.keys()
    (loop,), (share,) = measured.loop, measured.outside_shares
    assert share == measured.outside_share == 1 - measured.step_alone_s[0] / loop.step_s
    assert 0 <= loop.data_share < 1


def test_what_cannot_be_known_here_is_not_said(measured):
    assert measured.checked.peak_bytes == 0
    assert measured.checked.seconds_beside == ()
    assert measured.checked.forecast.refused.startswith("no peak is on record for cpu")
    assert measured.checked.memory.arguments == measured.checked.forecast.argument_bytes
    # One of the two is in the cache of programs by now, whatever it held before.
    assert measured.compiles.cached_s is not None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(9.0, False), (1.0, True)], (9.0, 1.0)),
        # Mosaic's kernels are numbered, so the second program of a process is another one.
        ([(9.0, False), (8.0, False)], (9.0, None)),
        ([(2.0, True), (8.0, False)], (None, 2.0)),
    ],
)
def test_what_the_cache_had_is_what_a_restart_takes(found, expected):
    assert Compiles.of(*found) == expected


def test_a_breakdown_has_every_part_and_both_sums_are_the_step(measured):
    found = measured.breakdown
    assert set(found.parts) == set(PARTS)
    assert set(found.kinds) == set(KINDS_OF_WORK)
    for seconds in (found.parts, found.kinds):
        assert sum(seconds.values()) == pytest.approx(found.step_s)
    assert found.kinds["products"] > 0
    assert found.parts["accumulation"] > 0


def test_a_measurement_is_read_back_as_it_was(measured):
    assert Measured.from_data(json.loads(json.dumps(measured.as_data()))) == measured


def test_rows_are_fresh_and_nothing_is_learnt_from_them(measured, tmp_path):
    cfg = measured_config(tiny(tmp_path), ASKED, folder=tmp_path)
    assert cfg.optimizer.learning_rate == RATE
    assert cfg.optimizer.warmup_steps == 0
    batches = fresh_batches(start(cfg, devices=jax.devices()[:1]))
    assert len({np.asarray(b.tokens).tobytes() for b in batches}) == NUM_BATCHES
    first = batches[0]
    assert np.array_equal(np.asarray(first.tokens)[:, 1:], np.asarray(first.targets)[:, :-1])
    # Ids of the whole vocabulary: about a third of them in so few draws.
    assert len(np.unique(np.asarray(first.tokens))) > cfg.model.vocab_size // 4
    assert measured.loss == pytest.approx(math.log(259), rel=0.05)
