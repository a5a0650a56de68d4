"""The memory ledger is near what a compiler makes of a step, with a device and without."""

import json
from pathlib import Path

import pytest

from jaxfound.config.load import parse
from jaxfound.models import describe
from jaxfound.parallelism import make_plan
from jaxfound.resources.topology import Topology
from jaxfound.training.events import TrainingError
from jaxfound.training.ledger_record import (
    CASES,
    LIMIT,
    Case,
    Compiled,
    as_record,
    compiled_bytes,
    compiled_in,
    plan_of,
    row_of,
    rows_of,
)
from pallas_kernels import deviceless

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
RECORD = json.loads((BENCHMARKS / "ledger.json").read_text("utf-8"))
BY_NAME = {row["name"]: row for row in RECORD["rows"]}
REASON = deviceless.missing()


@pytest.mark.parametrize("name", BY_NAME)
def test_the_ledger_is_as_near_to_the_compiler_as_the_record_says(name):
    (row,) = rows_of([name], recorded=compiled_in(RECORD))
    assert row.is_right, f"{row.planned:,} B planned, {row.compiled.total:,} B compiled"
    # A ledger that has changed is written down again: `jaxfound bench ledger --recorded`.
    assert row.planned == BY_NAME[name]["planned"]
    assert row.workspace == BY_NAME[name]["workspace"]


def test_every_layout_of_the_table_is_recorded():
    assert set(BY_NAME) == set(CASES)


MEASURED = [
    (path.stem, row)
    for path in sorted(BENCHMARKS.glob("pipeline-h200x2*.json"))
    for row in json.loads(path.read_text("utf-8"))["rows"]
    if "memory" in row
]


@pytest.mark.parametrize(("record", "row"), MEASURED, ids=[f"{p}-{r['name']}" for p, r in MEASURED])
def test_the_ledger_with_its_workspace_is_what_h200s_were_asked_for(record, row):
    shapes = json.loads((BENCHMARKS / f"{record}.json").read_text("utf-8"))["shapes"]
    train = {"steps": 1, "batch_size": shapes["batch_size"], "seq_len": shapes["seq_len"]}
    model = {"num_layers": row["num_layers"], "vocab_size": shapes["vocab_size"]}
    cfg = parse(
        {"preset": "llama3-8b", "train": train, "model": model, "parallel": row["parallel"]}
    )
    topology = Topology.parse(f"{row['num_devices']}:h200")
    ledger = make_plan(cfg, topology, params=describe(cfg.model)).ledger
    compiled = row["planned"][-1]["compiled"]
    assert ledger.argument_bytes == row["memory"]["arguments"]
    # Three times nearer than the limit: XLA asked cuDNN here.
    planned = ledger.total_bytes - ledger.of("margin")
    assert planned == pytest.approx(compiled, rel=LIMIT / 3)


def test_a_row_is_wrong_beyond_the_limit_or_with_other_arguments():
    case = Case("tiny-dense", "1:h200", "train.batch_size=8 train.seq_len=128")
    plan = plan_of(case)
    arguments = plan.ledger.argument_bytes
    planned = plan.ledger.total_bytes - plan.ledger.of("margin") - plan.ledger.of("workspace")

    def row(arguments, total):
        return row_of("", case, plan=plan, compiled=Compiled(arguments, total))

    assert row(arguments, planned).is_right
    assert not row(arguments + 1, planned).is_right
    # Below a gibibyte the total may be anything; above, it may not.
    assert row(arguments, 2 * planned).is_right
    assert not row(arguments, 2**30).is_right
    assert row(arguments, 2 * planned).error == pytest.approx(-0.5)


def test_a_record_is_read_back_as_it_was_written():
    name = "dense, remat none"
    (row,) = rows_of([name], recorded=compiled_in(RECORD))
    record = json.loads(json.dumps(as_record([row], jaxlib="1.2.3")))
    assert compiled_in(record) == {name: row.compiled}
    assert (record["jaxlib"], record["rows"][0]["error"]) == ("1.2.3", row.error)


def test_a_case_of_no_such_name_is_refused_with_those_there_are():
    with pytest.raises(TrainingError, match=r"no case is called .fsdp 9.*llama3-8b, fsdp 8"):
        next(rows_of(["fsdp 9"]))


def test_no_other_compiler_stands_in(monkeypatch):
    monkeypatch.setattr(deviceless, "missing", lambda: "there is no plugin")
    case = CASES["dense, remat none"]
    with pytest.raises(TrainingError, match=r"nothing to compare with: .*there is no plugin"):
        compiled_bytes(case, plan_of(case))


# Sizes of the table's rows, with fewer layers.
QUICK = {
    "one device": Case(
        "llama3-8b",
        "1:h200",
        "model.num_layers=2 model.vocab_size=8192 train.seq_len=4096 train.batch_size=2 "
        "parallel.num_microbatches=2 parallel.remat=full",
    ),
    "fsdp 2, tensor 2": Case(
        "llama3-8b",
        "4:h200",
        "model.num_layers=4 model.vocab_size=8192 train.seq_len=4096 train.batch_size=4 "
        "parallel.num_microbatches=2 parallel.remat=full parallel.fsdp=2 parallel.tensor=2",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("name", QUICK)
def test_a_step_that_is_compiled_now_is_within_the_limit(name):
    plan = plan_of(QUICK[name])
    compiled = compiled_bytes(QUICK[name], plan)
    row = row_of(name, QUICK[name], plan=plan, compiled=compiled)
    assert compiled.total > 2**30
    assert row.is_right, f"{row.planned:,} B planned, {compiled.total:,} B compiled"


@pytest.mark.parametrize("name", BY_NAME)
def test_the_page_on_plans_quotes_the_record(name):
    row, page = BY_NAME[name], BENCHMARKS.parent / "howto" / "read-a-plan.md"
    (line,) = [x for x in page.read_text("utf-8").splitlines() if x.startswith(f"| {name} |")]
    (compiled,) = [x.compiled.total for x in rows_of([name], recorded=compiled_in(RECORD))]
    _, _, _, planned, theirs, off, *_ = (word.strip() for word in line.split("|"))
    assert (planned, theirs) == (f"{row['planned'] / 1e9:.2f}", f"{compiled / 1e9:.2f}")
    assert off == f"{row['error']:+.1%}".replace("%", " %")
