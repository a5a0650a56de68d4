"""`jaxfound bench kernels`: what it measures, draws, refuses and compares, without a GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfound.cli.main import main
from jaxfound.cli.pages.kernel_docs import SOURCE, DocumentError, between_markers, documents
from pallas_kernels.bench import machine, measure, power, suite, timing
from pallas_kernels.bench.results import Call, Results, read, write
from pallas_kernels.bench.timing import Record

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = {"float8_flops": 1.5e15, "bfloat16_flops": 8e14, "copy_bps": 4.3e12}


@pytest.fixture
def jaxfound(monkeypatch, capsys):
    """Run the command in this process; returns its exit code, output and errors."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)

    def run(*args):
        with pytest.raises(SystemExit) as left:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def stand_in_card(monkeypatch):
    """A card and an op whose kernels do nothing; returns the times that its clock reads."""
    monkeypatch.setattr(machine, "why_not_here", lambda: None)
    monkeypatch.setattr(machine, "ceilings", lambda num_threads: CEILINGS)
    monkeypatch.setattr(power, "open_meter", lambda: power.Meter(lambda: 600.0))
    monkeypatch.setattr(measure, "watts_under", lambda candidate, meter, num_calls: meter.watts())
    times = {"mosaic_gpu": 2.0}
    monkeypatch.setattr(timing, "_round_us", lambda c, n, num_before: times.get(c.name, 3.0))
    monkeypatch.setitem(suite.SUITE, "fp8_matmul", lambda: map(plan, [(8, 128, 256), (8, 64, 128)]))
    return times


def plan(sizes):
    named = dict(zip("MNK", sizes, strict=True))
    return measure.Plan("fp8_matmul", named, 1, lambda: problem(sizes))


def problem(sizes):
    def absent():
        raise measure.NotCarriedError("it is not here")

    def part(name, *, build=None, against=""):
        work = measure.Work(2 * 8 * sizes[1] * sizes[2], 1000, "float8")
        build = build or (lambda: built(name))
        return measure.Part(name, work, build, against=against)

    parts = [
        part("mosaic_gpu"),
        part("xla_bfloat16", against="mosaic_gpu"),
        part("flashinfer_groupwise", build=absent, against="mosaic_gpu"),
    ]
    named = dict(zip("MNK", sizes, strict=True))
    return measure.Problem("fp8_matmul", named, parts, lambda: lambda name, result: None)


def built(name):
    return timing.Candidate(name, lambda index: None)


COMMAND = ("bench", "kernels", "--op", "fp8_matmul", "--threads", 1, "--rounds", 2)


def test_a_call_measures_appends_draws_and_compares(jaxfound, stand_in_card, tmp_path):
    path = tmp_path / "results.json"
    code, out, err = jaxfound(*COMMAND, "--out", path, "--commit", "abc1234")
    assert code == 0, err
    assert "fp8_matmul 8x128x256: mosaic_gpu 2.0 µs; prepared in" in out
    assert "1.50" in out, "the ratio of a peer"
    assert "flashinfer_groupwise: not carried" in out
    (call,) = read(path).calls
    assert call.ceilings == CEILINGS
    assert call.seconds > 0
    assert {r.power_w for r in call.records if r.rounds_us} == {600.0}
    assert {tuple(r.sizes.values()) for r in call.records} == {(8, 128, 256), (8, 64, 128)}

    stand_in_card["mosaic_gpu"] = 2.5
    code, out, err = jaxfound(*COMMAND, "--out", path, "--compare", path, "--sizes", "N=128")
    assert code == 1
    assert "slower: fp8_matmul 8 x 128 x 256 mosaic_gpu: 2.00" in out
    assert len(read(path).calls) == 2

    code, out, err = jaxfound(*COMMAND, "--compare", path, "--sizes", "8x64x128")
    assert "slower: fp8_matmul 8 x 64 x 128" in out
    stand_in_card["mosaic_gpu"] = 2.0
    code, out, err = jaxfound(*COMMAND, "--compare", path, "--sizes", "8x64x128")
    assert (code, "nothing is slower" in out) == (0, True)


def test_a_run_that_is_cut_leaves_the_sizes_that_were_finished(
    jaxfound, stand_in_card, tmp_path, monkeypatch
):
    def cut():
        raise KeyboardInterrupt

    plans = [plan((8, 128, 256)), measure.Plan("fp8_matmul", {}, 1, cut)]
    monkeypatch.setitem(suite.SUITE, "fp8_matmul", lambda: plans)
    monkeypatch.setattr(measure, "batches", lambda plans, options: ([plan] for plan in plans))
    path = tmp_path / "results.json"
    code, _, _ = jaxfound(*COMMAND, "--out", path)
    assert code == 130
    (call,) = read(path).calls
    assert {tuple(r.sizes.values()) for r in call.records} == {(8, 128, 256)}


def test_one_of_ours_that_fails_is_an_error_after_everything_was_written(
    jaxfound, stand_in_card, tmp_path, monkeypatch
):
    def broken(name):
        if name == "mosaic_gpu":
            raise RuntimeError("no such tile")
        return timing.Candidate(name, lambda index: None)

    monkeypatch.setitem(globals(), "built", broken)
    code, out, err = jaxfound(*COMMAND, "--out", tmp_path / "r.json", "--sizes", "N=64")
    assert code == 1
    assert "error: fp8_matmul 8x64x128 mosaic_gpu: failed: no such tile" in err
    assert "FAILED: mosaic_gpu" in out
    (call,) = read(tmp_path / "r.json").calls
    assert "xla_bfloat16" in {r.backend for r in call.records if r.rounds_us}


def test_a_cpu_is_refused_with_the_way_out(jaxfound, tmp_path):
    for command in ("kernels", "tune"):
        more = ("--op", "fp8_matmul") if command == "tune" else ()
        code, _, err = jaxfound("bench", command, *more, "--out", tmp_path / "r.json")
        assert code == 2
        assert err.startswith("error: JAX runs on cpu here, which has no GPU kernels to time")
        assert "--show" in err
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_or_size_is_one_error(jaxfound, stand_in_card, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for args, said in (
        (("--show", bad), "format_version=None"),
        (("--show", tmp_path / "none.json"), "there is no results file"),
        (("--out", bad, *COMMAND[2:]), "Nothing was changed"),
        (("--compare", tmp_path / "none.json"), "there is no results file"),
        (("--op", "matmul"), "fp8_matmul"),
        (("--sizes", "64 by 64"), "neither"),
    ):
        code, _, err = jaxfound("bench", "kernels", *args)
        assert code == 2
        assert err.startswith("error: ")
        assert said in err
    assert bad.read_text() == "{}"


def test_a_stored_file_is_drawn_on_any_machine(jaxfound, tmp_path):
    code, out, err = jaxfound(
        "bench", "kernels", "--show", ROOT / SOURCE, "--roofline", tmp_path / "roof.png"
    )
    assert code == 0, err
    for title in ("fp8_matmul: A·Bᵀ", "mla_decode", "Speeds aimed at", "not carried"):
        assert title in out
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_refused_with_the_way_out(
    jaxfound, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = jaxfound(
        "bench", "kernels", "--show", ROOT / SOURCE, "--roofline", tmp_path / "roof.png"
    )
    assert code == 2
    assert "jaxfound[plots]" in err
    assert "Speeds aimed at" in out
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_compared_with_another_without_measuring(jaxfound, tmp_path):
    found = read(ROOT / SOURCE)
    slower = [
        replace(
            call,
            records=tuple(
                replace(r, rounds_us=tuple(1.2 * us for us in r.rounds_us)) for r in call.records
            ),
        )
        for call in found.calls
    ]
    write(Results(tuple(slower)), tmp_path / "slower.json")
    args = ("bench", "kernels", "--show", tmp_path / "slower.json", "--compare", ROOT / SOURCE)
    code, out, _ = jaxfound(*args)
    assert code == 1
    ours = {
        (r.op, *r.sizes.values(), r.backend)
        for c in found.calls
        for r in c.records
        if not r.against and r.rounds_us
    }
    assert out.count("slower: ") == len(ours)


def test_the_documents_hold_what_the_results_file_says():
    """`jaxfound bench kernels --show FILE --write-docs` writes them, with FILE = SOURCE."""
    for path, text in documents(read(ROOT / SOURCE), ROOT).items():
        assert path.read_text("utf-8") == text


def test_documents_are_written_between_their_markers(jaxfound, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/kernels.md"):
        page = "# Title\n\n<!-- measured: begin -->\nold\n<!-- measured: end -->\n\nafter\n"
        (tmp_path / name).write_text(page)
    monkeypatch.chdir(tmp_path)
    code, _, err = jaxfound("bench", "kernels", "--show", ROOT / SOURCE, "--write-docs")
    assert code == 0, err
    for name in ("README.md", "docs/kernels.md"):
        text = (tmp_path / name).read_text()
        assert text.startswith("# Title\n\n<!-- measured: begin -->\n")
        assert text.endswith("<!-- measured: end -->\n\nafter\n")
        assert "| old |" not in text
        assert read(ROOT / SOURCE).calls[-1].commit in text
    with pytest.raises(DocumentError, match="measured: begin"):
        between_markers("no markers", "body", path="README.md")


def test_figures_of_a_page_are_those_of_the_file(tmp_path):
    sizes = {"M": 64, "N": 7168, "K": 16384}
    records = (
        Record("fp8_matmul", sizes, "mosaic_gpu", (10.0, 10.0), flops=5 * 10**9, floor_us=4.0),
        Record("fp8_matmul", sizes, "torch_blockwise", (15.0, 15.0), against="mosaic_gpu"),
    )
    call = Call("abc1234", "", {"device": "NVIDIA H200"}, CEILINGS, None, records)
    for name in ("README.md", "docs/kernels.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    pages = documents(Results((call, call)), tmp_path)
    front = pages[tmp_path / "README.md"]
    row = "| `fp8_matmul` | M = 64, N = 7168, K = 16384 | 10.0 | 500 | 40% | torch block-wise |"
    assert f"{row} 1.50 (1.50-1.50) |" in front
    assert "One NVIDIA H200; 2 calls; source abc1234." in front
    assert "| 2 x 2 |" in pages[tmp_path / "docs/kernels.md"]
