"""Processes are killed wherever a run can be, and the run ends as the one that nobody touched.

Each attempt of a job is killed at another place; the agent starts it again until it is done. Then
the parameters and the record are compared to the last bit: nothing was lost, repeated or skipped.
"""

import os
import random

import pytest

from jaxfound.resources.failpoint import PLACES
from tests.end_to_end.launched import STEPS, launched
from tests.training.tiny import same

pytestmark = pytest.mark.multiprocess

HOSTS = 3
# Places that a run on the run's own folder comes to; the others need a disk a host.
SHARED_TIER = ("step", "data", "save.local", "save.manifest", "save.merge", "restore")
# Kills of the short form, one an attempt: the process that keeps the keys, and one that does not.
SHORT = ("step:3:kill@1", "save.local:2:kill@0", "restore:1:kill@2")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The run that nobody touched."""
    return launched(tmp_path_factory.mktemp("untouched"), hosts=HOSTS, devices=1)


def drilled(folder, kills, *overrides, **options):
    """The same run, killed so often."""
    failures = ",".join(kills)
    return launched(
        folder, *overrides, hosts=HOSTS, devices=1, failures=failures, max_restarts=9, **options
    )


def assert_untouched(run, untouched, *, kills):
    """Nothing of the run shows that it was killed, but the attempts it took."""
    assert run.code == 0
    assert [v["code"] for v in run.of_kind("ended")] == [-9] * kills + [0]
    assert run.losses == untouched.losses
    steps = [r["step"] for r in run.records if r["event"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert same(run.state, untouched.state)


@pytest.mark.slow
def test_a_run_that_was_killed_is_the_run_that_was_not(untouched, tmp_path):
    run = drilled(tmp_path, SHORT)
    assert_untouched(run, untouched, kills=len(SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("place", [*SHARED_TIER])
def test_five_kills_at_one_place(untouched, tmp_path, place):
    chance = random.Random(place)
    visits = 1 if place == "restore" else 2
    # Parts are joined by process 0 alone.
    processes = 1 if place == "save.merge" else HOSTS
    kills = [f"{place}:{chance.randint(1, visits)}:kill@{n % processes}" for n in range(5)]
    if place == "restore":
        # Nothing is restored before something was saved.
        kills.insert(0, "step:3:kill@1")
    assert_untouched(drilled(tmp_path, kills), untouched, kills=len(kills))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_five_kills_at_random(untouched, tmp_path, seed):
    chance = random.Random(seed)
    kills = [
        f"{chance.choice(SHARED_TIER[:4])}:{chance.randint(1, 2)}:kill@{chance.randrange(HOSTS)}"
        for _ in range(5)
    ]
    assert_untouched(drilled(tmp_path, kills), untouched, kills=5)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_kills_of_hosts_with_disks_of_their_own(untouched, tmp_path):
    nvme = tmp_path / "nvme"
    kills = ("save.local:2:kill@1", "step:3:kill@2", "save.manifest:2:kill@0", "restore:1:kill@1")
    run = drilled(tmp_path, kills, f"checkpoint.local_dir={nvme}", own_disk=nvme)
    assert_untouched(run, untouched, kills=len(kills))
    # Each host kept its own parts, and none was written to where the disks are mounted.
    assert len(list((tmp_path / "disks").iterdir())) == HOSTS
    assert list(nvme.iterdir()) == []


def test_the_drill_knows_its_places():
    assert set(SHARED_TIER) < set(PLACES)
