"""The bench yields records; its clock is replaced here, because a CPU has no kernels to time."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import hardware, mosaic
from pallas_kernels.bench import (
    clock,
    fp8_matmul,
    grouped_masked,
    grouped_matmul,
    mla_decode,
    quantize,
    suite,
    timing,
    widened_matmul,
)
from pallas_kernels.bench.machine import versions, why_not_here
from pallas_kernels.bench.measure import (
    NotCarriedError,
    Options,
    Part,
    Plan,
    Problem,
    Work,
    batches,
    measure,
)
from pallas_kernels.bench.power import Meter, NoPowerError, open_meter, watts_under
from pallas_kernels.bench.suite import SUITE, SizesError, plans
from pallas_kernels.bench.timing import (
    Candidate,
    Record,
    compiled_candidate,
    geometric_mean,
    interleaved,
    paired_ratio,
)

CEILINGS = {"float8_flops": 1e15, "bfloat16_flops": 5e14, "copy_bps": 4e12}
# One thread: the contexts in which kernels are interpreted belong to it.
OPTIONS = Options(num_rounds=2, round_s=0.0, rest_s=0.0, num_threads=1)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run in the interpreter, once for the check; rounds take a microsecond each."""
    monkeypatch.setattr(timing, "_round_us", lambda candidate, num_calls, num_before: 1.0)
    with mosaic.interpreted(), hardware.target("NVIDIA H200"):
        yield


def test_rounds_are_interleaved_and_every_candidate_is_timed_in_each(monkeypatch):
    order = []
    monkeypatch.setattr(clock, "kernel_seconds", lambda run: order.append("round") or 1e-3)
    candidates = [Candidate(name, lambda i, n=name: order.append(n)) for name in "ab"]
    rounds = interleaved(candidates, num_rounds=8, round_s=0.0)
    assert {name: len(times) for name, times in rounds.items()} == {"a": 8, "b": 8}
    # After one call each to find out how long a call takes, one untimed call before each round.
    started = [name for name in order if name != "round"][2:]
    pairs = list(zip(started[::2], started[1::2], strict=True))
    assert set(pairs) == {("a", "b"), ("b", "a")}


def test_a_candidate_runs_untimed_before_each_round_until_its_clocks_have_settled(monkeypatch):
    timed, started = [], []

    def kernel_seconds(run):
        before = len(started)
        run()
        timed.append(len(started) - before)
        return 1e-3 * timed[-1]

    monkeypatch.setattr(clock, "kernel_seconds", kernel_seconds)
    interleaved([Candidate("a", started.append)], num_rounds=2, round_s=0.005, settle_s=0.02)
    assert timed == [3, 5, 5]
    assert len(started) == sum(timed) + 1 + 2 * 20


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
    assert Record.from_json(json.loads(json.dumps(record.as_json()))) == record
    assert "median_us" not in Record("op", {}, "b", note="not carried").as_json()
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_a_compiled_candidate_turns_its_operands_and_counts_their_bytes():
    sets = [(jnp.full((4, 8), value, jnp.float32),) for value in (1.0, 2.0)]
    candidate = compiled_candidate("double", lambda x: x * 2, sets)
    assert [float(candidate.start(index)[0, 0]) for index in range(3)] == [2.0, 4.0, 2.0]
    assert candidate.memory_bytes() == 2 * 4 * 8 * 4


def test_versions_name_the_device_and_what_is_installed():
    assert {"python", "device", "jax"} <= set(versions())


def test_a_cpu_is_said_to_have_nothing_to_time_and_what_to_do():
    assert "--show" in why_not_here()


def plan_of(parts, *, name="op", num_bytes=1, order=None):
    def expect():
        if order is not None:
            order.append(f"expect {name}")
        return lambda backend, result: None

    sizes = {"M": len(name)}
    return Plan(name, sizes, num_bytes, lambda: Problem(name, sizes, parts, expect))


def part(name, **fields):
    build = fields.pop("build", lambda: Candidate(name, lambda index: None))
    return Part(name, Work(10, 8_000_000, "none"), build, **fields)


@pytest.mark.usefixtures("interpreted")
def test_what_cannot_be_built_or_run_is_a_record_with_the_reason():
    def absent():
        raise NotCarriedError("it is not here")

    def broken():
        raise RuntimeError("no such tile\nand a long trace")

    def breaks(index):
        raise RuntimeError("not supported")

    parts = [
        part("ours"),
        part("absent", build=absent, against="ours"),
        part("broken", build=broken),
        part("breaks", build=lambda: Candidate("breaks", breaks)),
    ]
    (finished,) = measure([plan_of(parts)], ceilings=CEILINGS, options=OPTIONS)
    notes = {record.backend: record.note for record in finished.records}
    assert notes == {
        "ours": "",
        "absent": "not carried: it is not here",
        "broken": "failed: no such tile",
        "breaks": "failed: not supported",
    }
    (timed,) = [record for record in finished.records if record.rounds_us]
    assert (timed.backend, timed.floor_us) == ("ours", 2.0)


@pytest.mark.usefixtures("interpreted")
def test_a_size_whose_operands_do_not_fit_does_not_end_the_call():
    def too_large():
        raise RuntimeError("RESOURCE_EXHAUSTED")

    asked = [Plan("op", {"M": 1}, 1, too_large), plan_of([part("ours")])]
    first, second = measure(asked, ceilings=CEILINGS, options=OPTIONS)
    assert [record.note for record in first.records] == ["failed: RESOURCE_EXHAUSTED"]
    assert second.records[0].rounds_us


def test_everything_of_a_batch_is_built_before_anything_of_it_is_timed(monkeypatch):
    order = []
    monkeypatch.setattr(
        timing,
        "_round_us",
        lambda candidate, n, num_before: order.append(f"time {candidate.name}") or 1.0,
    )
    asked = [plan_of([part(name)], name=name, order=order) for name in ("a", "bb", "ccc")]
    options = replace(OPTIONS, num_rounds=1, batch_size=2)
    assert len(list(measure(asked, ceilings=CEILINGS, options=options))) == 3
    assert list(dict.fromkeys(order)) == [
        *("expect a", "expect bb", "time a", "time bb"),
        *("expect ccc", "time ccc"),
    ]


def test_batches_fit_the_memory_and_what_fits_nowhere_goes_alone():
    asked = [plan_of([], name="x" * size, num_bytes=size) for size in (3, 4, 9, 2, 2, 2)]
    cut = batches(asked, Options(batch_bytes=7, batch_size=2))
    assert [[plan.operand_bytes for plan in batch] for batch in cut] == [[3, 4], [9], [2, 2], [2]]


def test_power_is_read_while_the_candidate_runs_and_its_absence_has_a_reason():
    order = []
    candidate = Candidate("a", lambda i: order.append("start"), lambda r: order.append("wait"))
    meter = Meter(lambda: order.append("read") or 500.0)
    assert watts_under(candidate, meter, num_calls=3, stretch_s=0.001) == 500.0
    assert order[:3] == ["start"] * 3
    assert order[-2:] == ["read", "wait"]
    with pytest.raises(NoPowerError, match=r"nvidia-ml-py|NVML"):
        open_meter()


def check(problem, ours):
    finished = list(measure([Plan("", {}, 0, lambda: problem)], ceilings=CEILINGS, options=OPTIONS))
    found = {record.backend: record for record in finished[0].records}
    assert {part.name for part in problem.parts} == set(found)
    for record in found.values():
        assert record.rounds_us or record.note.startswith("not carried"), record
        assert (record.memory_bytes is None) == (not record.rounds_us)
        assert record.against in found or not record.against
    for name in ours:
        assert found[name].total_error < 1e-5
    return found


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("m", [8, 130])
def test_the_block_scaled_product_yields_a_record_for_each_backend(m, monkeypatch):
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    found = check(fp8_matmul.problem((m, 64, 128)), {"mosaic_gpu", "xla_bfloat16"})
    assert ("xla_float8" in found) == (m > 128)
    if m > 128:
        assert found["xla_float8"].total_error is None
        assert found["xla_float8"].note == fp8_matmul.UNSCALED
    assert found["torch_blockwise"].note == "not carried: torch is not installed"
    assert "nvcc" in found["flashinfer_groupwise"].note


@pytest.mark.usefixtures("interpreted")
def test_an_odd_size_is_timed_beside_its_aligned_twin(monkeypatch):
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    pair = ((7, 64, 120), (8, 64, 128))
    found = check(fp8_matmul.odd_problem(pair), {"mosaic_gpu", "mosaic_gpu_aligned"})
    assert found["mosaic_gpu"].sizes == {"M": 7, "N": 64, "K": 120}
    assert found["mosaic_gpu_aligned"].settings == {"M": 8, "N": 64, "K": 128}
    assert found["mosaic_gpu_aligned"].flops > found["mosaic_gpu"].flops


@pytest.mark.usefixtures("interpreted")
def test_a_sweep_ends_with_the_fastest_right_tile_in_the_table(monkeypatch):
    tiles = fp8_matmul.tiles_to_try((8, 64, 128))[:2]
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    monkeypatch.setattr(fp8_matmul, "tiles_to_try", lambda sizes: tiles)
    times = {"0": 3.0, "1": 1.0}
    monkeypatch.setattr(timing, "_round_us", lambda c, n, num_before: times[c.name])
    empty = fp8_matmul.Table("NVIDIA H200")
    found = list(fp8_matmul.tune((8, 64, 128), empty, num_rounds=1, num_threads=1))
    assert len(found) == 2
    assert found[-1][1].find("fp8_matmul", "m8_n64_k128") == tiles[1].__dict__


@pytest.mark.usefixtures("interpreted")
def test_a_sweep_of_widened_weights_tries_tiles_that_fit(monkeypatch):
    sizes = (2, 60, 256, 512)
    tiles = widened_matmul.tiles_to_try(sizes)
    # K is four steps, and few programs have parts of two.
    assert {(t.weights, t.num_splits) for t in tiles} == {(64, 2), (128, 2)}
    many = widened_matmul.tiles_to_try((64, 60, 1408, 2048))
    assert {(t.weights, t.num_splits) for t in many} == {(64, 1), (128, 1)}
    one = widened_matmul.tiles_to_try((1, 16, 3072, 2048))
    assert {t.num_splits for t in one if t.weights == 64} == {2, 4, 8}
    # 128 x 128 sums would be 128 of a lane of four warps, and as many again of one step.
    full = widened_matmul.tiles_to_try((64, 100, 1408, 2048))
    assert {(t.weights, t.num_warps) for t in full} == {(64, 4), (128, 8)}
    monkeypatch.setattr(widened_matmul, "tiles_to_try", lambda sizes: tiles[:2])
    monkeypatch.setattr(widened_matmul, "OURS", "xla")
    times = {"0": 3.0, "1": 1.0}
    monkeypatch.setattr(timing, "_round_us", lambda c, n, num_before: times[c.name])
    empty = widened_matmul.Table("NVIDIA H200")
    found = list(widened_matmul.tune(sizes, empty, num_rounds=1, num_threads=1))
    assert len(found) == 2
    assert found[-1][1].find("widened_matmul", "p2_m64_n256_k512") == tiles[1].__dict__


@pytest.mark.usefixtures("interpreted")
def test_latent_decode_is_timed_on_both_caches(monkeypatch):
    monkeypatch.delitem(mla_decode.SPLIT_LENGTHS, "fixed")
    found = check(mla_decode.problem((1, 64, 2)), {"mosaic_gpu_auto", "xla_contiguous"})
    (packed,) = [r for name, r in found.items() if name.endswith("_auto_fp8_cache")]
    assert packed.total_error < 1e-5
    assert packed.bytes_moved < found["mosaic_gpu_auto"].bytes_moved


def test_latent_decode_has_both_splits_of_each_kernel():
    with hardware.target("NVIDIA H200"):
        names = [part.name for part in mla_decode.problem((1, 64, 2)).parts]
    assert {"mosaic_gpu_fixed", "mosaic_gpu_auto"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.usefixtures("interpreted")
def test_grouped_products_are_timed_in_both_precisions_and_masked():
    check(grouped_matmul.problem((128, 64, 128, 1)), {"mosaic_gpu_fp8", "mosaic_gpu_bfloat16"})
    found = check(
        grouped_masked.problem((2, 8, 64, 128)), {"mosaic_gpu_fp8", "mosaic_gpu_bfloat16"}
    )
    assert found["xla_batched"].total_error < 1e-5
    assert found["chosen_bfloat16"].total_error < 1e-5


@pytest.mark.usefixtures("interpreted")
def test_quantising_is_held_against_its_bytes():
    found = check(quantize.problem((130, 256)), set())
    ways = ("1x128", "128x128", "both_1x128", "transposed_1x128")
    ways += ("swiglu_1x128", "swiglu_gradients_1x128", "squares")
    assert set(found) == {f"xla_{way}" for way in ways}
    for record in found.values():
        assert record.floor_us == 1e6 * record.bytes_moved / CEILINGS["copy_bps"]
        # e4m3 keeps three bits of a fraction.
        assert record.total_error < 2.0**-10


@pytest.mark.usefixtures("interpreted")
def test_a_weight_s_gradient_is_timed_beside_bfloat16(monkeypatch):
    monkeypatch.setattr(fp8_matmul, "MAX_SETS", 2)
    found = check(fp8_matmul.wgrad_problem((130, 72, 256)), {"mosaic_gpu", "xla_bfloat16"})
    assert found["xla_bfloat16"].against == "mosaic_gpu"


@pytest.mark.usefixtures("interpreted")
def test_widened_weights_are_held_against_twice_the_bytes():
    found = check(widened_matmul.problem((2, 8, 64, 128)), {"xla"})
    assert set(found) == {"xla", "xla_bfloat16"}
    assert found["xla_bfloat16"].bytes_moved - found["xla"].bytes_moved == 2 * 64 * 128


def test_every_op_has_plans_whose_operands_fit_the_card():
    for op, found in SUITE.items():
        listed = list(found())
        assert listed, op
        assert len({(tuple(p.sizes.items()), p.make.args) for p in listed}) == len(listed)
        assert all(0 < plan.operand_bytes < 60e9 for plan in listed), op


def test_sizes_are_picked_whole_or_by_one_letter_and_a_wrong_one_is_refused():
    assert [p.sizes for p in plans(["fp8_matmul"], ["64x4096x7168"])] == [
        {"M": 64, "N": 4096, "K": 7168}
    ]
    picked = plans(["fp8_matmul"], ["M=64,128", "K=7168"])
    assert {p.sizes["M"] for p in picked} == {64, 128}
    assert {p.sizes["K"] for p in picked} == {7168}
    for ops, sizes, said in (
        (["matmul"], [], "fp8_matmul"),
        ([], ["64 by 64"], "neither"),
        (["fp8_matmul"], ["1x1x1"], "no size"),
        (["fp8_matmul"], ["64x4096x7168", "1x1x2"], "is 1x1x2"),
    ):
        with pytest.raises(SizesError, match=said):
            plans(ops, sizes)


def test_tiles_are_compared_at_sizes_of_one_s_own(monkeypatch, tmp_path):
    asked = []
    tune = lambda sizes, table, num_rounds: asked.append(sizes) or iter(())
    monkeypatch.setitem(
        suite.SWEEPS, "widened_matmul", replace(suite.SWEEPS["widened_matmul"], tune=tune)
    )
    sweep = lambda *sizes: list(suite.sweep("widened_matmul", sizes, out=tmp_path / "t.json"))
    sweep("1x16x3072x2048", "2x9x256x512")
    assert asked == [(1, 16, 3072, 2048), (2, 9, 256, 512)]
    with pytest.raises(SizesError, match=r"is 9x256x512: it has 4, E x M x N x K"):
        sweep("1x16x3072x2048", "9x256x512")


@pytest.mark.parametrize("op", ["fp8_training", "fp8_wgrad"])
def test_records_have_the_name_of_the_op_that_was_asked_for(op, monkeypatch):
    for sizes in ("TRAINING_SIZES", "WGRAD_SIZES"):
        monkeypatch.setattr(suite, sizes, ((192, 128, 256),))
    (plan,) = plans([op])
    assert plan.make().op == plan.op == op
