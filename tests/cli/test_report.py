"""`jaxfound report`: what the page says, and that no record, name or text can break it."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
import typer
from typer.testing import CliRunner

from jaxfound.cli.pages.chart import (
    Chart,
    Mark,
    Point,
    Series,
    decimated,
    draw,
    figure,
    moving_mean,
)
from jaxfound.cli.pages.markup import Markup, element, escaped
from jaxfound.cli.pages.scale import nice_step, number_text, seconds_text, tick_text, value_scale
from jaxfound.cli.report import report_command, write_report
from jaxfound.config.load import parse, save
from jaxfound.resources.metrics import MetricsWriter

NO_WARMUP = {"optimizer": {"warmup_steps": 0}}
HOSTILE = "</title><script>alert(1)</script>&\"'\x00\x1b\ud800\uffff]]>"


def train_fields(loss, **more):
    fields = {
        "loss": loss,
        "ahead_loss": loss + 0.5,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "load_imbalance": 1.5,
        "step_time_s": 0.25,
        "tokens_per_s": 1024.0,
        "idle_s": 0.0025,
    }
    return fields | more


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was stopped at step 30 and resumed from its checkpoint at 20."""
    path = tmp_path / "small-run"
    ticks = iter(range(1_700_000_000, 1_800_000_000))
    with MetricsWriter(path / "metrics.jsonl", clock=lambda: float(next(ticks))) as metrics:
        for step in (10, 20, 30):
            metrics.write("train", step=step, **train_fields(5 - step / 10))
        metrics.write("checkpoint", step=20, num_bytes=2_500_000, blocked_s=0.02, total_s=1.5)
        metrics.write("stopped", step=30, signal="SIGTERM", steps=40)
        metrics.write("resume", step=20, steps=40)
        metrics.write("train", step=30, **train_fields(math.nan, grad_norm=math.inf))
        metrics.write("non_finite", step=30, loss=math.nan, batch="bad_batches/step-30.npz")
        metrics.write("train", step=40, **train_fields(2 * math.log(2)))
        metrics.write("eval", step=40, eval_loss=3 * math.log(2), num_targets=512)
        metrics.write("checkpoint", step=40, num_bytes=2_500_000, blocked_s=0.03, total_s=1.0)
        metrics.write("finished", step=40)
        metrics.write("sample", step=40, prompt="The for", text=" statement")
    train = {"steps": 40, "batch_size": 4, "seq_len": 64}
    save(parse({"preset": "tiny-mla-moe", "train": train} | NO_WARMUP), path / "config.yaml")
    return path


def page_of(run):
    return write_report(run).read_text(encoding="utf-8")


def parsed(page):
    """The page as a tree: it is written so that an XML parser takes it too."""
    doctype, _, rest = page.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def words(page):
    return " ".join(" ".join(parsed(page).itertext()).split())


def figures(page):
    """The key figures as name -> (value, note)."""
    cards = parsed(page).findall(".//dl/div")
    return {c.find("dt").text: tuple("".join(d.itertext()) for d in c.findall("dd")) for c in cards}


def charts(page):
    found = parsed(page).findall(".//figure")
    return {f.find(".//h3").text: f.findall("svg") for f in found}


def write_lines(run, *records, tail=""):
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(r) + "\n" for r in records) + tail
    (run / "metrics.jsonl").write_text(text)


def test_the_head_of_the_page_holds_the_key_figures(run):
    found = figures(page_of(run))
    assert found["Train loss"] == ("1.386", "nats a token = 2.000 bits")
    assert found["Held-out loss"][0] == "2.079"
    assert "3.000 bits; lowest 2.079 at step 40" in found["Held-out loss"][1]
    assert found["Tokens"] == ("10,240", "40 of 40 steps, 256 tokens each")
    assert found["Tokens a second"][0] == "1,024"
    assert found["Step time"][0] == "250 ms"
    assert found["Outside the step"][0] == "1.00%"
    assert found["Checkpoints"] == ("2", "training waited 50 ms for them")


def test_checkpoints_interruptions_samples_and_config_are_told(run):
    text = words(page_of(run))
    for part in (
        "20 2.5 MB 20 ms 1.5 s",
        "stopped by SIGTERM",
        "resumed from this step",
        "not finite: update skipped, batch kept in bad_batches/step-30.npz",
        "The for statement",
        "kv_lora_rank: 32",
        "mla + moe, 4 layers",
    ):
        assert part in text


def test_records_that_a_resume_repeated_are_not_drawn(run):
    desc = charts(page_of(run))["Loss"][0].find("desc").text
    # 2.0 at step 30 was before the resume; the record after it was not finite.
    assert "train: 4.000 at step 10, 1.386 at step 40, lowest 1.386, highest 4.000" in desc
    assert "2 records of steps that were run again are not drawn." in words(page_of(run))


def test_interruptions_are_marked_in_every_chart(run):
    for svgs in charts(page_of(run)).values():
        for svg in svgs:
            marks = [g.attrib["class"] for g in svg.iter("g") if "mark" in g.get("class", "")]
            assert marks == ["mark resume", "mark bad", "mark stopped"]


def test_a_value_that_is_not_finite_breaks_the_curve_and_leaves_a_cross(run):
    svg = charts(page_of(run))["Loss"][0]
    crosses = [p.find("title").text for p in svg.findall("path[@class='cross']")]
    assert crosses == [
        "step 30: train is not finite",
        "step 30: tokens further ahead is not finite",
    ]
    train = svg.find("g[@class='curve c1 noisy']")
    assert len(train.findall("polyline")) == 2


def test_each_point_shows_its_value_under_the_pointer(run):
    svg = charts(page_of(run))["Loss"][0]
    titles = [g.find("title").text for g in svg.findall("g[@class='band']")]
    assert len(titles) == 3
    assert "step 40" in titles[-1]
    assert "train 1.386" in titles[-1]
    assert "held-out 2.079" in titles[-1]


def test_the_page_needs_nothing_but_itself(run):
    page = page_of(run)
    assert not re.search(r"""(?:src|href|srcset)\s*=|url\(|@import|<script|https?:""", page)
    assert "prefers-color-scheme: dark" in page


def test_a_screen_reader_gets_every_chart_as_a_sentence(run):
    for svgs in charts(page_of(run)).values():
        for svg in svgs:
            assert svg.attrib["role"] == "img"
            assert "at step 40" in svg.attrib["aria-label"]


def test_the_same_run_gives_the_same_page(run, tmp_path):
    first = page_of(run)
    assert write_report(run, out=tmp_path / "deep" / "x.html").read_text("utf-8") == first


def test_hostile_names_and_texts_are_shown_and_not_obeyed(tmp_path):
    run = tmp_path / "<img src=x onerror=alert(1)>&\"'"
    write_lines(
        run,
        {"event": "train", "step": 1, "loss": 2.0},
        {"event": "stopped", "step": 1, "signal": HOSTILE},
        {"event": "sample", "step": 1, "prompt": HOSTILE, "text": HOSTILE + HOSTILE},
        {"event": "non_finite", "step": 1, "batch": HOSTILE},
    )
    (run / "config.yaml").write_bytes(b"</pre><script>\xff")
    page = page_of(run)
    assert "<script" not in page
    assert "<img" not in page
    assert parsed(page).find(".//h1").text == run.name
    assert "</title><script>alert(1)</script>" in words(page)


ONE = {"event": "train", "step": 1, "time_s": 1.7e9, "loss": 3.0, "grad_norm": 1.0}
STATES = [
    pytest.param([], "not started", id="no records"),
    pytest.param([ONE], "running", id="one step"),
    pytest.param([ONE, {"event": "stopped", "step": 1, "signal": "SIGINT"}], "stopped", id="stop"),
    pytest.param(
        [ONE, {"event": "finished", "step": 1}, {"event": "sample", "step": 1}],
        "finished",
        id="a sample after the end",
    ),
    pytest.param(
        [ONE, {"event": "non_finite", "step": 2}, {"event": "checkpoint", "step": 2}],
        "not finite",
        id="a bad last step",
    ),
    pytest.param(
        [ONE, {"event": "stopped", "step": 1}, {"event": "resume", "step": 1}],
        "running",
        id="resumed",
    ),
    pytest.param(
        [{"event": "train", "step": 1, "loss": "NaN"}], "running", id="nothing that can be drawn"
    ),
    pytest.param(
        [{"event": "train", "step": s, "loss": v} for s, v in ((1, 1e308), (2, 1e-320), (3, 0))],
        "running",
        id="values at the ends of the format",
    ),
    pytest.param(
        [{"event": "train", "step": 5, "loss": "high", "time_s": None, "idle_s": [1]}],
        "running",
        id="fields of another type",
    ),
]


@pytest.mark.parametrize(("records", "status"), STATES)
def test_every_state_of_a_run_has_a_page(tmp_path, records, status):
    write_lines(tmp_path / "run", *records)
    page = page_of(tmp_path / "run")
    assert parsed(page).find(".//header/span").text == status
    assert "nan" not in "".join(page.split("</style>")[1:]).lower()


def test_a_torn_last_line_is_passed_over(tmp_path):
    write_lines(tmp_path / "run", ONE, tail='{"event": "train", "st')
    assert figures(page_of(tmp_path / "run"))["Train loss"][0] == "3.000"


def test_a_run_without_evaluation_says_so(tmp_path):
    write_lines(tmp_path / "run", ONE)
    assert figures(page_of(tmp_path / "run"))["Held-out loss"][1] == "not measured"


def test_a_damaged_line_is_named(tmp_path):
    write_lines(tmp_path / "run", ONE, tail="{broken\n")
    with pytest.raises(typer.BadParameter, match=r"metrics\.jsonl:2"):
        write_report(tmp_path / "run")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"neither metrics\.jsonl nor config\.yaml"):
        write_report(tmp_path)


def test_a_long_run_makes_a_page_that_stays_small(tmp_path):
    records = [
        {"event": "train", "step": s, **train_fields(2 + math.sin(s))} for s in range(1, 4_001)
    ]
    write_lines(tmp_path / "run", *records)
    page = page_of(tmp_path / "run")
    assert len(page) < 700_000
    assert "mean of 101 records" in words(page)


def test_the_command_says_where_the_page_is(run, tmp_path):
    app = typer.Typer(add_completion=False)
    app.command("report")(report_command)
    result = CliRunner().invoke(app, [str(run), "--out", str(tmp_path / "out.html")])
    assert result.exit_code == 0, result.output
    assert "out.html" in result.output
    assert (tmp_path / "out.html").exists()


def test_decimation_keeps_the_ends_and_every_extreme():
    points = [Point(s, math.sin(s)) for s in range(5000)]
    points[1234] = Point(1234, 99.0)
    points[2345] = Point(2345, -99.0)
    points[3456] = Point(3456, math.nan)
    kept = decimated(points, limit=100)
    assert len(kept) <= 100
    assert {points[0], points[-1], points[1234], points[2345], points[3456]} <= set(kept)
    assert [p.step for p in kept] == sorted(p.step for p in kept)


def test_the_moving_mean_of_a_straight_line_is_the_line():
    points = [Point(s, 2.0 * s) for s in range(400)]
    mean = moving_mean(Series("", points, "noisy"))
    # Sums of up to 400 values of size 800 in float64.
    assert [p.value for p in mean] == pytest.approx([p.value for p in points], abs=1e-9)


def test_one_point_is_drawn_inside_the_frame():
    svg = draw(Chart("t", "u", (Series("s", [Point(7, 3.0)]),)), width=560, height=280)
    circle = ElementTree.fromstring(svg).find("g[@class='curve c1 line']/circle")
    assert 58 < float(circle.attrib["cx"]) <= 546
    assert 26 < float(circle.attrib["cy"]) < 238


def test_a_chart_without_a_drawable_value_is_left_out():
    assert figure(Chart("t", "", (Series("s", [Point(1, math.inf)]),))) == ""
    assert figure(Chart("t", "", (), marks=(Mark(1, "bad", "x"),))) == ""


@pytest.mark.parametrize(
    ("low", "high", "base"),
    [(1, 5, None), (0, 0, None), (3, 3, 0.0), (-2, 7, None), (1e-9, 2e-9, 0.0), (0.5, 800, None)],
)
def test_a_scale_holds_its_values_and_has_round_ticks(low, high, base):
    scale = value_scale([low, high], start=0.0, stop=100.0, base=base)
    ticks = scale.ticks(about=5)
    assert 2 <= len(ticks) <= 12
    assert 0 <= scale.at(low) <= scale.at(high) <= 100


@pytest.mark.parametrize(
    ("rough", "nice"), [(0.9, 1.0), (1.0, 1.0), (1.1, 2.0), (2.1, 2.5), (30, 50), (0.007, 0.01)]
)
def test_a_step_between_ticks_is_a_round_number(rough, nice):
    assert nice_step(rough) == pytest.approx(nice)


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [
        (0, 5, "0"),
        (0.003, 0.004, "0.003"),
        (2e-4, 5e-4, "2e-4"),
        (1500, 2000, "1,500"),
        (12_500, 50_000, "12.5k"),
        (3e6, 4e6, "3M"),
    ],
)
def test_ticks_are_written_short(value, largest, text):
    assert tick_text(value, largest=largest) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2014"),
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (61.2, "61.2 s"),
        (150, "2 min 30 s"),
        (7260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_is_written_as_a_person_would(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2014"),
        (math.nan, "not finite"),
        (0, "0"),
        (12345.6, "12,346"),
        (1e-5, "1.000e-05"),
    ],
)
def test_a_number_has_four_digits_or_says_that_it_is_none(value, text):
    assert number_text(value) == text


def test_text_is_escaped_once_and_markup_not_at_all():
    inner = element("b", "<&>")
    assert element("p", inner, 'a"b', class_='"') == (
        '<p class="&quot;"><b>&lt;&amp;&gt;</b>a&quot;b</p>'
    )
    assert escaped(Markup("<i/>")) == "<i/>"
