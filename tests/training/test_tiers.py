"""A run saves to a disk of its host, resumes from there, and ends whole in its folder."""

import pytest

from tests.training.tiny import run, state_at, tiny

OPTIONS = ("train.steps=10", "checkpoint.every=4", "train.eval_batches=0")


def kinds(events, *names):
    return [(event.kind, event.step) for event in events if event.kind in names]


@pytest.mark.multiprocess
def test_a_run_with_a_local_disk_resumes_from_it_and_ends_whole_in_its_folder(tmp_path, caplog):
    caplog.set_level("INFO", logger="jaxfound")
    cfg = tiny(tmp_path, *OPTIONS, f"checkpoint.local_dir={tmp_path / 'disk'}")
    first = run(cfg, stop_after=6)
    assert kinds(first, "checkpoint", "stopped") == [
        ("checkpoint", 4),
        ("checkpoint", 6),
        ("stopped", 6),
    ]
    second = run(cfg)
    assert kinds(second, "resume", "checkpoint", "finished") == [
        ("resume", 6),
        ("checkpoint", 8),
        ("checkpoint", 10),
        ("finished", 10),
    ]
    assert kinds(second, "uploaded")[-1] == ("uploaded", 10)
    restored = [r.tier for r in caplog.records if r.message == "checkpoint.restored"]
    assert restored == ["local"]
    assert state_at(cfg, 10)["['step']"] == 10
