"""A run that was stopped and resumed is the run that was not (cases S10, S11, S12)."""

import shutil
from itertools import accumulate
from pathlib import Path

import pytest

from jaxfound.config import ConfigError, RunConfig
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.metrics import read_metrics
from jaxfound.training import TrainingError
from jaxfound.training.run import run_directory
from tests.training.tiny import MOE, of_kind, run, same, state_at, tiny

NUMBERS = ("loss", "learning_rate", "grad_norm", "ahead_loss", "load_imbalance")
# Steps of each call but the last. The traceable corpus fills some 130 bins, so a batch of 8
# crosses an epoch's edge at step 15-17.
STOPS = {
    "once": (7,),
    # What three stops show as well.
    "twice": pytest.param((7, 1), marks=pytest.mark.slow),
    "three times": (5, 10, 1),
    "at an epoch's edge": (15, 1, 1),
}
# A router's bias and a module that looks ahead, and little else to compile.
EXPERTS = {**MOE, "num_layers": 1, "num_dense_layers": 0}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A dense run that nobody stopped."""
    cfg = tiny(tmp_path_factory.mktemp("straight"), "checkpoint.every=8")
    return cfg, run(cfg)


def beside(whole: RunConfig, folder: Path, *overrides: str, **model) -> RunConfig:
    """A run in `folder` on the data of `whole`."""
    return tiny(folder, f"data.prepared_dir={whole.data.prepared_dir}", *overrides, **model)


@pytest.fixture(scope="module", params=STOPS.values(), ids=STOPS.keys())
def resumed(request, straight, tmp_path_factory):
    """The same run, stopped after so many steps: its config, the stops and all its events."""
    cfg, events = beside(straight[0], tmp_path_factory.mktemp("resumed")), []
    for steps in request.param:
        events += run(cfg, stop_after=steps)
    return cfg, list(accumulate(request.param)), events + run(cfg)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(straight, resumed):
    whole, events = straight
    cfg, _, parts = resumed
    for key in NUMBERS:
        assert of_kind(parts, "train", key) == of_kind(events, "train", key)
    assert same(state_at(cfg, 20), state_at(whole, 20))


def test_a_resumed_run_draws_the_masks_of_dropout_that_it_would_have_drawn(straight, tmp_path):
    runs = []
    for name in ("straight", "resumed"):
        cfg = beside(straight[0], tmp_path / name, "train.steps=6", "model.dropout=0.1")
        if name == "resumed":
            run(cfg, stop_after=4)
        runs.append((cfg, run(cfg)))
    (whole, events), (cfg, parts) = runs
    assert same(state_at(cfg, 6), state_at(whole, 6))
    assert of_kind(parts, "train", "loss") == of_kind(events, "train", "loss")[4:]
    # Six steps of a run without dropout end elsewhere.
    assert of_kind(events, "train", "loss") != of_kind(straight[1], "train", "loss")[:6]


def test_the_record_of_a_resumed_run_holds_each_step_once(resumed):
    cfg, stops, _ = resumed
    records = list(read_metrics(run_directory(cfg).metrics))
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["event"] == "resume"] == stops


def test_the_record_of_a_run_that_begins_again_holds_each_step_once(straight, tmp_path):
    cfg = beside(straight[0], tmp_path, "train.steps=3", "optimizer.warmup_steps=1")
    run(cfg)
    shutil.rmtree(run_directory(cfg).checkpoints)
    run(cfg)
    records = list(read_metrics(run_directory(cfg).metrics))
    assert [r["step"] for r in records if r["event"] == "train"] == [1, 2, 3]
    assert [r["step"] for r in records if r["event"] == "resume"] == [0]


def test_adams_count_goes_on_where_it_was(resumed):
    cfg, _, _ = resumed
    counts = [a for name, a in state_at(cfg, 20).items() if "count" in name]
    assert [int(c) for c in counts] == [20]


def test_a_resumed_moe_run_is_bit_equal_router_bias_and_moments_included(straight, tmp_path):
    options = ("checkpoint.every=8", "train.eval_batches=0")
    whole = beside(straight[0], tmp_path, "name=whole", *options, model=EXPERTS)
    cfg = beside(straight[0], tmp_path, "name=stopped", *options, model=EXPERTS)
    run(whole)
    shutil.copytree(run_directory(whole).path, run_directory(cfg).path)
    for later in ("16", "20"):
        shutil.rmtree(run_directory(cfg).checkpoints / later)
    assert [e.step for e in run(cfg) if e.kind == "resume"] == [8]
    resumed = state_at(cfg, 20)
    assert same(resumed, state_at(whole, 20))
    assert any("router.bias" in name and (a != 0).any() for name, a in resumed.items())


def test_the_schedule_does_not_depend_on_accumulation(straight, tmp_path):
    whole, events = straight
    cfg = beside(whole, tmp_path, "parallel.num_microbatches=4")
    run(cfg, stop_after=7)
    rates = of_kind(events, "train", "learning_rate")
    assert of_kind(run(cfg), "train", "learning_rate") == rates[7:]


@pytest.mark.multidevice
def test_a_run_and_its_schedule_go_on_with_another_number_of_devices(straight, tmp_path):
    whole, events = straight
    cfg = beside(whole, tmp_path)
    run(cfg, stop_after=7)
    resumed = run(cfg, num_devices=4)
    losses = of_kind(events, "train", "loss")[7:]
    # Sums over devices are in another order: equal to rounding, not to the bit.
    assert of_kind(resumed, "train", "loss") == pytest.approx(losses, rel=1e-4)
    rates = of_kind(events, "train", "learning_rate")[7:]
    assert of_kind(resumed, "train", "learning_rate") == rates


def test_a_finished_run_says_so_and_touches_no_file(straight):
    cfg, _ = straight
    folder = run_directory(cfg).path
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = run(cfg)
    assert [e.kind for e in again] == ["plan", "finished"]
    assert again[-1].values["again"] is True
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(straight, tmp_path):
    whole, _ = straight
    more = beside(whole, tmp_path, "train.steps=22")
    shutil.copytree(run_directory(whole).path, run_directory(more).path)
    assert [e.step for e in run(more) if e.kind == "train"] == [21, 22]


def test_asking_for_fewer_steps_than_are_saved_is_refused(straight):
    cfg, _ = straight
    fewer = cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 10})})
    with pytest.raises(TrainingError, match=r"holds step 20, but train\.steps=10"):
        run(fewer)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=1", "seed was 0, is 1"),
        ("train.batch_size=4", "train.batch_size was 8, is 4"),
        ("model.embed_dim=32", "model was"),
    ],
)
def test_a_resume_that_would_change_the_data_or_the_model_is_refused(straight, override, named):
    cfg, _ = straight
    folder = run_directory(cfg).path.parent.parent
    changed = beside(cfg, folder, override)
    with pytest.raises(ConfigError, match=named):
        run(changed)


def test_a_resume_on_another_text_at_the_same_place_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"number {i} of a text that goes on" for i in range(400)))
    cfg = tiny(tmp_path, f"data.source={text}", "train.steps=4", "checkpoint.every=2")
    run(cfg, stop_after=2)
    before = text.read_text()
    text.write_text(before + "\n\nand one more")
    with pytest.raises(ConfigError, match=r"would go on in .*repeat or skip data.*init_from="):
        run(cfg)
    text.write_text(before)
    # A start that was killed while it wrote.
    with run_directory(cfg).starts.open("a") as starts:
        starts.write('{"event": "sta')
    assert run(cfg)[-1].kind == "finished"


def test_every_checkpoint_holds_the_step_its_name_says(straight):
    cfg, _ = straight
    with CheckpointManager(run_directory(cfg).checkpoints, keep=0) as checkpoints:
        steps = checkpoints.steps()
        positions = [checkpoints.metadata(s)["data_position"] for s in steps]
    assert steps == (8, 16, 20)
    assert positions == [8, 16, 20]
    assert [int(state_at(cfg, s)["['step']"]) for s in steps] == [8, 16, 20]
