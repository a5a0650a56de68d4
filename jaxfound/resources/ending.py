"""The word that a job ends: one process says it, and all end with the same code."""

import json
import time
from typing import NamedTuple

from jaxfound.resources.control import ControlPlane

FOLDER = "jaxfound/ending"
# Who tells an end stays this long, so that the others read why before they lose it.
LINGER_S = 3.0


class Ending(NamedTuple):
    """Why a job ends.

    Attributes:
        process: who says so.
        code: that every process ends with.
        why: for people.
    """

    process: int
    code: int
    why: str


def tell_ending(plane: ControlPlane, *, code: int, why: str) -> None:
    """Tell every process of the job that it ends, and with which code.

    Raises:
        PeerError: if the job's keys are gone, and with them whoever could be told.
    """
    plane.store.put(f"{FOLDER}/{plane.process}", json.dumps({"code": int(code), "why": why}))


def read_ending(plane: ControlPlane) -> Ending | None:
    """Return the first process's word that the job ends, None while nobody said so."""
    found = plane.store.read(FOLDER)
    if not found:
        return None
    process, text = min(found.items())
    return Ending(int(process), **json.loads(text))


def linger(plane: ControlPlane) -> None:
    """Give the others time to read what was told."""
    if plane.count > 1:
        time.sleep(LINGER_S)
