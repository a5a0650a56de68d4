"""A failure happens where, when and to whom it was asked for, and nowhere else."""

import subprocess
import sys

import pytest

from jaxfound.resources import failpoint
from jaxfound.resources.failpoint import ACTIONS, PLACES, Failpoint, FailpointError, reach

VISITOR = """
from jaxfound.resources.failpoint import reach
for visit in range(1, 4):
    print(visit, flush=True)
    reach("save.merge")
    reach("save.upload")
"""


@pytest.fixture(autouse=True)
def no_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoint, "_visits", failpoint._Visits())
    monkeypatch.delenv(failpoint.VARIABLE, raising=False)
    monkeypatch.delenv(failpoint.PROCESS_VARIABLE, raising=False)


def test_nothing_fails_unasked() -> None:
    for place in PLACES:
        reach(place)


@pytest.mark.parametrize("place", PLACES)
def test_the_visit_that_was_asked_for_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, f"{place}:3:raise")
    for _ in range(2):
        for other in PLACES:
            reach(other)
    with pytest.raises(FailpointError, match="asked for this"):
        reach(place)
    reach(place)


@pytest.mark.parametrize(("process", "fails"), [("0", False), ("2", True)])
def test_only_the_named_process_fails(
    process: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "step:1:raise@2")
    monkeypatch.setenv(failpoint.PROCESS_VARIABLE, process)
    if fails:
        with pytest.raises(FailpointError):
            reach("step")
    else:
        reach("step")


@pytest.mark.parametrize("text", ["step", "step:1", "stop:1:kill", "step:x:kill", "step:1:burn"])
def test_a_failure_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PLACE:VISIT:ACTION") as caught:
        Failpoint.parse(text)
    assert "save.merge" in str(caught.value)
    assert all(action in str(caught.value) for action in ACTIONS)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("term", -15)])
def test_a_signal_ends_the_process_there(action: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VISITOR],
        env={failpoint.VARIABLE: f"save.merge:2:{action}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()) == (code, ["1", "2"])
