"""The bench yields records; its clock is replaced here, because a CPU has no kernels to time."""

import contextlib
import json

import pytest

from pallas_kernels import hardware, mosaic
from pallas_kernels.bench import fp8_matmul, grouped_matmul, mla_decode
from pallas_kernels.bench.timing import (
    Candidate,
    Record,
    geometric_mean,
    interleaved,
    paired_ratio,
    versions,
)

CEILINGS = {"float8_flops": 1e15, "bfloat16_flops": 5e14, "copy_bps": 4e12}


@pytest.fixture
def one_microsecond(monkeypatch):
    def kernel_seconds(run):
        run()
        return 1e-6

    monkeypatch.setattr(mosaic, "kernel_seconds", kernel_seconds)
    with mosaic.interpreted(), hardware.target("NVIDIA H200"):
        yield


def test_rounds_are_interleaved_and_every_candidate_is_timed_in_each(monkeypatch):
    order = []
    monkeypatch.setattr(mosaic, "kernel_seconds", lambda run: order.append("round") or 1e-3)
    candidates = [Candidate(name, lambda i, n=name: order.append(n)) for name in "ab"]
    rounds = interleaved(candidates, num_rounds=3, round_s=0.0)
    assert {name: len(times) for name, times in rounds.items()} == {"a": 3, "b": 3}
    started = [name for name in order if name != "round"]
    assert started == ["a", "b", "a", "b", "b", "a", "a", "b"]


def test_a_ratio_lies_in_its_interval_and_needs_paired_rounds():
    ratio = paired_ratio([2.0, 2.2, 1.8, 2.0, 2.1], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.median == pytest.approx(2.0)
    with pytest.raises(ValueError, match="paired"):
        paired_ratio([1.0], [1.0, 2.0])


def test_derived_figures_follow_from_the_median():
    record = Record("op", {"M": 1}, "b", (10.0, 20.0, 12.0), flops=12_000_000, floor_us=6.0)
    assert (record.median_us, record.tflops) == (12.0, 1.0)
    assert record.as_json()["floor_share"] == 0.5
    assert record.as_json()["spread"] == 1.0
    json.dumps(record.as_json())
    assert "median_us" not in Record("op", {}, "b", note="not carried").as_json()
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_versions_name_the_device_and_what_is_installed():
    assert {"python", "device", "jax"} <= set(versions())


def check(records, backends):
    found = {record.backend: record for record in records}
    assert backends <= set(found)
    for record in found.values():
        assert record.rounds_us or record.note.startswith("not carried")
    for name in backends:
        if found[name].total_error is not None:
            assert found[name].total_error < 1e-5


@pytest.mark.usefixtures("one_microsecond")
@pytest.mark.parametrize("m", [8, 200])
def test_the_block_scaled_product_yields_a_record_for_each_backend(m, monkeypatch):
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    monkeypatch.setattr("pallas_kernels.bench.timing._round_us", lambda c, n: 1.0)
    records = fp8_matmul.bench((m, 128, 256), ceilings=CEILINGS, num_rounds=2)
    check(records, {"mosaic_gpu", "xla_bfloat16"})


@pytest.mark.usefixtures("one_microsecond")
def test_a_sweep_ends_with_the_fastest_right_tile_in_the_table(monkeypatch):
    tiles = fp8_matmul.tiles_to_try((8, 128, 512))[:3]
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    monkeypatch.setattr(fp8_matmul, "tiles_to_try", lambda sizes: tiles)
    monkeypatch.setattr(
        fp8_matmul,
        "ThreadPoolExecutor",
        lambda n: contextlib.nullcontext(type("Pool", (), {"map": staticmethod(map)})),
    )
    times = {"0": 3.0, "1": 1.0, "2": 2.0}
    monkeypatch.setattr("pallas_kernels.bench.timing._round_us", lambda c, n: times[c.name])
    found = list(fp8_matmul.tune((8, 128, 512), fp8_matmul.Table("NVIDIA H200"), num_rounds=1))
    assert len(found) == 3
    assert found[-1][1].find("fp8_matmul", "m8_n128_k512") == tiles[1].__dict__


@pytest.mark.usefixtures("one_microsecond")
def test_latent_decode_and_grouped_products_yield_records(monkeypatch):
    monkeypatch.setattr("pallas_kernels.bench.timing._round_us", lambda c, n: 1.0)
    records = mla_decode.bench((2, 128, 4), ceilings=CEILINGS, num_rounds=1)
    check(records, {"mosaic_gpu_fixed", "mosaic_gpu_auto", "xla_contiguous"})
    records = grouped_matmul.bench((128, 64, 128, 1), ceilings=CEILINGS, num_rounds=1)
    check(records, {"mosaic_gpu_fp8", "mosaic_gpu_bfloat16"})
