"""How a process of a job ends, as a number that whoever started it can act on."""

import signal
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class Exit(IntEnum):
    """Exit codes of a process of a job, and of the agent that started it."""

    DONE = 0
    CRASH = 1
    HANG = 75
    PREEMPTED = 76
    PEER = 77
    REFUSED = 78
    CHECKPOINT = 79


class Meaning(NamedTuple):
    """What a code says, and what is done about it.

    Attributes:
        text: for people.
        restarts: whether another attempt can go better.
        counts: whether that attempt counts against the limit.
        blame: whoever has the largest is the reason when the processes of a host end differently.
    """

    text: str
    restarts: bool
    counts: bool
    blame: int


MEANINGS: Mapping[int, Meaning] = {
    Exit.DONE: Meaning("done", False, False, 0),
    Exit.PREEMPTED: Meaning("saved after a notice to stop", True, False, 1),
    # Only before training does nothing handle the signal: there was nothing to save.
    -signal.SIGTERM: Meaning("was told to end before it had begun", True, False, 1),
    Exit.PEER: Meaning("lost another process", True, True, 2),
    # So JAX ends a process that is in C++ code when it loses another.
    -signal.SIGABRT: Meaning("aborted in C++ code, as when another was lost", True, True, 3),
    Exit.CRASH: Meaning("ended with an error", True, True, 4),
    # Told to all processes: those that crash then have lost the one that told it.
    Exit.HANG: Meaning("made no progress", True, True, 5),
    Exit.CHECKPOINT: Meaning("has no checkpoint it can go on from, or cannot save", False, True, 6),
    Exit.REFUSED: Meaning("was asked for what cannot be done", False, True, 7),
}
CRASHED = Meaning("crashed", True, True, 4)


def meaning_of(code: int) -> Meaning:
    """Return what an exit code says; negative codes are signals, as subprocess has them."""
    return MEANINGS.get(code, CRASHED)


def worst(codes: Mapping[int, int]) -> tuple[int, int]:
    """Return the process that is the reason why a host's processes ended, and its code.

    A process that crashed is the reason, not those that lost it.

    Args:
        codes: exit code by process; not empty.
    """
    process = max(codes, key=lambda p: (meaning_of(codes[p]).blame, -p))
    return process, codes[process]
