"""One process that an agent started: its log, its heartbeat, its end."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxfound.resources.pulse import Heartbeat, read_heartbeat

# Shown of the log of a process that failed.
TAIL_LINES = 15
TAIL_BYTES = 16 * 1024

# Gives a simulated host a disk of its own: $1 appears at $2 for what follows, and nobody else.
OWN_DISK = (
    "unshare", "--mount", "sh", "-ec",
    'mkdir -p "$1" "$2"; mount --bind "$1" "$2"; shift 2; exec "$@"', "sh",
)  # fmt: skip


def on_own_disk(command: Sequence[str], *, disk: Path, at: Path) -> tuple[str, ...]:
    """Return `command` as a process that sees the folder `disk` at the path `at`; needs root."""
    return (*OWN_DISK, str(disk), str(at), *command)


class Child:
    """A running process; it leads a session of its own, so that Ctrl-C reaches the agent alone.

    Args:
        process: its number in the job.
        command: what runs.
        env: all of its environment.
        log: file that takes what it says; of process 0 only the standard error, which is followed.
        heartbeat: file that it writes.
    """

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        heartbeat: Path,
    ) -> None:
        self.process, self.log, self.heartbeat = process, log, heartbeat
        self.was_killed = self.was_silent = False
        self._read_to = log.stat().st_size if log.exists() else 0
        self._seen: tuple[int, float] = (0, time.monotonic())
        log.parent.mkdir(parents=True, exist_ok=True)
        heartbeat.unlink(missing_ok=True)
        with log.open("ab") as out:
            stdout: IO[bytes] | None = out if process else None
            self._popen = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=out,
                start_new_session=True,
            )

    def code(self) -> int | None:
        """Return its exit code, None while it runs; negative = ended by that signal."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.code() is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """End it and what it started in its session, and wait for that."""
        if self.code() is None:
            self.was_killed = True
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def pulse(self) -> Heartbeat | None:
        """Return its last heartbeat, None before the first."""
        return read_heartbeat(self.heartbeat)

    def silent_s(self) -> float:
        """Return for how long its heartbeat has not changed; 0 before the first."""
        try:
            written = self.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:
            return 0.0
        if written != self._seen[0]:
            self._seen = (written, time.monotonic())
        return time.monotonic() - self._seen[1]

    def new_lines(self) -> list[str]:
        """Return the whole lines that its log got since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def tail(self) -> str:
        """Return the last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])
