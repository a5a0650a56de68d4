"""Faults that are planted are named, with what to change; a sound step has none."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfound.parallelism.memory import adam_slots
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.training import measure
from jaxfound.training.batches import batch_like
from jaxfound.training.measure import Asked, measure_training, measured_config, time_loop
from jaxfound.training.product_formats import Products, flops_of, products_in
from jaxfound.training.run import start, train_step_of
from jaxfound.training.state import abstract_train_state, create_train_state
from jaxfound.training.step import batch_sharding
from jaxfound.training.step_profile import PARTS
from jaxfound.training.step_verdict import JUDGES, Facts, Subject, facts_of, verdicts
from tests.training.tiny import DENSE, tiny

PROFILES = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "step_profiles.json").read_text("utf-8")
)
NARROW = (Products("bfloat16", ((8, 4), (4, 8)), "layers/linear.py:66", 1000),)
# Of a clock that only these two move.
STEP_S, LATE_S = 2.0, 1.0
ASKED = Asked(steps=6, rounds=1, loop_rounds=1)


def facts(**changes):
    values = {"outside_share": 0.0, "data_share": 0.0, "parts": PROFILES["sound"],
              "products": NARROW,
              "matrices": {}, "compute": "bfloat16", "tokens": 2048, "num_microbatches": 1,
              "fewer_microbatches": 0, "remat": "none", "weaker_remat": ""}  # fmt: skip
    return Facts(**{**values, **changes})


def named(**changes):
    return [one.fault for one in verdicts(facts(**changes))]


def test_a_sound_step_has_no_fault():
    assert named() == []
    assert set(PROFILES["sound"]) == set(PARTS)


def test_small_micro_batches_show_in_what_each_of_them_repeats():
    parts = PROFILES["small micro-batch"]
    assert named(parts=parts) == ["small micro-batch"]
    (one,) = verdicts(facts(parts=parts, num_microbatches=16, fewer_microbatches=2))
    assert one.remedy == "By the plan parallel.num_microbatches=2 fits"
    (one,) = verdicts(facts(parts=parts, num_microbatches=16))
    assert "do not fit" in one.remedy
    (one,) = verdicts(facts(parts=parts))
    assert "train.batch_size" in one.remedy


def test_remat_is_too_strong_only_where_a_weaker_policy_fits():
    parts = PROFILES["remat too strong"]
    assert named(parts=parts, remat="full", weaker_remat="none") == ["remat too strong"]
    assert named(parts=parts, remat="full") == []


def test_a_loop_that_waits_for_something_else_does_not_wait_for_input():
    assert named(outside_share=0.2, data_share=0.19) == ["slow input"]
    assert named(outside_share=0.2, data_share=0.05) == []
    # It waits for batches while the device computes, and loses nothing.
    assert named(outside_share=0.0, data_share=0.5) == []


def test_every_fault_has_its_judge_and_a_line():
    assert len(JUDGES) == 4
    (one,) = verdicts(facts(outside_share=0.5, data_share=0.4))
    assert one.text().startswith("slow input: 50% of a step of the loop is not the step")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdict")
    cfg = measured_config(tiny(folder), ASKED, folder=folder)
    return start(cfg, devices=jax.devices()[:1])


@pytest.mark.parametrize(("delay_s", "found"), [(LATE_S, ["slow input"]), (0.0, [])])
def test_a_loop_whose_batches_come_late_is_told_from_one_that_does_not_wait(
    run, monkeypatch, tmp_path, delay_s, found
):
    real, now_s = measure.make_parts, [0.0]

    def sleep(seconds):
        now_s[0] += seconds

    def late(*args, **kwargs):
        parts = real(*args, **kwargs)

        def batches():
            for batch in parts.batches:
                sleep(delay_s)
                yield batch

        return parts._replace(batches=batches(), step=instant)

    def instant(state, batch):
        sleep(STEP_S)
        return state._replace(step=state.step + 1), metrics

    metrics = measure.StepMetrics(*[np.float32(1)] * 7, np.bool_(True))
    monkeypatch.setattr(measure, "make_parts", late)
    state = create_train_state(run.frame, run.tx, seed=0, mesh=run.mesh)
    elsewhere = replace(run, directory=RunDirectory(tmp_path))
    looped, _ = time_loop(elsewhere, train_step_of(run), state, steps=6, clock=lambda: now_s[0])
    outside = 1 - STEP_S / looped.step_s
    assert looped.step_s == STEP_S + delay_s
    assert named(outside_share=outside, data_share=looped.data_share) == found


def traced(cfg):
    run = start(cfg, devices=jax.devices()[:1])
    state = abstract_train_state(run.frame, run.tx, mesh=run.mesh)
    batch = batch_like(cfg, batch_sharding(run.frame, run.mesh))
    products = products_in(train_step_of(run).trace(state, batch).jaxpr.jaxpr)
    subject = Subject(run.cfg, run.plan, run.table, adam_slots(run.table))
    return facts_of(subject, products=products, breakdown=None)


def test_a_layer_that_is_forced_to_float32_is_named_with_its_shapes(tmp_path):
    bfloat16 = tiny(tmp_path, "precision.compute=bfloat16")
    assert verdicts(traced(bfloat16)) == ()
    rule = "precision.rules=[{pattern: layers.ffn.down, format: float32}]"
    (one,) = verdicts(traced(tiny(tmp_path, "precision.compute=bfloat16", rule)))
    assert one.fault == "float32 products"
    # [B T F] x [F D], forward and twice backward, of 2 layers.
    assert "[8, 16, 32] x [32, 16], the shape of layers.ffn.down, at" in one.seen
    assert "precision.rules" in one.remedy


def test_products_are_counted_with_the_loops_they_are_in():
    def program(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=5)[0].sum()

    made = jax.make_jaxpr(program)(np.ones((4, 8), np.float32), np.ones((8, 8), np.float32))
    (row,) = products_in(made.jaxpr)
    assert row.flops == 5 * 2 * 4 * 8 * 8
    assert row.format == "float32"
    assert row.shapes == ((4, 8), (8, 8))
    inner = made.jaxpr.eqns[0].params["jaxpr"].jaxpr
    (product,) = [eqn for eqn in inner.eqns if eqn.primitive.name == "dot_general"]
    assert flops_of(product) == 2 * 4 * 8 * 8


def test_what_would_fit_is_asked_of_plans(tmp_path):
    strong = tiny(tmp_path, "parallel.remat=full", "parallel.num_microbatches=4")
    found = traced(strong)
    assert (found.weaker_remat, found.fewer_microbatches) == ("none", 1)
    assert (found.tokens, found.num_microbatches) == (2 * 16, 4)
    weak = traced(tiny(tmp_path))
    assert (weak.weaker_remat, weak.fewer_microbatches) == ("", 0)


SMALL = {**DENSE, "vocab_size": 2048, "embed_dim": 64, "num_heads": 4, "ffn_dim": 256,
         "gqa": {"num_kv_heads": 4, "head_dim": 16}, "num_layers": 4}  # fmt: skip
WIDE = {**SMALL, "embed_dim": 256, "ffn_dim": 1024, "num_layers": 2}
PLANTED = {
    "sound": (SMALL, ("train.batch_size=32", "train.seq_len=64")),
    "small micro-batch": (
        WIDE,
        ("train.batch_size=16", "train.seq_len=4", "parallel.num_microbatches=16"),
    ),
    "remat too strong": (SMALL, ("train.batch_size=32", "train.seq_len=64", "parallel.remat=full")),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_that_is_planted_in_a_real_run_is_the_one_that_is_named(fault, tmp_path, optimized):
    model, keys = PLANTED[fault]
    cfg = tiny(tmp_path, *keys, model=model)
    asked = Asked(steps=4, rounds=1, loop_rounds=0, profiled=4)
    found = measure_training(cfg, asked, devices=jax.devices()[:1]).verdicts
    assert [text.partition(":")[0] for text in found] == ([] if fault == "sound" else [fault])
