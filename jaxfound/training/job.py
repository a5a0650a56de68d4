"""A run in several processes: who prepares, who is watched, when all stop."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfound.config.run import RunConfig
from jaxfound.data import Prepared, prepare
from jaxfound.data.tokenizer import Tokenizer
from jaxfound.resources.control import ControlPlane, PeerError
from jaxfound.resources.job_stop import JobStop
from jaxfound.resources.launch.place import Place
from jaxfound.resources.pulse import Phase, Pulse
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.shared_disk import first_on_disk
from jaxfound.resources.signals import GracefulStop
from jaxfound.resources.stragglers import Straggler, find_stragglers
from jaxfound.resources.watchdog import Surroundings, Watchdog
from jaxfound.training.loop import Stop

PACES = "jaxfound/paces"


@dataclass(frozen=True)
class Job:
    """This process among those that train together.

    Attributes:
        plane: how they talk.
        pulse: what this one tells of itself.
        place: where the agent put it; None = nobody started it.
        stop: who may end the run early.
    """

    plane: ControlPlane
    pulse: Pulse
    place: Place | None
    stop: Stop

    @property
    def is_watched(self) -> bool:
        """Whether there is anybody to tell: peers or an agent."""
        return is_watched(self.plane, self.place)


def is_watched(plane: ControlPlane, place: Place | None) -> bool:
    """Say whether a process has peers or an agent."""
    return plane.count > 1 or place is not None


@contextmanager
def open_job(
    cfg: RunConfig, directory: RunDirectory, *, place: Place | None, stop: Stop | None
) -> Iterator[Job]:
    """Enter the job that this process has joined, or a job of its own.

    Args:
        cfg: its limits.
        directory: where stacks go when it hangs.
        place: where the agent put this process.
        stop: who may end the run early; the signals SIGINT and SIGTERM, at any process of the
            job, by default.
    """
    plane, pulse = ControlPlane.of_job(), Pulse()
    with ExitStack() as opened:
        if stop is None:
            signals = opened.enter_context(GracefulStop())
            stop = lambda: signals.signal_name
        if not is_watched(plane, place):
            yield Job(plane, pulse, place, stop)
            return
        agreed = JobStop(plane, stop)
        attempt = place.attempt if place else 0
        around = Surroundings(
            heartbeat=place.heartbeat if place else None,
            attempt=attempt,
            stacks=directory.logs(attempt) / f"process-{plane.process}.stacks.txt",
            hang_s=cfg.watch.hang_s,
            slow_s=cfg.watch.slow_s,
        )
        opened.enter_context(Watchdog(plane, pulse, agreed, around))
        yield Job(plane, pulse, place, agreed)
        pulse.enter("end")
        # The watchdog answers others' questions until none can ask any more.
        plane.barrier("end of run", timeout_s=cfg.watch.slow_s)


def meet(plane: ControlPlane) -> None:
    """Run one collective over every device of the job, as soon as all are here.

    A network that lets hosts join but not talk shows here and not after an hour of compiling; and
    the time that devices allow each other to come to their first meeting is seconds.

    Raises:
        PeerError: if another process does not come, or the sum is not that of all devices.
    """
    if plane.count == 1:
        return
    plane.barrier("first meeting")
    mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))
    cut, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("device"), PartitionSpec()))
    ones = jax.jit(lambda: jnp.ones(jax.device_count(), jnp.int32), out_shardings=cut)()
    total = int(jax.jit(jnp.sum, out_shardings=whole)(ones))
    if total != jax.device_count():
        raise PeerError(
            f"a sum of ones over {jax.device_count()} devices is {total}: the network between them "
            "gives wrong results. Run the collective tests of its vendor on these hosts"
        )


def prepare_once(plane: ControlPlane, cfg: RunConfig, tokenizer: Tokenizer) -> Prepared:
    """Return the run's bins, made by one process of each disk while the others wait.

    Raises:
        DataError: see `prepare`.
        PeerError: if another process does not finish within watch.slow_s.
    """
    make: Callable[[], Prepared] = lambda: prepare(
        cfg.data, seq_len=cfg.train.seq_len, tokenizer=tokenizer
    )
    if first_on_disk(plane, Path(cfg.data.prepared_dir)) == plane.process:
        prepared = make()
        plane.barrier("data is prepared", timeout_s=cfg.watch.slow_s)
        return prepared
    plane.barrier("data is prepared", timeout_s=cfg.watch.slow_s)
    return make()


class Paces:
    """Compares what the hosts spend outside of their devices, every so many steps.

    Called once a step by each process. What they say of one window is compared a window later,
    when all have said it: steps are in lockstep, so nobody waits.

    Args:
        job: the processes.
        every: steps of a window; 0 = never.
    """

    def __init__(self, job: Job, *, every: int) -> None:
        self._job, self._every = job, every
        self._steps = 0

    def __call__(self, step: int) -> tuple[Straggler, ...]:
        """Return who was slow in the window before, at the end of one, at process 0."""
        self._steps += 1
        if not self._every or self._job.plane.count == 1 or self._steps % self._every:
            return ()
        plane, window = self._job.plane, self._steps // self._every
        spent = self._job.pulse.take_spent()
        plane.store.put(f"{PACES}/{window}/{plane.process}", json.dumps(spent))
        # The first window holds what happened before the first step.
        if window <= 2 or not plane.is_first:
            return ()
        told = plane.store.read(f"{PACES}/{window - 1}")
        plane.store.delete(f"{PACES}/{window - 2}")
        times: dict[int, dict[Phase, float]] = {int(p): json.loads(t) for p, t in told.items()}
        return find_stragglers(times, steps=self._every)
