"""A row of timed training: MFU by both conventions, what it is beside, and how records join."""

import json
from pathlib import Path

import pytest

from jaxfound.config.load import load
from jaxfound.training.compile_time import Compiles
from jaxfound.training.compiled_step import Memory
from jaxfound.training.events import TrainingError
from jaxfound.training.forecast import Checked, Forecast
from jaxfound.training.measure import Looped, Measured
from jaxfound.training.step_profile import KINDS_OF_WORK, PARTS, Breakdown
from jaxfound.training.torch_peer import PeerTimes
from jaxfound.training.train_record import TrainRow, as_record, flops_of, formula

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
H200 = "NVIDIA H200"
# Tokens of a step of configs/dense-1.3b.yaml, and seconds of one at 48,402 tokens a second, which
# was published as 45.1 % of 989 TFLOP/s with all scores counted and 42.2 % with half of them.
TOKENS, STEP_S = 16 * 2048, 16 * 2048 / 48_402
MADE = {"commit": "abc", "date": "2026-01-01", "note": ""}


def measured(device=H200, *, step_s=STEP_S, num_devices=1, with_parts=True):
    parts = Breakdown(
        step_s=1.01 * step_s,
        parts={part: 1.01 * step_s / len(PARTS) for part in PARTS},
        kinds={kind: 1.01 * step_s / len(KINDS_OF_WORK) for kind in KINDS_OF_WORK},
        operations=(),
    )
    memory = Memory(10, 5, 5, 3, 13)
    forecast = Forecast(device, {"parameters": 10}, 10, {"products": step_s})
    return Measured(
        device=device,
        num_devices=num_devices,
        versions={"jax": "0"},
        commit="",
        config="dense-1.3b",
        tokens_per_step=TOKENS,
        steps_per_round=20,
        step_alone_s=(0.9 * step_s, step_s, 1.2 * step_s),
        loop=(Looped(step_s, 0.0),),
        compiles=Compiles(12.0, 1.5),
        checked=Checked(forecast, 60, step_s, memory, 14, {}),
        ceiling_flops=(790e12, 791e12, 792e12),
        loss=10.8,
        breakdown=parts if with_parts else None,
        verdicts=("slow input: …",),
    )


PEER = PeerTimes("2.11.0", 1_336_248_320, 41.0, (0.45, 0.5, 0.55), 86 * 2**30, 10.8)


def row(name="dense-1.3b", **changes):
    values = {"ours": (measured(),), "peer": (PEER,)}
    return TrainRow(load(CONFIGS / f"{name}.yaml"), **{**values, **changes})


def test_mfu_is_that_of_a_published_measurement_by_both_conventions():
    found = row().speed(row().step_s)
    assert found["tokens_per_s"] == pytest.approx(48_402)
    assert found["mfu_full"] == pytest.approx(0.451, abs=0.001)
    assert found["mfu_causal"] == pytest.approx(0.422, abs=0.001)
    # Of 791 TFLOP/s.
    assert found["of_ceiling"] == pytest.approx(found["mfu_full"] * 989.4 / 791)


def test_flops_are_six_for_each_weight_and_token_and_attentions_beside():
    flops = flops_of(load(CONFIGS / "dense-1.3b.yaml"))
    layers = 24 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    assert flops.products == 2 * (layers + 50_304 * 2048)
    assert flops.scores == 2 * 2 * 24 * 2048 * 2048
    assert flops.causal == flops.products + flops.scores * 2049 // 4096
    assert "3 x 32,768 tokens x (2.672 G of products + 0.4027 G of scores)" in formula(
        flops, TOKENS
    )


def test_a_row_beside_a_peer_says_how_many_times_as_fast_it_is():
    assert row().ratio == pytest.approx(0.5 / STEP_S)
    assert row(peer=()).ratio is None
    data = row(peer=(), why_no_peer="it had not finished").as_data(**MADE)
    assert data["peer"] == {"why_not": "it had not finished"}
    assert row().as_data()["peer"]["parameters"] == 1_336_248_320


def test_several_devices_share_the_flops():
    alone, two = row(), row(ours=(measured(num_devices=2),))
    ratio = alone.speed(alone.step_s)["mfu_full"] / two.speed(two.step_s)["mfu_full"]
    assert ratio == pytest.approx(2)


def test_without_a_published_peak_no_mfu_is_said():
    cpu = row(ours=(measured("cpu"),))
    assert cpu.peak_flops is None
    assert cpu.speed(cpu.step_s)["mfu_full"] is None


def test_a_breakdown_says_how_far_it_is_from_the_step_that_nobody_looked_at():
    assert row().closure == pytest.approx(0.01)
    assert row(ours=(measured(with_parts=False),)).closure is None
    # Of several turns the first alone is taken apart.
    two = row(ours=(measured(), measured(with_parts=False)))
    assert two.profiled is two.ours[0]
    assert len(two.as_data()["ours"]["turns"]) == 2


def test_rows_of_several_calls_join_one_record():
    first = as_record({}, row(), **MADE)
    second = as_record(
        json.loads(json.dumps(first)), row("dense-2.7b"), **{**MADE, "commit": "def"}
    )
    assert {name: one["commit"] for name, one in second["rows"].items()} == {
        "dense-1.3b": "abc",
        "dense-2.7b": "def",
    }
    again = as_record(second, row(peer=()), **{**MADE, "commit": "new"})
    assert list(again["rows"]) == ["dense-1.3b", "dense-2.7b"]
    assert again["rows"]["dense-1.3b"]["commit"] == "new"
    with pytest.raises(TrainingError, match="of NVIDIA H200, this is cpu"):
        as_record(first, row(ours=(measured("cpu"),)), **MADE)
