"""Where a process stands in its job: what an agent tells the processes that it starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxfound.config.schema import ConfigError
from jaxfound.resources.failpoint import PROCESS_VARIABLE

COORDINATOR = "JAXFOUND_COORDINATOR"
NUM_PROCESSES = "JAXFOUND_NUM_PROCESSES"
PROCESS = PROCESS_VARIABLE
LOCAL_DEVICES = "JAXFOUND_LOCAL_DEVICES"
VIRTUAL_DEVICES = "JAXFOUND_VIRTUAL_DEVICES"
ATTEMPT = "JAXFOUND_ATTEMPT"
RUN_ID = "JAXFOUND_RUN_ID"
HOST_ID = "JAXFOUND_HOST_ID"
HEARTBEAT = "JAXFOUND_HEARTBEAT"
SEARCHES = "JAXFOUND_SEARCHES"
# All of them are set or none is; a process without the first is in no job.
REQUIRED = (COORDINATOR, NUM_PROCESSES, PROCESS)


@dataclass(frozen=True)
class Place:
    """One process among those of its job.

    Attributes:
        coordinator: `HOST:PORT` at which process 0 keeps the job's keys.
        num_processes: how many there are.
        process: which one this is, from 0.
        local_devices: the host's accelerators that are its own; empty = all of them.
        virtual_devices: CPU devices to train on instead, for a simulated host; 0 = real ones.
        attempt: how often the job was started before.
        run_id: the same for every process and every attempt of a job.
        host_id: the machine, the same in every attempt.
        heartbeat: file in which the process tells its agent how far it is; None = nobody reads it.
        searches: whether another attempt than `attempt` may be under way: its agent does not start
            process 0, and can have missed some.
    """

    coordinator: str
    num_processes: int
    process: int
    local_devices: tuple[int, ...] = ()
    virtual_devices: int = 0
    attempt: int = 0
    run_id: str = ""
    host_id: str = ""
    heartbeat: Path | None = None
    searches: bool = False

    def to_env(self) -> dict[str, str]:
        """Return the environment variables that say this; `from_env` reads them back."""
        values = {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS: str(self.process),
            LOCAL_DEVICES: ",".join(map(str, self.local_devices)),
            VIRTUAL_DEVICES: str(self.virtual_devices or ""),
            ATTEMPT: str(self.attempt),
            RUN_ID: self.run_id,
            HOST_ID: self.host_id,
            HEARTBEAT: str(self.heartbeat or ""),
            SEARCHES: "1" if self.searches else "",
        }
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Place | None":
        """Return the place that the environment names; None when it names no job.

        Raises:
            ConfigError: if it names half a job, or a process that cannot be.
        """
        if COORDINATOR not in env:
            return None
        missing = [name for name in REQUIRED if name not in env]
        if missing:
            raise ConfigError(
                f"{COORDINATOR}={env[COORDINATOR]} names a job, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set. Start processes by "
                "`jaxfound launch`, which sets them all, or unset it to run alone"
            )
        devices = env.get(LOCAL_DEVICES, "")
        count, process = _whole(env, NUM_PROCESSES), _whole(env, PROCESS)
        if process >= count:
            raise ConfigError(
                f"{PROCESS}={process} of {NUM_PROCESSES}={count}: processes are numbered from 0 "
                f"to {count - 1}"
            )
        return cls(
            coordinator=env[COORDINATOR],
            num_processes=count,
            process=process,
            local_devices=tuple(int(d) for d in devices.split(",") if d),
            virtual_devices=_whole(env, VIRTUAL_DEVICES),
            attempt=_whole(env, ATTEMPT),
            run_id=env.get(RUN_ID, ""),
            host_id=env.get(HOST_ID, ""),
            heartbeat=Path(env[HEARTBEAT]) if env.get(HEARTBEAT) else None,
            searches=bool(env.get(SEARCHES)),
        )


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env.get(name) or "0"
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number from 0 up")
    return int(text)
