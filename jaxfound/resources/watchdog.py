"""A thread that watches the main one: it tells peers and agent how far it is, and ends what hangs.

It runs while the main thread waits for devices. What stops it too (a call that keeps the
interpreter's lock, a stopped process) is the agent's to see: the heartbeat file gets old.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from jaxfound.resources.control import ControlPlane, PeerError
from jaxfound.resources.ending import linger, read_ending, tell_ending
from jaxfound.resources.hang import Limits, find_hang
from jaxfound.resources.job_stop import JobStop
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.join import leave_now
from jaxfound.resources.pulse import Beat, Pulse, write_heartbeat

log = logging.getLogger(__name__)

BEATS = "jaxfound/beats"
INTERVAL_S = 1.0
# A notice to stop at this process is seen as soon as that.
NOTICE_EVERY_S = 0.05
# Between two looks at the peers' beats, after which one that did not change is silent.
SILENT_AFTER = 4
# A look this many intervals after the last: the whole process was stopped, e.g. by Ctrl-Z.
GAP = 5


@dataclass(frozen=True)
class Surroundings:
    """What a watchdog needs to know of the place that it watches at.

    Attributes:
        heartbeat: file that the agent reads; None = there is no agent.
        attempt: of the job.
        stacks: file that the stacks of all threads go to when the job hangs.
        hang_s: least time without progress that is a hang; 0 = never one.
        slow_s: the same while compiling, saving, restoring and evaluating.
        interval_s: between two looks.
    """

    heartbeat: Path | None
    attempt: int
    stacks: Path
    hang_s: float | int
    slow_s: float | int
    interval_s: float | int = INTERVAL_S


@dataclass
class Watchdog:
    """While entered, watches `pulse` from a thread, and ends the process when its job must end.

    Attributes:
        plane: the processes of the job.
        pulse: what the main thread tells.
        stop: the notice that is passed on.
        around: limits and files.
        end: ends the process with a code; never returns.
    """

    plane: ControlPlane
    pulse: Pulse
    stop: JobStop
    around: Surroundings
    end: Callable[[int], None] = leave_now
    _closing: threading.Event = field(default_factory=threading.Event, repr=False)
    _parent: int = field(default_factory=os.getppid, repr=False)

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="jaxfound-watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._paused():
            now = time.monotonic()
            if now - last > GAP * self.around.interval_s:
                self.pulse.forgive()
            try:
                self.look()
            except PeerError as error:
                if not self._closing.is_set():
                    log.error("job.lost_peer", extra={"error": str(error)})
                    self.end(Exit.PEER)
                return
            # After the look: agreeing on a stop takes time of its own.
            last = time.monotonic()

    def _paused(self) -> bool:
        """Wait for an interval, or less if a notice to stop comes; say whether it is over."""
        ends_s = time.monotonic() + self.around.interval_s
        while time.monotonic() < ends_s and not self.stop.is_new:
            if self._closing.wait(min(self.around.interval_s, NOTICE_EVERY_S)):
                return True
        return self._closing.is_set()

    def look(self) -> None:
        """Look once: tell how far this process is, and end it if its job ends or hangs.

        Raises:
            PeerError: if the job's keys are gone.
        """
        beat = self.pulse.look()
        if self.around.heartbeat is not None:
            self._tell_agent(self.around.heartbeat, beat)
        self.plane.store.put(f"{BEATS}/{self.plane.process}", beat.to_text())
        self._follow_ending()
        self.stop.look()
        if self.stop.nothing_done:
            log.warning("job.stopped_before_first_step")
            if self.plane.is_first:
                # It keeps the keys: the others have yet to read that all have agreed.
                linger(self.plane)
            self.end(Exit.PREEMPTED)
        self._end_hang(beat)

    def _tell_agent(self, heartbeat: Path, beat: Beat) -> None:
        if os.getppid() != self._parent:
            log.error("job.agent_gone")
            self.end(Exit.PEER)
        try:
            write_heartbeat(heartbeat, beat, attempt=self.around.attempt)
        except OSError as error:
            # A full disk is no reason to end; the agent sees an old heartbeat and decides.
            log.warning("job.no_heartbeat", extra={"error": str(error)})

    def _follow_ending(self) -> None:
        ending = read_ending(self.plane)
        if ending is None:
            return
        log.error(
            "job.ending",
            extra={"told_by": ending.process, "code": ending.code, "why": ending.why},
        )
        if ending.code == Exit.HANG:
            self.dump_stacks()
        self.end(ending.code)

    def _end_hang(self, beat: Beat) -> None:
        limits = Limits(self.around.hang_s, self.around.slow_s, self.pulse.step_s)
        if not self.around.hang_s or not limits.exceeded(beat):
            return
        before = self._beats()
        for _ in range(SILENT_AFTER):
            self._closing.wait(self.around.interval_s)
            # Whoever saw it first says so, and does not stay for long.
            self._follow_ending()
        beats = self._beats()
        silent = frozenset(
            p
            for p, b in beats.items()
            if p != self.plane.process and p in before and b.number == before[p].number
        )
        beats[self.plane.process] = now = self.pulse.look()
        if now.step != beat.step or now.phase != beat.phase:
            return
        hang = find_hang(beats, process=self.plane.process, limits=limits, silent=silent)
        if hang is None:
            return
        log.error("job.hang", extra={"guilty": list(hang.guilty), "why": hang.text})
        tell_ending(self.plane, code=Exit.HANG, why=hang.text)
        self.dump_stacks()
        linger(self.plane)
        self.end(Exit.HANG)

    def _beats(self) -> dict[int, Beat]:
        found = self.plane.store.read(BEATS)
        return {int(process): Beat.parse(text) for process, text in found.items()}

    def dump_stacks(self) -> None:
        """Append the stacks of all threads to the stacks file: the line that hangs is in there."""
        self.around.stacks.parent.mkdir(parents=True, exist_ok=True)
        with self.around.stacks.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        log.error("job.stacks", extra={"path": str(self.around.stacks)})
