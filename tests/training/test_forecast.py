"""What a plan says beside the first steps: once, with its error, or why nothing is said."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxfound.config import parse
from jaxfound.data import Batch
from jaxfound.models import describe
from jaxfound.parallelism import make_plan
from jaxfound.parallelism.mesh import OnMesh
from jaxfound.resources.topology import Topology
from jaxfound.training.compiled_step import Memory
from jaxfound.training.events import Event
from jaxfound.training.forecast import (
    CHECK_AFTER,
    Checked,
    forecast_of,
    make_check,
    report_lines,
    with_check,
)
from jaxfound.training.state import TrainState

MEMORY = Memory(arguments=900, outputs=500, aliased=500, temporaries=300, peak=1200)


def plan(topology, *keys):
    values = {"preset": "tiny-dense", "train": {"steps": 9, "batch_size": 8, "seq_len": 128}}
    cfg = parse(values, keys)
    return make_plan(cfg, Topology.parse(topology), params=describe(cfg.model))


def checked(topology="1:h200", *keys, **changes):
    values = {"steps": 20, "step_s": 1e-3, "memory": MEMORY, "peak_bytes": 0, "measured_s": {}}
    return Checked(forecast=forecast_of(plan(topology, *keys)), **{**values, **changes})


def test_terms_add_up_to_the_plans_step_and_kinds_to_its_ledger():
    made = plan("8:h200", "parallel.fsdp=8")
    found = forecast_of(made)
    assert found.step_s == pytest.approx(made.compute_s + made.wire_s)
    assert set(found.terms_s) == {"products", "attention", "memory", "collectives"}
    assert found.total_bytes == made.ledger.total_bytes - made.ledger.of("margin")
    assert found.refused == ""


def test_stages_have_a_term_for_their_waiting():
    keys = ("parallel.pipeline=2", "parallel.num_microbatches=2")
    assert forecast_of(plan("2:h200", *keys)).terms_s["waiting"] > 0


def test_without_a_peak_no_time_is_predicted_and_it_is_said_why():
    found = checked("1:cpu")
    assert found.forecast.step_s is None
    assert found.seconds_beside == ()
    assert "no peak is on record for cpu" in "\n".join(report_lines(found))
    # Links that are not known are no reason to leave them out of the sum.
    alone = checked("1:h200").forecast
    assert (alone.refused, "collectives" in alone.terms_s) == ("", False)


def test_memory_is_beside_the_compiler_and_the_allocator_where_it_tells():
    rows = {row.what: row for row in checked(peak_bytes=1000).bytes_beside}
    planned = checked().forecast
    assert rows["arguments"].measured == 900
    assert rows["inside the step"].measured == 300
    assert rows["the program"] == ("the program", planned.total_bytes, 1200)
    assert rows["peak of the allocator"].error == pytest.approx(planned.total_bytes / 1000 - 1)
    assert "peak of the allocator" not in {row.what for row in checked().bytes_beside}


def test_a_plan_that_is_off_is_told_from_one_that_is_not():
    right = checked(step_s=checked().forecast.step_s * 1.14)
    wrong = checked(step_s=checked().forecast.step_s * 1.25)
    step = [list(report_lines(one))[-1] for one in (right, wrong)]
    assert step[0].endswith("-12.3%")
    assert step[1].endswith("-20.0% more than 15% off")


def test_terms_stand_beside_those_of_a_profile():
    found = checked(measured_s={"products": 5e-4, "idle": 1e-4})
    rows = {row.what: row for row in found.seconds_beside}
    assert rows["products"].measured == 5e-4
    assert rows["attention"].measured is None
    assert (rows["idle"].planned, rows["idle"].measured) == (0.0, 1e-4)


def test_a_check_is_read_back_as_it_was():
    found = checked(measured_s={"products": 5e-4})
    assert Checked.from_data(json.loads(json.dumps(found.as_data()))) == found


def test_a_check_asks_the_program_that_runs_already():
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    cut = NamedSharding(mesh, PartitionSpec("fsdp"))
    weights, rows = (jax.device_put(jnp.arange(n, dtype=jnp.float32), cut) for n in (64, 8))
    state = TrainState(**{**{key: {} for key in TrainState._fields}, "params": {"w": weights}})
    batch = Batch(*[rows] * 5)

    def add(state, batch):
        return state._replace(params={"w": state.params["w"] + batch.tokens.sum()}), None

    jitted = jax.jit(add, donate_argnums=0, out_shardings=(cut, None))
    step = OnMesh(jitted, mesh)
    check = make_check(plan("2:h200", "parallel.fsdp=2"), step, state, batch)
    for _ in range(2):
        state, _ = step(state, batch)
    compiled = []
    hear = lambda event, seconds, **_: compiled.append(event)
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        found = check(20, 0.1)
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    assert [event for event in compiled if "compile" in event] == []
    # Half of both on each device.
    assert found.memory.arguments == 4 * (32 + 4)
    assert (found.steps, found.step_s) == (20, 0.1)


def events(num, *, step_s=0.1):
    for step in range(1, num + 1):
        # The first one compiles.
        yield Event("step", step, {"step_time_s": 9.0 if step == 1 else step_s * step})
    return "state"


def run(num, *, last_step):
    """Kinds and steps of all events, what the check was asked, and what the attempt returned."""
    asked, seen = [], []

    def check(steps, step_s):
        asked.append((steps, step_s))
        return checked()

    def attempt():
        returned = yield from with_check(events(num), check=check, last_step=last_step)
        seen.append(returned)

    told = [(event.kind, event.step) for event in attempt()]
    return told, asked, seen


def test_a_plan_is_checked_once_by_the_steps_after_the_first():
    told, asked, returned = run(CHECK_AFTER + 9, last_step=1000)
    assert told[CHECK_AFTER : CHECK_AFTER + 2] == [
        ("step", CHECK_AFTER + 1),
        ("planned", CHECK_AFTER + 1),
    ]
    assert sum(kind == "planned" for kind, _ in told) == 1
    # Steps 2 to 21 of 0.1 s times their number.
    assert asked == [(CHECK_AFTER, pytest.approx(1.15))]
    assert returned == ["state"]


@pytest.mark.parametrize(("num", "is_checked"), [(3, False), (4, True)])
def test_a_short_run_is_checked_at_its_end_if_it_has_steps_to_tell_by(num, is_checked):
    told, asked, _ = run(num, last_step=num)
    assert (("planned", num) in told) == bool(asked) == is_checked
