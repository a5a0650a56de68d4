"""A run that was stopped and resumed is the run that was not (cases S10, S11, S12)."""

import pytest

from jaxfound.config import ConfigError
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.metrics import read_metrics
from jaxfound.training import TrainingError
from jaxfound.training.run import run_directory
from tests.training.tiny import MOE, of_kind, run, same, state_at, tiny

NUMBERS = ("loss", "learning_rate", "grad_norm", "ahead_loss", "load_imbalance")
# The traceable corpus fills some 130 bins, so a batch of 8 crosses an epoch's edge at step 15-17.
STOPS = {"once": (7,), "twice": (7, 1), "three times": (5, 10, 1), "at an epoch's edge": (15, 1, 1)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A dense and an MLA + MoE + MTP run that nobody stopped."""
    folder = tmp_path_factory.mktemp("straight")
    runs = {}
    for name, model in (("dense", None), ("moe", MOE)):
        cfg = tiny(folder, f"name={name}", model=model)
        runs[name] = (cfg, run(cfg))
    return runs


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS.keys())
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(straight, tmp_path, stops):
    whole, events = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}")
    parts = []
    for steps in stops:
        parts += run(cfg, stop_after=steps)
    parts += run(cfg)
    for key in NUMBERS:
        assert of_kind(parts, "train", key) == of_kind(events, "train", key)
    assert same(state_at(cfg, 20), state_at(whole, 20))


def test_a_resumed_moe_run_is_bit_equal_router_bias_and_moments_included(straight, tmp_path):
    whole, _ = straight["moe"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}", model=MOE)
    run(cfg, stop_after=7)
    run(cfg, stop_after=8)
    run(cfg)
    resumed = state_at(cfg, 20)
    assert same(resumed, state_at(whole, 20))
    assert any("router.bias" in name and (a != 0).any() for name, a in resumed.items())


def test_the_record_of_a_resumed_run_holds_each_step_once(straight, tmp_path):
    whole, _ = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}")
    run(cfg, stop_after=7)
    run(cfg)
    records = list(read_metrics(run_directory(cfg).metrics))
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["event"] == "resume"] == [7]


def test_the_schedule_and_adams_count_go_on_where_they_were(straight, tmp_path):
    whole, events = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}")
    rates = []
    for steps in (7, 8, None):
        rates += of_kind(run(cfg, stop_after=steps), "train", "learning_rate")
    assert rates == of_kind(events, "train", "learning_rate")
    counts = [a for name, a in state_at(cfg, 20).items() if "count" in name]
    assert [int(c) for c in counts] == [20]


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("overrides", "num_devices"), [(("parallel.num_microbatches=4",), 1), ((), 4)]
)
def test_the_schedule_does_not_depend_on_accumulation_or_devices(
    straight, tmp_path, overrides, num_devices
):
    whole, events = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}", *overrides)
    run(cfg, stop_after=7, num_devices=num_devices)
    resumed = run(cfg, num_devices=num_devices)
    assert (
        of_kind(resumed, "train", "learning_rate")
        == (of_kind(events, "train", "learning_rate")[7:])
    )


@pytest.mark.multidevice
def test_a_run_goes_on_with_another_number_of_devices(straight, tmp_path):
    whole, events = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}")
    run(cfg, stop_after=7)
    resumed = run(cfg, num_devices=4)
    losses = of_kind(events, "train", "loss")[7:]
    # Sums over devices are in another order: equal to rounding, not to the bit.
    assert of_kind(resumed, "train", "loss") == pytest.approx(losses, rel=1e-4)


def test_a_finished_run_says_so_and_touches_no_file(straight):
    cfg, _ = straight["dense"]
    folder = run_directory(cfg).path
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = run(cfg)
    assert [e.kind for e in again] == ["plan", "finished"]
    assert again[-1].values["again"] is True
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(straight, tmp_path):
    whole, _ = straight["dense"]
    cfg = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}", "train.steps=6")
    run(cfg)
    more = tiny(tmp_path, f"data.prepared_dir={whole.data.prepared_dir}", "train.steps=8")
    assert [e.step for e in run(more) if e.kind == "train"] == [7, 8]


def test_asking_for_fewer_steps_than_are_saved_is_refused(straight, tmp_path):
    cfg, _ = straight["dense"]
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
    cfg, _ = straight["dense"]
    folder = run_directory(cfg).path.parent.parent
    changed = tiny(folder, "name=dense", f"data.prepared_dir={cfg.data.prepared_dir}", override)
    with pytest.raises(ConfigError, match=named):
        run(changed)


def test_every_checkpoint_holds_the_step_its_name_says(tmp_path):
    cfg = tiny(tmp_path, "train.steps=5", "checkpoint.every=2")
    run(cfg)
    with CheckpointManager(run_directory(cfg).checkpoints, keep=0) as checkpoints:
        steps = checkpoints.steps()
        positions = [checkpoints.metadata(s)["data_position"] for s in steps]
    assert steps == (2, 4, 5)
    assert positions == [2, 4, 5]
    assert [int(state_at(cfg, s)["['step']"]) for s in steps] == [2, 4, 5]
