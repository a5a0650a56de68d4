"""One thread that turns snapshots into committed steps, and says so or says why not."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from jaxfound.resources.checkpoint import steps
from jaxfound.resources.checkpoint.errors import CheckpointError, describe_error
from jaxfound.resources.checkpoint.saving import Job, Origin, Saver
from jaxfound.resources.checkpoint.uploader import NICENESS
from jaxfound.resources.control import PeerError

log = logging.getLogger(__name__)


class SaveReport(NamedTuple):
    """One committed save: bytes on disk, seconds the caller waited, seconds until the commit."""

    step: int
    num_bytes: int
    blocked_s: float
    total_s: float


class Writer:
    """Writes one job at a time.

    Args:
        saver: turns snapshots into committed steps.
        committed: called in the thread with every step that was committed; prunes older ones.
    """

    def __init__(self, saver: Saver, *, committed: Callable[[int], None]) -> None:
        self._saver = saver
        self._committed = committed
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_come_last
        )
        self._pending: tuple[int, Future[SaveReport]] | None = None
        self._reports: list[SaveReport] = []

    @property
    def is_busy(self) -> bool:
        """True while a job is being written."""
        return self._pending is not None and not self._pending[1].done()

    @property
    def current_name(self) -> str:
        """The folder of the job that no `wait` has settled yet; empty when there is none."""
        return f"{self._pending[0]}{steps.SAVING}" if self._pending else ""

    def start(self, job: Job, origin: Origin) -> None:
        """Begin to write `job`; only after `wait`."""
        future = self._thread.submit(self._write, job, origin)
        self._pending = (job.step, future)

    def failure(self) -> str:
        """Return what was wrong with the job that has just failed; empty when nothing was."""
        if self._pending is None or self.is_busy:
            return ""
        error = self._pending[1].exception()
        return describe_error(error) if error is not None else ""

    def wait(self) -> None:
        """Return when the job, if any, is committed.

        Raises:
            CheckpointError: if it failed; what it had written is gone, older steps are intact.
            PeerError: if it ended because another process of the job is lost.
        """
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()
        where = self._saver.directory
        self._pending = None
        if isinstance(error, PeerError):
            # Nothing is wrong with this disk, and the next attempt saves again.
            raise error
        if error is not None:
            raise CheckpointError(
                f"step {step} could not be saved in {where}: {describe_error(error)}. "
                f"The committed steps {list(steps.committed(where))} are intact. "
                "Free space or mend the disk, then save again"
            ) from error
        self._reports.append(future.result())

    def take_reports(self) -> list[SaveReport]:
        """Return the finished saves that no earlier call returned; raises as `wait` does."""
        if not self.is_busy:
            self.wait()
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Wait for the job and end the thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, job: Job, origin: Origin) -> SaveReport:
        """Write one snapshot; runs in the thread.

        A failure is said at once: the call that raises it may be hours away.
        """
        try:
            manifest = self._saver.write(job, origin)
        except BaseException as error:
            fields = {"step": job.step, "error": describe_error(error)}
            log.error("checkpoint.failed", extra=fields)
            raise
        total_s = time.monotonic() - job.started_s
        report = SaveReport(job.step, manifest.num_bytes, job.blocked_s, total_s)
        log.info("checkpoint.saved", extra=report._asdict())
        self._committed(job.step)
        return report


def _come_last() -> None:
    """Let training come first for the processor: before this thread and those that it starts."""
    if sys.platform == "linux":
        # There a thread has a priority of its own.
        here = threading.get_native_id()
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, here))
        os.setpriority(os.PRIO_PROCESS, here, niceness)
