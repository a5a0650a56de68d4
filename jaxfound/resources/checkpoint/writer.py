"""One thread that turns snapshots into committed steps, and says so or says why not."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import jax

from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint import steps
from jaxfound.resources.checkpoint.errors import CheckpointError
from jaxfound.resources.checkpoint.leaves import LeafPath, LeafSpec
from jaxfound.resources.checkpoint.manifest import Manifest

log = logging.getLogger(__name__)

# The folder of a checkpoint that the storage fills.
STATE = "state"


@runtime_checkable
class Storage(Protocol):
    """How a checkpoint's arrays become files; steps, checksums and commits are none of its work."""

    def write(self, directory: Path, arrays: Mapping[LeafPath, jax.Array]) -> None:
        """Write `arrays` into `directory`, which does not exist yet; files are whole on return."""
        ...

    def read(
        self, directory: Path, like: Mapping[LeafPath, jax.ShapeDtypeStruct]
    ) -> dict[LeafPath, jax.Array]:
        """Return the arrays that `like` names, each with the sharding that `like` gives it."""
        ...


class SaveReport(NamedTuple):
    """One committed save: bytes on disk, seconds the caller waited, seconds until the commit."""

    step: int
    num_bytes: int
    blocked_s: float
    total_s: float


class Job(NamedTuple):
    """A snapshot on its way to disk; the times are of `time.monotonic`."""

    step: int
    arrays: Mapping[LeafPath, jax.Array]
    leaves: tuple[LeafSpec, ...]
    metadata: Mapping[str, object]
    started_s: float
    blocked_s: float


class Writer:
    """Writes one job at a time under `directory`.

    Args:
        directory: folder of the steps.
        storage: turns arrays into files.
        committed: called in the thread with every step that was committed; prunes older ones.
    """

    def __init__(
        self, directory: Path, *, storage: Storage, committed: Callable[[int], None]
    ) -> None:
        self._directory = directory
        self._storage = storage
        self._committed = committed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
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

    def start(self, job: Job) -> None:
        """Begin to write `job`; only after `wait`."""
        future = self._thread.submit(self._write, job)
        self._pending = (job.step, future)

    def wait(self) -> None:
        """Return when the job, if any, is committed.

        Raises:
            CheckpointError: if it failed; what it had written is gone, older steps are intact.
        """
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()
        self._pending = None
        if error is not None:
            raise CheckpointError(
                f"step {step} could not be saved in {self._directory}: {describe_error(error)}. "
                f"The committed steps {list(steps.committed(self._directory))} are intact. "
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

    def _write(self, job: Job) -> SaveReport:
        """Write one snapshot; runs in the thread.

        A failure is said at once: the call that raises it may be hours away.
        """
        try:
            return self._commit(job)
        except BaseException as error:
            fields = {"step": job.step, "error": describe_error(error)}
            log.error("checkpoint.failed", extra=fields)
            raise

    def _commit(self, job: Job) -> SaveReport:
        """Write, sum and commit one snapshot."""
        with ExitStack() as undo:
            saving = steps.begin(self._directory, job.step)
            undo.callback(steps.discard, saving)
            self._storage.write(saving / STATE, job.arrays)
            files = manifests.sum_files(saving)
            manifest = Manifest(job.step, job.metadata, job.leaves, files)
            manifests.write(saving, manifest)
            steps.commit(saving)
            undo.pop_all()
        report = SaveReport(
            job.step, manifest.num_bytes, job.blocked_s, time.monotonic() - job.started_s
        )
        log.info("checkpoint.saved", extra=report._asdict())
        self._committed(job.step)
        return report


def describe_error(error: BaseException) -> str:
    """Return the kind and the text of `error`."""
    return f"{type(error).__name__}: {error}"
