"""Named places at which a process can be made to fail, so that every failure can be tried out.

`JAXFOUND_FAILPOINT=save.merge:2:kill@1` kills process 1 the second time it comes to `save.merge`.
Without the variable a place costs one look at a dict.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

VARIABLE = "JAXFOUND_FAILPOINT"
PROCESS_VARIABLE = "JAXFOUND_PROCESS"

# Where a run can be made to fail, and what is going on there.
PLACES: Mapping[str, str] = {
    "step": "a step was handed to the devices, its numbers are not back",
    "data": "the next batch is asked for",
    "save.local": "arrays are on their way to this host's disk",
    "save.manifest": "arrays are on disk, the manifest is not",
    "save.upload": "files are on their way to the shared tier",
    "save.merge": "all files are on the shared tier, its commit is not",
    "restore": "a checkpoint was chosen, its arrays are not read",
}
_FORM = re.compile(r"([a-z.]+):(\d+):([a-z]+)(?:@(\d+))?")


class FailpointError(RuntimeError):
    """The failure that `raise` asks for."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _raise() -> None:
    raise FailpointError(f"{VARIABLE}={os.environ[VARIABLE]} asked for this")


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# What can happen there.
ACTIONS: Mapping[str, Callable[[], None]] = {
    "kill": _kill,
    "hang": _hang,
    "raise": _raise,
    "term": _terminate,
}


class Failpoint(NamedTuple):
    """A failure that was asked for.

    Attributes:
        place: where, a key of PLACES.
        visit: the how many-th visit, from 1.
        action: what happens, a key of ACTIONS.
        process: in which process of the job; None = in each.
    """

    place: str
    visit: int
    action: str
    process: int | None

    @classmethod
    def parse(cls, text: str) -> "Failpoint":
        """Return what `text` asks for, as `PLACE:VISIT:ACTION` or `PLACE:VISIT:ACTION@PROCESS`.

        Raises:
            ValueError: if it is no such text; says what is possible.
        """
        match = _FORM.fullmatch(text)
        if match is None or match[1] not in PLACES or match[3] not in ACTIONS:
            raise ValueError(
                f"{VARIABLE}={text!r} is not PLACE:VISIT:ACTION or PLACE:VISIT:ACTION@PROCESS with "
                f"PLACE in {list(PLACES)} and ACTION in {list(ACTIONS)}"
            )
        process = int(match[4]) if match[4] else None
        return cls(match[1], int(match[2]), match[3], process)


class _Visits:
    """How often this process came to each place."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def next(self, place: str) -> int:
        """Count one more visit of `place` and return the count."""
        self.counts[place] = self.counts.get(place, 0) + 1
        return self.counts[place]


_visits = _Visits()


def reach(place: str) -> None:
    """Fail here if this visit of `place` was asked to.

    Raises:
        FailpointError: for the action `raise`.
        KeyError: if `place` is not in PLACES.
    """
    PLACES[place]
    text = os.environ.get(VARIABLE)
    if not text:
        return
    asked = Failpoint.parse(text)
    if asked.place != place or _visits.next(place) != asked.visit:
        return
    if asked.process in (None, int(os.environ.get(PROCESS_VARIABLE, "0"))):
        ACTIONS[asked.action]()
