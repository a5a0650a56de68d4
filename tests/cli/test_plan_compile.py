"""`jaxfound plan --compile`: what is printed and written of a compiled step, and the exit codes."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfound.cli import plan_compile
from jaxfound.cli.main import main
from jaxfound.training.aot import Target
from jaxfound.training.buffers import Buffer
from jaxfound.training.compiled_step import Compared, CompiledStep, Memory, Sent, Took

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "50b-3x8-zero.yaml"
TOPOLOGY = ("--topology", "3x8:h200:ib400")
GB = 10**9
GATHER = Sent(
    "all_gather", ("fsdp",), 4, "inside a host", GB, 96, True, False, 0.01, 0.02, 0.004, "mlp.py:39"
)
STEP = CompiledStep(
    target="24 NVIDIA H200 of 3 hosts",
    stand_in="",
    memory=Memory(75 * GB, 75 * GB, 75 * GB, 64 * GB, 139 * GB),
    planned=(Compared("arguments", 75 * GB, 75 * GB), Compared("total", 132 * GB, 139 * GB)),
    capacity_bytes=150 * GB,
    margin_bytes=7 * GB,
    sent=(
        GATHER,
        replace(GATHER, is_async=False, waited_s=0.01, source="<script>.py:1"),
        replace(GATHER, collective="all_reduce", axes=("data",), link="across hosts", calls=4),
    ),
    buffers=(Buffer(27 * GB, 13, "f32[48,1792,20608]{2,1,0}", "jaxfound/models/decoder.py:153"),),
    work_s=3.5,
    waited_s=10.0,
    took=Took(1.5, 0.5, 60.0, 21.0),
    notes=("a note",),
)


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs the command on a step that is compiled already: what is printed, its exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    monkeypatch.setattr(plan_compile, "target_of", lambda topology: Target((), "NVIDIA H200"))

    def run(*args, step=STEP):
        monkeypatch.setattr(plan_compile, "compile_step", lambda cfg, plan, target: step)
        with pytest.raises(SystemExit) as left:
            main(["plan", str(CONFIG), *map(str, args)])
        printed = capsys.readouterr()
        return printed.out + printed.err, left.value.code or 0

    return run


def test_the_plan_stands_beside_what_the_compiler_found(plan):
    out, code = plan(*TOPOLOGY, "--compile")
    assert code == 0
    assert "mesh: data=3 x fsdp=4 x tensor=2 (24 devices)" in out
    for line in (
        "compiled for 24 NVIDIA H200 of 3 hosts: traced in 1.5 s, lowered in 500 ms, compiled in "
        "60 s; 21 s of CPU time",
        "  arguments   75,000,000,000 B   75,000,000,000 B  exact",
        "  total      132,000,000,000 B  139,000,000,000 B  plan -5.0%",
        "   27.0 GB  jaxfound/models/decoder.py:153, 13 arrays, largest f32[48,1792,20608]",
        # 2 x 96 calls of 10 ms, of which 4 and 10 are waited for.
        "  fsdp  all_gather  inside a host  192 calls at 2 places  1 in background  192.0 GB  "
        "1.92 s  30% covered",
        "  data  all_reduce  across hosts   4 calls at 1 place     1 in background  4.0 GB    "
        "40 ms   60% covered",
        "at the published peaks: 3.5 s of work, 10 s waiting for collectives with nothing beside",
        "a note",
        "verdict of the compiler: fits, 4.0 GB to spare beside the 7.0 GB that the plan leaves",
    ):
        assert line in out


def test_a_step_that_does_not_fit_ends_with_one(plan):
    out, code = plan(*TOPOLOGY, "--compile", step=replace(STEP, capacity_bytes=140 * GB))
    assert code == 1
    assert "does not fit, 6.0 GB too much" in out
    unknown, code = plan(*TOPOLOGY, "--compile", step=replace(STEP, capacity_bytes=0))
    assert code == 0
    assert "compiler: not known" in unknown


def test_cudnns_workspace_counts_where_the_compiler_had_no_device(plan):
    out, code = plan(*TOPOLOGY, "--compile", step=replace(STEP, workspace_bytes=3 * GB))
    assert code == 0
    assert "  on the devices 3.0 GB more, by the plan: the workspace of cuDNN" in out
    assert (
        "fits, 1.0 GB to spare beside the 7.0 GB that the plan leaves free and cuDNN's 3.0" in out
    )
    out, code = plan(*TOPOLOGY, "--compile", step=replace(STEP, workspace_bytes=5 * GB))
    assert code == 1
    assert "does not fit, 1.0 GB too much" in out


def test_where_another_compiler_stands_in_the_plans_verdict_counts(plan):
    full = replace(STEP, stand_in="compiled for another", capacity_bytes=140 * GB)
    out, code = plan(*TOPOLOGY, "--compile", step=full)
    assert code == 0
    assert "compiled for another" in out
    assert "compiler: none" in out
    # What the backward pass keeps of every layer is more than a device has.
    out, code = plan(*TOPOLOGY, "--compile", "parallel.remat=none", step=full)
    assert code == 1


def test_json_holds_the_plan_and_the_compiled_step(plan):
    out, code = plan(*TOPOLOGY, "--compile", "--json")
    record = json.loads(out)
    assert code == 0
    assert record["mesh"]["fsdp"] == 4
    assert record["compiled"]["memory"]["total"] == 139 * GB
    assert [s["axes"] for s in record["compiled"]["sent"]] == [["fsdp"], ["fsdp"], ["data"]]


def test_the_page_needs_nothing_else_and_no_name_can_break_it(plan, tmp_path):
    page = tmp_path / "pages" / "plan.html"
    _, code = plan(*TOPOLOGY, "--compile", "--html", page)
    text = page.read_text()
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert code == 0
    assert {tag.tag for tag in root.iter()} & {"script", "link", "img", "iframe"} == set()
    assert "http" not in text
    shown = " ".join(root.itertext())
    for words in ("139.0 GB", "-5.0%", "decoder.py:153", "<script>.py:1", "all_reduce", "fits"):
        assert words in shown


def test_a_page_of_a_step_that_sends_nothing_says_so(plan, tmp_path):
    page = tmp_path / "plan.html"
    bare = replace(STEP, sent=(), buffers=(), work_s=None, waited_s=None, capacity_bytes=0)
    out, _ = plan(*TOPOLOGY, "--compile", "--html", page, step=bare)
    assert "no collective leaves a device" in out
    assert "None leaves a device." in page.read_text()


# Options that do not go together or cannot be compiled → what is said of them.
REFUSED = {
    ("--html", "x.html"): "--compile",
    ("--compile", "--search"): "give one",
    ("--compile", *TOPOLOGY, "parallel.pipeline=2"): "pipeline",
}


@pytest.mark.parametrize("args", REFUSED, ids=" ".join)
def test_what_cannot_be_compiled_is_refused_before_anything_is(plan, args):
    out, code = plan(*args)
    assert code == 2
    assert REFUSED[args] in out
