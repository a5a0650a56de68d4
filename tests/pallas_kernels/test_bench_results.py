"""Results of many calls: what a file keeps, what calls say together, what became slower."""

from dataclasses import replace

import pytest

from pallas_kernels.bench.results import Call, Recorder, Results, ResultsError, read, write
from pallas_kernels.bench.summary import Key, regressions, summary, without_times
from pallas_kernels.bench.targets import TARGETS, targets
from pallas_kernels.bench.timing import Record
from pallas_kernels.fp8_matmul.cases import BENCH_NK

SIZES = {"M": 64, "N": 128, "K": 256}
EMPTY = Call("abc1234", "2026-01-02T03:04:05+00:00", {"device": "NVIDIA H200"}, {}, None)


def record(backend, *rounds_us, against="", op="fp8_matmul", sizes=SIZES, **fields):
    return Record(op, sizes, backend, tuple(map(float, rounds_us)), against=against, **fields)


def call_of(*records):
    return replace(EMPTY, records=records, seconds=1.5)


def test_a_call_is_appended_and_what_was_there_stays(tmp_path):
    path = tmp_path / "folder" / "results.json"
    for backend in ("a", "b"):
        recorder = Recorder(path, EMPTY)
        recorder.set_ceilings({"copy_bps": 4e12})
        recorder.add((record(backend, 1.0),), seconds=2.0)
    first, second = read(path).calls
    assert [r.backend for r in (*first.records, *second.records)] == ["a", "b"]
    assert second.ceilings == {"copy_bps": 4e12}
    assert second.seconds == 2.0
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_a_run_that_is_cut_keeps_every_size_that_was_finished(tmp_path):
    path = tmp_path / "results.json"
    recorder = Recorder(path, EMPTY)
    for done in range(1, 4):
        recorder.add((record("a", 1.0, sizes={"M": done}),), seconds=float(done))
        (call,) = read(path).calls
        assert [r.sizes["M"] for r in call.records] == list(range(1, done + 1))
        assert call.seconds == done


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format_version": 2, "calls": []}', '{"format_version": 1, "calls": [{}]}'],
)
def test_a_file_that_cannot_be_read_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"results\.json"):
        Recorder(path, EMPTY)
    assert path.read_text() == text


def test_the_ratio_is_paired_inside_each_call_and_pooled_over_calls():
    slow_card = call_of(record("ours", 20, 22), record("peer", 40, 44, against="ours"))
    fast_card = call_of(record("ours", 10, 10), record("peer", 20, 22, against="ours"))
    apart = call_of(record("peer", 900, 900, against="ours"))
    ours, peer = summary(Results((slow_card, fast_card, apart)))
    assert ours.is_ours
    assert ours.ratio is None
    assert (ours.num_calls, ours.num_rounds, ours.time_us.median) == (2, 4, 15.0)
    assert peer.num_calls == 3
    # 2, 2, 2, 2.2: pairing across calls would make ratios of 1 and 4 too.
    assert peer.ratio.median == 2.0
    assert 2.0 <= peer.ratio.low <= peer.ratio.high <= 2.2


def test_a_peer_that_was_carried_once_is_not_listed_as_missing():
    missing = record("peer", against="ours", note="not carried: no torch")
    timed = record("peer", 1, against="ours")
    assert without_times(Results((call_of(missing),))) == {
        ("fp8_matmul", "peer"): "not carried: no torch"
    }
    assert without_times(Results((call_of(missing), call_of(timed)))) == {}


OLD = (100.0, 101.0, 99.0, 100.0, 100.5)
REGRESSIONS = [
    ("slower by more than both spreads", [110, 111, 109, 110, 112], True),
    ("slower by less than the card's noise", [102, 102.5, 102, 102, 102.5], False),
    ("slower, but the intervals overlap", [99, 130, 98, 131, 105], False),
    ("faster", [50, 51, 50, 50, 50], False),
]


@pytest.mark.parametrize(
    ("rounds", "flagged"), [row[1:] for row in REGRESSIONS], ids=[row[0] for row in REGRESSIONS]
)
def test_a_regression_is_more_than_both_spreads_explain(rounds, flagged):
    old = Results((call_of(record("ours", *OLD), record("peer", *OLD, against="ours")),))
    new = Results((call_of(record("ours", *rounds), record("peer", *rounds, against="ours")),))
    found = regressions(old, new)
    assert [one.backend for one in found] == (["ours"] if flagged else [])


def test_a_size_that_only_one_file_has_is_no_regression():
    old = Results((call_of(record("ours", *OLD)),))
    new = Results((call_of(record("ours", 500, 500, sizes={"M": 1})),))
    assert regressions(old, new) == ()


def verdicts(*calls):
    return {verdict.text: verdict for verdict in targets(Results(calls))}


def test_nothing_measured_meets_no_target_and_misses_none():
    assert set(verdicts()) == set(TARGETS)
    assert {verdict.met for verdict in verdicts().values()} == {"not measured"}


def dense(ratio, *, nk=BENCH_NK):
    return [
        made
        for m in (64, 128)
        for n, k in nk
        for made in (
            record("mosaic_gpu", 10, 10, sizes={"M": m, "N": n, "K": k}),
            record(
                "torch_blockwise",
                *(10 * ratio, 10 * ratio),
                against="mosaic_gpu",
                sizes={"M": m, "N": n, "K": k},
            ),
        )
    ]


MEAN = "fp8_matmul, M = 64 and 128: geometric mean over torch block-wise"
WORST = "fp8_matmul, M = 64 and 128: slowest shape over torch block-wise"


@pytest.mark.parametrize(
    ("ratio", "nk", "mean", "worst"),
    [
        (1.3, BENCH_NK, "yes", "yes"),
        (1.1, BENCH_NK, "no", "yes"),
        (0.9, BENCH_NK, "no", "no"),
        # Other sizes can lift a mean and cannot lift the worst.
        (1.3, BENCH_NK[:2], "not measured", "not measured"),
        (0.9, BENCH_NK[:2], "not measured", "no"),
    ],
)
def test_a_target_over_many_sizes_is_met_by_all_of_them(ratio, nk, mean, worst):
    found = verdicts(call_of(*dense(ratio, nk=nk)))
    assert (found[MEAN].met, found[WORST].met) == (mean, worst)
    assert found[MEAN].measured.value == pytest.approx(ratio)
    assert found[MEAN].measured.num_sizes == 2 * len(nk)
    assert found[MEAN].measured.num_calls == 1


def test_an_odd_size_is_held_against_its_aligned_twin():
    text = "fp8_matmul, M = 4096: an odd M, N or K over its next multiple, dearest"
    places = [(4033, 4096, 7168), (4096, 4089, 7168), (4096, 4096, 7041)]
    records = [
        made
        for place, us in zip(places, (11, 12, 13), strict=True)
        for made in (
            record("mosaic_gpu", us, op="fp8_odd", sizes=dict(zip("MNK", place, strict=True))),
            record(
                "mosaic_gpu_aligned",
                10,
                op="fp8_odd",
                against="mosaic_gpu",
                sizes=dict(zip("MNK", place, strict=True)),
            ),
        )
    ]
    verdict = verdicts(call_of(*records))[text]
    assert verdict.measured.value == pytest.approx(1.3)
    assert verdict.met == "no"


def test_a_speed_in_flops_is_that_of_the_automatic_split():
    sizes = {"B": 64, "S": 4096, "N": 128}
    made = record("mosaic_gpu_auto", 100, op="mla_decode", sizes=sizes, flops=60 * 10**9)
    verdict = verdicts(call_of(made))[
        "mla_decode, 128 heads, B = 64, S = 4096: TFLOP/s, automatic split"
    ]
    assert (verdict.measured.value, verdict.met) == (pytest.approx(600.0), "yes")


def test_a_results_file_comes_back_as_it_was_written(tmp_path):
    made = Results(
        (call_of(record("ours", 1, 2, power_w=512.5, memory_bytes=7, settings={"M": 8})), EMPTY)
    )
    write(made, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == made
    assert summary(made)[0].key == Key("fp8_matmul", (("M", 64), ("N", 128), ("K", 256)))
