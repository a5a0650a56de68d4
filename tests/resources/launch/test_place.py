"""What an agent tells a process is what the process reads."""

from pathlib import Path

import pytest

from jaxfound.config.schema import ConfigError
from jaxfound.resources.launch.place import Place

FULL = Place("node01:29500", 6, 5, (2, 3), 0, 4, "run", "node03", Path("/dev/shm/beat"), True)
SHORT = Place("127.0.0.1:1", 1, 0)


@pytest.mark.parametrize("place", [FULL, SHORT, Place("h:1", 2, 1, virtual_devices=8)])
def test_a_place_comes_back_from_the_environment_it_makes(place):
    assert Place.from_env({"PATH": "/bin", **place.to_env()}) == place


def test_a_process_without_a_coordinator_is_in_no_job():
    assert Place.from_env({"JAXFOUND_PROCESS": "1"}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"JAXFOUND_PROCESS": None}, "JAXFOUND_PROCESS is not set"),
        ({"JAXFOUND_PROCESS": "6"}, "processes are numbered from 0 to 5"),
        ({"JAXFOUND_NUM_PROCESSES": "six"}, "is not a whole number"),
    ],
)
def test_half_a_place_is_refused_by_name(change, named):
    env = {k: v for k, v in {**FULL.to_env(), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=named):
        Place.from_env(env)
