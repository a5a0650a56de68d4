"""Real processes that save and restore together: they agree, or the one at fault is named."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.resources.checkpoint_member import ANSWER, DEVICES
from tests.resources.hosts import flip, largest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


class Job:
    """Processes of checkpoint_member.py that are all told the same."""

    def __init__(self, count, **env):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "tests.resources.checkpoint_member", port]
        self.processes = [
            subprocess.Popen(
                [*command, str(process), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "JAXFOUND_PROCESS": str(process), **env},
            )
            for process in range(count)
        ]

    def tell(self, *command):
        """Send a command to all and return their answers; None of one that has died."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
        return [self._answer(process) for process in self.processes]

    def _answer(self, process):
        lines = (line for line in process.stdout if line.startswith(ANSWER))
        line = next(lines, None)
        return None if line is None else json.loads(line[len(ANSWER) :])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error[0] is not None:
            self.kill()
        # All are told before one is waited for: they wait for each other at the end.
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            process.stdout.close()
            process.wait(LIMIT_S)

    def kill(self):
        """End those that are left, as an agent does."""
        for process in self.processes:
            process.kill()


pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two processes said to a list of commands, by the name of the drill."""
    root = tmp_path_factory.mktemp("job")
    disks = [str(root / "disk-0"), str(root / "disk-1")]
    shared, direct = str(root / "run" / "checkpoints"), str(root / "direct" / "checkpoints")
    said = {"root": root}
    with Job(2) as job:
        job.tell("open", direct, [])
        said["direct"] = [job.tell("save", step) for step in (2, 4)]
        said["direct restored"] = job.tell("restore")
        job.tell("open", shared, disks)
        said["nothing"] = job.tell("restore")
        said["saved"] = [job.tell("save", 2), job.tell("finish"), job.tell("save", 4)]
        said["finished"] = job.tell("finish")
        said["notes"] = job.tell("notes")
        job.tell("open", shared, disks)
        said["latest"] = job.tell("latest")
        said["own disks"] = job.tell("restore")
        job.tell("open", shared, disks[::-1])
        said["swapped disks"] = job.tell("restore")
        job.tell("open", shared, disks)
        rotten = largest(next((root / "disk-1").glob("*/0/4/state")))
        said["rotten name"] = rotten.name
        flip(rotten)
        said["rotten"] = job.tell("restore")
        shutil.rmtree(root / "disk-0")
        job.tell("open", shared, disks)
        said["lost disk"] = job.tell("restore")
        flip(largest(root / "run" / "checkpoints" / "4" / "state" / "ocdbt.process_0"))
        said["rotten shared"] = job.tell("restore")
        job.tell("hold", 1)
        said["first"] = job.tell("save", 6, False)
        said["second"] = job.tell("save", 7, False)
        job.tell("release")
        said["third"] = job.tell("save", 8)
        said["counted"] = job.tell("notes")
        for name, held in (("slow own", disks), ("slow direct", [])):
            job.tell("open", str(root / name / "checkpoints"), held)
            job.tell("hold", 1)
            said[name] = job.tell("train", 8, 2)
            job.tell("release")
            said[f"{name} restored"] = job.tell("restore")
        job.tell("open", str(root / "kept" / "checkpoints"), [], 1)
        for step in (900, 1000, 9000, 10000):
            job.tell("save", step)
        said["kept"] = job.tell("steps")
        said["refused"] = job.tell("open", direct, [], -1)
        job.tell("open", shared, disks)
        job.tell("break_disk", 1)
        job.tell("save", 9, False)
        job.tell("settle")
        said["broken"] = job.tell("save", 10, False)
        job.tell("open", direct, [])
        said["direct broken"] = job.tell("save", 6)
        said["direct steps"] = job.tell("steps")
    return said


def test_without_own_disks_all_commit_one_checkpoint_in_the_shared_folder(told):
    assert told["direct"] == [["saved", "saved"]] * 2
    assert told["direct restored"] == [[4, True, "shared", []]] * 2


def test_a_new_run_has_nothing_to_restore(told):
    assert told["nothing"] == [None, None]


def test_parts_on_own_disks_become_one_checkpoint_by_processes_of_their_own(told):
    assert told["saved"] == [["saved", "saved"], [True, True], ["saved", "saved"]]
    assert told["finished"] == [True, True]
    assert [kind for kind, step in told["notes"][0] if kind == "uploaded"] == ["uploaded"] * 2
    assert told["notes"][1] == [], "process 0 tells of uploads"


def test_every_process_restores_from_its_own_disk(told):
    assert told["latest"] == [4, 4]
    assert told["own disks"] == [[4, True, "local", []]] * 2


def test_disks_that_changed_places_are_not_read_as_each_others(told):
    assert told["swapped disks"] == [[4, True, "shared", []]] * 2


def test_one_rotten_part_makes_all_read_the_shared_copy_and_is_named_on_all(told):
    for step, right, tier, reasons in told["rotten"]:
        assert (step, right, tier) == (4, True, "shared")
        assert "process 1: " in reasons[0]
        assert told["rotten name"] in reasons[0]


def test_a_lost_disk_makes_all_read_the_shared_copy(told):
    assert told["lost disk"] == [[4, True, "shared", []]] * 2


def test_a_rotten_shared_copy_makes_all_go_back_one_step(told):
    for step, right, tier, reasons in told["rotten shared"]:
        assert (step, right, tier) == (2, True, "shared")
        assert "ocdbt.process_0" in reasons[0]


def test_a_save_is_skipped_by_all_while_one_still_writes(told):
    assert told["first"] == ["saved", "saved"]
    assert told["second"] == ["skipped", "skipped"]
    assert told["third"] == ["saved", "saved"]
    for notes in told["counted"]:
        assert ["save_skipped", 7] in notes


@pytest.mark.parametrize(("name", "tier"), [("slow own", "local"), ("slow direct", "shared")])
def test_a_save_holds_the_step_it_was_asked_for_however_late_a_process_writes(told, name, tier):
    # Case S13: six more steps were taken in the memory of step 2 while process 1 had not written.
    assert [answer[0] for answer in told[name]] == ["saved", "saved"]
    assert told[name][1] == ["saved", True, True]
    assert told[f"{name} restored"] == [[2, True, tier, []]] * 2


def test_processes_keep_the_newest_by_number_and_a_negative_keep_deletes_nothing(told):
    # Case S14.
    assert told["kept"] == [[10000]] * 2
    assert ["keep=-1 is negative" in answer["error"] for answer in told["refused"]] == [True] * 2
    assert told["direct steps"] == [[2, 4]] * 2


def test_a_save_that_failed_on_one_process_is_raised_on_all(told):
    for answer in told["broken"]:
        assert "process 1: OSError" in answer["error"]
        assert "No space left" in answer["error"]
    for answer in told["direct broken"]:
        assert "process 1: OSError" in answer["error"]
    assert told["direct steps"] == [[2, 4]] * 2


def test_what_two_processes_saved_one_reads(told):
    with Job(1) as job:
        job.tell("open", str(told["root"] / "direct" / "checkpoints"), [])
        assert job.tell("restore") == [[4, True, "shared", []]]


@pytest.mark.slow
@pytest.mark.parametrize("has_disks", [True, False])
def test_three_processes_then_two_then_one_then_three(tmp_path, has_disks):
    shared = str(tmp_path / "run" / "checkpoints")
    disks = [str(tmp_path / f"disk-{p}") for p in range(3)] if has_disks else []
    for turn, count in enumerate((3, 2, 1, 3), start=1):
        with Job(count) as job:
            job.tell("open", shared, disks)
            before = job.tell("restore")
            if turn > 1:
                assert [answer[:2] for answer in before] == [[turn - 1, True]] * count
            assert job.tell("save", turn) == ["saved"] * count
            assert job.tell("finish") == [True] * count
            assert turn in job.tell("steps")[0]


PLACES = ("save.local", "save.manifest", "save.upload", "save.merge", "restore")


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_anywhere_is_followed_by_a_restart_with_the_right_numbers(tmp_path, place, process):
    shared = str(tmp_path / "run" / "checkpoints")
    disks = [str(tmp_path / f"disk-{p}") for p in range(2)]
    with Job(2) as job:
        job.tell("open", shared, disks, 1)
        assert job.tell("save", 2) == ["saved", "saved"]
        assert job.tell("finish") == [True, True]
    with Job(2, JAXFOUND_FAILPOINT=f"{place}:1:kill@{process}") as job:
        job.tell("open", shared, disks, 1)
        job.tell("restore")
        if place != "restore":
            job.tell("save", 4)
            job.tell("finish", 5)
        job.kill()
    with Job(2) as job:
        job.tell("open", shared, disks, 1)
        for step, right, *_ in job.tell("restore"):
            assert step in (2, 4)
            assert right
        assert job.tell("save", 6) == ["saved", "saved"]
        assert job.tell("finish") == [True, True]
        assert job.tell("steps")[0] == [6]


def test_each_process_has_devices_of_its_own():
    assert DEVICES == 2
