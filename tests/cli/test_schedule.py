"""`jaxfound schedule`: the list, the drawing as text and as SVG, the counts, the refusals."""

import re
from xml.etree import ElementTree

import pytest

from jaxfound.cli.main import main
from jaxfound.cli.pages.schedule_picture import FILLS, TEXT_WIDTH, svg_drawing, text_drawing
from jaxfound.parallelism.pipeline.builders import SCHEDULES, make_schedule
from jaxfound.parallelism.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command: what is printed, what is complained of, and the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)

    def call(*args):
        with pytest.raises(SystemExit) as left:
            main(["schedule", *map(str, args)])
        printed = capsys.readouterr()
        return printed.out, printed.err, left.value.code

    return call


def drawing(name, num_ranks, num_microbatches, costs=None):
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return schedule, simulate(schedule, costs or Costs())


def test_without_a_name_every_schedule_is_listed_with_what_it_needs(run):
    out, _, code = run()
    assert code == 0
    for name, kind in SCHEDULES.items():
        assert re.search(rf"^{name} +{re.escape(kind.sentence)}$", out, re.MULTILINE)
        assert kind.needs in out


def test_1f1b_is_drawn_step_by_step(run):
    out, _, code = run("1f1b", "--stages", 3, "--microbatches", 4)
    assert code == 0
    assert out.splitlines()[1:8] == [
        "3 ranks, 4 micro-batches, 3 stages; F 1, I 1, W 1, B 2, F beside B 3",
        "",
        "time    0         5         10        15",
        "rank 0  F0F1F2        B0--F3B1--  B2--  B3--",
        "rank 1    F0F1    B0--F2B1--F3B2--  B3--",
        "rank 2      F0B0--F1B1--F2B2--F3B3--",
        "",
    ]


def test_bubble_peaks_slots_and_lockstep_are_printed(run):
    out, _, code = run("dualpipe", "--stages", 8, "--microbatches", 20, "--pair", 3)
    assert code == 0
    assert out.splitlines()[-5:] == [
        "as soon as it can   66 long, 9.1% of it bubble, efficiency 0.909",
        "in lockstep         72 long, 16.7% of it bubble, efficiency 0.833, 38 ticks",
        "bubble of a rank    6 on every rank",
        "in flight, at most  9 on every rank",
        "slots in lockstep   10 stage inputs, 2 gradients, 4 from I to W",
    ]


def test_lockstep_draws_the_wait_for_the_slowest_rank_of_a_tick(run):
    freely, _, _ = run("1f1b", "--stages", 2, "--microbatches", 3)
    together, _, _ = run("1f1b", "--stages", 2, "--microbatches", 3, "--lockstep")
    assert "rank 0  F0F1    B0--F2B1--  B2--\n" in freely
    assert "rank 0  F0F1B0--F2  B1--    B2--\n" not in freely
    assert "rank 0  F0F1    B0--F2  B1--    B2--\n" in together


def test_chunks_are_those_asked_for(run):
    out, _, code = run("interleaved", "--stages", 2, "--microbatches", 4, "--chunks", 3)
    assert code == 0
    assert "2 ranks, 4 micro-batches, 6 stages" in out


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_text_drawing_fits_and_shows_every_pass_once(name):
    schedule, simulation = drawing(name, 8, 32)
    lines = text_drawing(schedule, simulation)
    assert max(map(len, lines)) <= TEXT_WIDTH
    for rank, order in enumerate(schedule.orders):
        head = f"rank {rank}  "
        row = "".join(line.removeprefix(head) for line in lines if line.startswith(head))
        shown = re.findall(r"[A-Za-z]\d+", row)
        assert [int(label[1:]) for label in shown] == [a.microbatch for s in order for a in s]
        assert [label[0].upper() for label in shown] == [a.op for s in order for a in s]


def test_small_letters_are_a_ranks_later_chunk():
    lines = text_drawing(*drawing("dualpipev", 1, 2))
    assert lines[1] == "rank 0  F0f0F1b0--f1B0--b1--I1W1"


def test_a_drawing_of_uneven_costs_stays_readable():
    lines = text_drawing(*drawing("1f1b", 2, 3, Costs(6.7, 14.1, 0.01)))
    assert lines[1].startswith("rank 0  F0F1")
    assert max(map(len, lines)) <= TEXT_WIDTH


def test_the_svg_has_a_cell_for_every_pass_with_its_number_its_colour_and_its_words():
    schedule, simulation = drawing("dualpipe", 4, 10, Costs(pair=2.5))
    tree = ElementTree.fromstring(svg_drawing(schedule, simulation, title="dualpipe", note="a < b"))
    cells = {
        cell.find(f"{SVG}title").text: cell
        for cell in tree.iter(f"{SVG}rect")
        if cell.find(f"{SVG}title") is not None
    }
    assert len(cells) == sum(len(step) for order in schedule.orders for step in order)
    words = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"dualpipe", "a < b", *(str(m) for m in range(10)), "rank 3"} <= set(words)
    near = cells["F of micro-batch 0 at stage 0"]
    far = cells["F of micro-batch 5 at stage 3"]
    assert (near.get("fill"), far.get("fill")) == FILLS["F"]
    # F beside B: two halves of a cell, the F above.
    above = cells["F of micro-batch 3 at stage 0"]
    below = cells["B of micro-batch 6 at stage 3"]
    assert above.get("x") == below.get("x")
    assert float(above.get("y")) + float(above.get("height")) == float(below.get("y"))


def test_cells_lie_where_the_simulation_has_them():
    schedule, simulation = drawing("1f1b", 3, 5)
    tree = ElementTree.fromstring(svg_drawing(schedule, simulation, title="t", note="n"))
    cells = [c for c in tree.iter(f"{SVG}rect") if c.find(f"{SVG}title") is not None]
    left = min(float(c.get("x")) for c in cells)
    right = max(float(c.get("x")) + float(c.get("width")) for c in cells)
    unit = (right - left) / simulation.makespan
    drawn = [(float(c.get("x")) - left, float(c.get("width"))) for c in cells]
    timed = [one for steps in simulation.steps for one in steps]
    assert drawn == [
        (pytest.approx(start * unit, abs=0.2), pytest.approx((end - start) * unit, abs=0.2))
        for _, start, end in timed
    ]


def test_the_svg_is_written_where_it_was_asked_for(run, tmp_path):
    path = tmp_path / "drawn.svg"
    out, _, code = run("zero_bubble", "--svg", path)
    assert code == 0
    assert f"drawn in {path}" in out.replace("\n", "")
    assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"
    assert "zero_bubble, 4 ranks, 8 micro-batches, 4 stages" in path.read_text("utf-8")


REFUSED = [
    (("dualpipe", "--stages", 3), "error: dualpipe: num_ranks=3 is odd"),
    (("interleaved", "--microbatches", 6), "error: interleaved: num_microbatches=6"),
    (("dualpip",), "error: no schedule is called 'dualpip'"),
    (("gpipe", "--forward", 0), "--forward=0"),
    (("gpipe", "--pair", "nan"), "--pair=nan"),
]


@pytest.mark.parametrize(("args", "named"), REFUSED)
def test_what_cannot_be_drawn_is_refused_with_exit_code_2(run, args, named):
    out, err, code = run(*args)
    assert (out, code) == ("", 2)
    assert named in err
