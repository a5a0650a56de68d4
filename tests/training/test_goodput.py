"""Seconds of a run by what they went into: they sum to the wall clock, whatever happened."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxfound.config.load import save
from jaxfound.resources.metrics import read_metrics
from jaxfound.resources.pulse import PHASES, Pulse
from jaxfound.training.goodput import account, number_of
from jaxfound.training.run import run_directory
from jaxfound.training.time_ledger import (
    ACTIVITIES,
    ACTIVITY_OF,
    Activity,
    TimeLedger,
    TimeLedgerFile,
)
from tests.training.tiny import run, tiny

# The loop asks once a step whether to stop; the seventh time it is killed.
KILLED = """
import os, signal, sys
from jaxfound.config.load import load
from jaxfound.training import train
asked = []
def stop():
    asked.append(1)
    if len(asked) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""
list(train(load(sys.argv[1]), stop=stop))
"""


class FakeClock:
    """Time passes when it is told to."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


def begin(step, *, at, began_s):
    return {"event": "begin", "step": step, "time_s": at, "began_s": began_s}


def spans(begin, end, *, at, **seconds):
    return {"event": "spans", "step": end, "time_s": at, "from_step": begin, "seconds": seconds}


def test_every_second_belongs_to_one_activity():
    clock = FakeClock()
    ledger = TimeLedger(clock=clock, unix=clock)
    spent: dict[Activity, int] = {"restore": 2, "compile": 3, "step": 5, "data_wait": 7}
    for activity, seconds in spent.items():
        ledger.enter(activity)
        clock.now_s += seconds
    assert ledger.take() == {"init": 0, "restore": 2, "compile": 3, "step": 5, "data_wait": 7}
    clock.now_s += 1
    assert ledger.take() == {"data_wait": 1}


def test_phases_of_the_main_thread_are_activities():
    clock = FakeClock()
    ledger, pulse = TimeLedger(clock=clock, unix=clock), Pulse(clock=clock)
    pulse.hears = ledger.hear
    for number, phase in enumerate(PHASES):
        pulse.enter(phase, step=number)
        clock.now_s += 2**number
    assert ledger.step == len(PHASES) - 1
    spent = ledger.take()
    for activity in ACTIVITIES:
        expected = sum(2**n for n, phase in enumerate(PHASES) if ACTIVITY_OF[phase] == activity)
        assert spent[activity] == expected


def test_steps_done_again_are_lost_and_the_time_between_attempts_is_down():
    found = account(
        [
            begin(0, at=101, began_s=100),
            spans(0, 0, at=110, init=4, compile=6),
            spans(0, 10, at=160, step=40, data_wait=10),
            # Killed: ten steps of these were not saved.
            spans(10, 30, at=180, step=16, data_wait=4),
            begin(20, at=205, began_s=200),
            spans(20, 20, at=210, init=5, restore=5),
            spans(20, 40, at=250, step=30, eval=8, checkpoint_block=2),
        ]
    )
    assert found.wall_s == 150
    assert found.seconds == {
        **dict.fromkeys(ACTIVITIES, 0),
        **{"init": 9, "restore": 5, "compile": 6, "eval": 8, "checkpoint_block": 2},
        **{"step": 40 + 8 + 30, "data_wait": 10 + 2, "lost_steps": 10, "down": 20},
    }
    assert (found.attempts, found.steps, found.lost_steps) == (2, 40, 10)
    assert found.unexplained_s == 0
    assert found.share == 78 / 150


def test_a_step_lost_twice_is_counted_twice_and_kept_once():
    starts = [(0, 0), (4, 100), (2, 200)]
    records = []
    for first, at in starts:
        records += [begin(first, at=at, began_s=at), spans(first, first + 6, at=at + 6, step=6)]
    found = account(records)
    # 0-6 keeps two steps, 4-10 none, 2-8 all: eight steps.
    assert (found.steps, found.lost_steps) == (8, 10)
    assert found.seconds["step"] == 8
    assert found.unexplained_s == 0


def test_what_the_file_says_sums_to_the_clock(tmp_path):
    ledger = TimeLedger()
    with TimeLedgerFile(tmp_path / "goodput.jsonl", ledger, first_step=3) as file:
        for _ in range(3):
            ledger.enter("step")
            time.sleep(0.02)
            ledger.step += 1
            file.write()
    found = account(read_metrics(tmp_path / "goodput.jsonl"))
    assert found.steps == 3
    assert found.seconds["step"] >= 0.06
    assert abs(found.unexplained_s) < 0.01 * found.wall_s


def test_no_attempt_is_an_error():
    with pytest.raises(ValueError, match="no attempt is on record"):
        account([])


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """A run killed in its seventh step, with the fourth saved, and then finished."""
    folder = tmp_path_factory.mktemp("killed")
    cfg = tiny(folder, "train.steps=10", "checkpoint.every=4", "train.eval_batches=0")
    save(cfg, folder / "run.yaml")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder / "run.yaml")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return cfg, killed, run(cfg)


def test_a_run_that_was_killed_and_resumed_accounts_for_its_wall_clock(killed_and_resumed):
    cfg, killed, _ = killed_and_resumed
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = account(read_metrics(run_directory(cfg).goodput))
    assert abs(found.unexplained_s) < 0.01 * found.wall_s
    assert (found.attempts, found.steps) == (2, 10)
    # Steps 5 and 6 were on record (log_every=1) when the seventh was killed, 4 was saved; the
    # record of a step comes when the next has been handed over.
    assert found.lost_steps in (1, 2)
    for activity in ("init", "compile", "step", "data_wait", "restore", "checkpoint_block", "down"):
        assert found.seconds[activity] > 0, activity


def test_records_of_an_attempt_follow_each_other_from_its_first_step(killed_and_resumed):
    cfg, _, _ = killed_and_resumed
    records = list(read_metrics(run_directory(cfg).goodput))
    begun = [number for number, r in enumerate(records) if r["event"] == "begin"]
    assert [records[number]["step"] for number in begun] == [0, 4]
    for first, end in zip(begun, [*begun[1:], len(records)], strict=True):
        before, after = records[first : end - 1], records[first + 1 : end]
        assert [r["from_step"] for r in after] == [r["step"] for r in before]
        assert all(number_of(r, "step") >= number_of(r, "from_step") for r in after)


def test_the_table_ends_with_the_share_of_steps_that_stayed(
    killed_and_resumed, capsys, monkeypatch
):
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    from jaxfound.cli.main import main

    cfg, _, _ = killed_and_resumed
    folder = str(run_directory(cfg).path)
    with pytest.raises(SystemExit) as ended:
        main(["goodput", folder])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "10 steps stayed" in lines[-1]
    assert "2 attempts" in lines[-1]
    with pytest.raises(SystemExit):
        main(["goodput", folder, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"], rel=0.01)
