"""What the processes of a run settle before and between steps; processes are threads here."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxfound.data import load_tokenizer
from jaxfound.resources.control import ControlPlane, LocalStore
from jaxfound.resources.pulse import Pulse
from jaxfound.resources.shared_disk import first_on_disk
from jaxfound.training import job as jobs
from jaxfound.training.job import Job, Paces, prepare_once
from jaxfound.training.loop import never
from tests.training.tiny import tiny


def planes(count):
    store = LocalStore()
    return [ControlPlane(process, count, store, timeout_s=20) for process in range(count)]


def together(work, arguments):
    """Call `work` in a thread for each argument, all at one time."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


def test_the_first_process_on_each_disk_is_known_to_all_on_it(tmp_path):
    disk = {0: "a", 1: "b", 2: "a", 3: "b"}
    found = together(
        lambda plane: first_on_disk(plane, tmp_path / disk[plane.process] / "data"), planes(4)
    )
    assert found == [0, 1, 0, 1]
    assert not list(tmp_path.glob("*/data/*"))


def test_data_is_prepared_by_one_process_of_a_disk_while_the_others_wait(tmp_path, monkeypatch):
    made = []
    real = jobs.prepare

    def watched(cfg, **options):
        made.append(any(Path(cfg.prepared_dir).glob("*/manifest.json")))
        return real(cfg, **options)

    monkeypatch.setattr(jobs, "prepare", watched)
    cfg, tokenizer = tiny(tmp_path), load_tokenizer("byte")
    found = together(lambda plane: prepare_once(plane, cfg, tokenizer), planes(3))
    # One made it, and those that came later found it there.
    assert sorted(made) == [False, True, True]
    assert len({prepared.path for prepared in found}) == 1


def test_a_slow_host_is_told_of_by_process_0_a_window_later():
    now = [0.0, 0.0]
    pulses = [Pulse(clock=lambda p=p: now[p]) for p in range(2)]
    paces = [
        Paces(Job(plane, pulses[p], None, never), every=5) for p, plane in enumerate(planes(2))
    ]
    told = {}
    for step in range(1, 26):
        for p in (0, 1):
            pulses[p].enter("data")
            now[p] += 0.4 if p else 0.1
            pulses[p].enter("wait")
            now[p] += 0.1 if p else 0.4
            pulses[p].enter("loop")
            if found := paces[p](step):
                told[p, step] = found
    # The first window holds what came before the first step, and a window is compared when the
    # next one ends.
    assert {key: [(s.process, s.phase) for s in found] for key, found in told.items()} == {
        (0, 15): [(1, "data")],
        (0, 20): [(1, "data")],
        (0, 25): [(1, "data")],
    }
    assert told[0, 15][0].own_s == pytest.approx(0.4)


@pytest.mark.parametrize(("count", "every"), [(1, 5), (2, 0)])
def test_nobody_is_compared_when_nobody_is_there_or_nobody_asks(count, every):
    plane = planes(count)[0]
    paces = Paces(Job(plane, Pulse(), None, never), every=every)
    assert [paces(step) for step in range(20)] == [()] * 20
    assert plane.store.read("jaxfound") == {}
