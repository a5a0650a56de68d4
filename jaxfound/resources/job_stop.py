"""A stop that the processes of a job agree on: one is asked, all save the same step."""

import threading
from collections.abc import Callable

from jaxfound.resources.control import ControlPlane

FOLDER = "jaxfound/stop"
# Until every process has seen a notice: longer than any of them looks away.
AGREE_S = 120


class JobStop:
    """Called once a step by each process; gives a name at the same call on all of them.

    JAX has such a notice too, but a handler for SIGTERM that Python code installs after joining
    turns it off without a word, and it knows no Ctrl-C.

    Args:
        plane: the processes.
        asked: names what asked this process to stop, e.g. SIGTERM; empty when nothing did.
    """

    def __init__(self, plane: ControlPlane, asked: Callable[[], str]) -> None:
        self._plane = plane
        self._asked = asked
        self._lock = threading.Lock()
        self._calls = 0
        self._last_call = 0
        self._reason = ""
        self._told = False

    def __call__(self) -> str:
        """Return what asked for a stop if this call is the one agreed on, or later; else nothing.

        Waits while the processes agree.
        """
        if self._plane.count == 1:
            self._calls += 1
            return self._asked()
        with self._lock:
            self._calls += 1
            return self._reason if self._reason and self._calls >= self._last_call else ""

    @property
    def is_new(self) -> bool:
        """True when this process was asked to stop and has not told the others yet."""
        return bool(self._asked()) and not self._told

    @property
    def nothing_done(self) -> bool:
        """True when the stop came before any process had made a step: there is nothing to save."""
        if self._plane.count == 1:
            return bool(self._asked()) and not self._calls
        return self._last_call == 1

    def look(self) -> None:
        """Pass a notice on and agree on a call, once; for a thread beside the one that calls.

        While they agree no process gets past a call, so none can be beyond the one agreed on;
        steps that were handed to devices go on.

        Raises:
            PeerError: if another process does not look within AGREE_S.
        """
        if self._reason:
            return
        if self._plane.count == 1:
            self._told = bool(self._asked())
            return
        if self.is_new:
            self._plane.store.put(f"{FOLDER}/{self._plane.process}", self._asked())
            self._told = True
        if not self._plane.store.read(FOLDER):
            return
        with self._lock:
            mine = f"{self._calls} {self._asked()}"
            answers = self._plane.gather("stop", mine, timeout_s=AGREE_S)
            calls, names = zip(*(answer.split(" ", 1) for answer in answers), strict=True)
            self._last_call = max(map(int, calls)) + 1
            self._reason = next((name for name in names if name), "notice")
