"""Brings a host's parts to the shared tier, in a process of its own, and joins what is complete.

`python -m jaxfound.resources.checkpoint` runs until nothing is left to do; a trainer starts it
after a save when none runs. It outlives a trainer that dies. It may be killed at any
point: what it has finished is not copied again, and nothing it left half done is a checkpoint.
"""

import argparse
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from jaxfound.resources.checkpoint import choose, publish, remote, steps
from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    describe_error,
)
from jaxfound.resources.checkpoint.manifest import Key, Manifest
from jaxfound.resources.checkpoint.sums import CHUNK_BYTES, SUMS, FileSum
from jaxfound.resources.checkpoint.tiers import COPIES, LocalTier, SharedTier, part_name
from jaxfound.resources.failpoint import reach

log = logging.getLogger(__name__)

LOCK, RECORD, OUTPUT = "uploader.lock", "uploads.jsonl", "uploader.log"
# Between two looks when other hosts are waited for, or after a failure.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# Without any progress for so long it ends; the next save starts another.
PATIENCE_S = 900.0
# Training comes first for the processor.
NICENESS = 10
# How low priorities for disk and processor are asked for, where the programs exist: from the start
# on, because the imports alone take a second of a core.
LOW_PRIORITY = (("ionice", "-c", "3"), ("nice", "-n", str(NICENESS)))
# The open file by which an uploader is handed its lock.
LOCK_HANDLE = 3


@dataclass
class Uploader:
    """The uploader of one host and run.

    Attributes:
        local: this host's disk.
        shared: where all hosts' parts go.
        rate_bps: most bytes a second; 0 = no limit.
        keep: newest steps that stay on the shared tier; 0 keeps all.
        url: object store that committed steps go on to; empty = none.
        patience_s: how long without progress until it ends.
        clock, sleep: of `time`.
    """

    local: LocalTier
    shared: SharedTier
    rate_bps: float | int = 0
    keep: int = 0
    url: str = ""
    patience_s: float | int = PATIENCE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    done: set[Key] = field(default_factory=set[Key])
    working: Key | None = None

    def run(self) -> bool:
        """Work until nothing is left to do; False when patience ended before that."""
        records, _ = read_records(self.local.root)
        self.done |= {Key(*cast(tuple[int, str], r["key"])) for r in records if r["kind"] == "done"}
        pause_s, ends_s = SHORTEST_PAUSE_S, self.clock() + self.patience_s
        while True:
            worked, is_open = self._turn_or_fail()
            if not is_open:
                return True
            if worked:
                pause_s, ends_s = SHORTEST_PAUSE_S, self.clock() + self.patience_s
                continue
            if self.clock() > ends_s:
                self._say_what_is_missing()
                return False
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say_what_is_missing(self) -> None:
        """Record whose parts did not come in time."""
        for key, path in self.shared.begun().items():
            there = publish.parts_there(path)
            counts = [m.part.count for m in there.values() if m.part is not None]
            missing = sorted(set(range(max(counts, default=0))) - set(there))
            if missing and not self.shared.is_refused(key):
                error = f"waited {self.patience_s:.0f} s for the parts of processes {missing}"
                self._record("failed", key, error=error)

    def turn(self) -> tuple[bool, bool]:
        """Do the next thing; return whether something was done, and whether something is left.

        Raises:
            OSError: if a tier does not take or give files; what is committed stays so.
        """
        self.shared.root.mkdir(parents=True, exist_ok=True)
        parts: dict[Key, list[tuple[Path, Manifest]]] = {}
        for path, manifest in self.local.parts():
            parts.setdefault(manifest.key, []).append((path, manifest))
        worked = self._publish_complete(parts) or self._note_committed(parts)
        if worked:
            return True, True
        committed = self.shared.committed()
        missing = {
            key: [(path, m) for path, m in found if not self._is_there(m)]
            for key, found in parts.items()
            if not self.shared.is_refused(key)
        }
        key = self.working = choose.next_upload(
            [key for key, found in missing.items() if found],
            committed=committed,
            begun=self.shared.begun(),
        )
        if key is not None:
            for path, manifest in missing[key]:
                self._upload(path, manifest)
            return True, True
        newest = max((key.step for key in committed), default=-1)
        waiting = [k for k in missing if k not in committed and k.step >= newest]
        return False, bool(waiting)

    def _turn_or_fail(self) -> tuple[bool, bool]:
        try:
            return self.turn()
        except OSError as error:
            # A full or lost disk may come back; training goes on meanwhile.
            self._record("failed", self.working, error=describe_error(error))
            return False, True

    def _is_there(self, manifest: Manifest) -> bool:
        assert manifest.part is not None
        gathering = self.shared.uploading(manifest.key)
        return (gathering / part_name(manifest.part.process)).exists()

    def _publish_complete(self, parts: dict[Key, list[tuple[Path, Manifest]]]) -> bool:
        """Join and commit the newest save whose parts are all there."""
        newest = max((key.step for key in self.shared.committed()), default=-1)
        begun = self.shared.begun()
        for key in sorted(begun, reverse=True):
            if key.step < newest or self.shared.is_refused(key):
                continue
            if publish.is_complete(publish.parts_there(begun[key])):
                return self._publish(key, parts.get(key, []))
        return False

    def _publish(self, key: Key, mine: list[tuple[Path, Manifest]]) -> bool:
        is_first = any(m.part is not None and m.part.process == 0 for _, m in mine)
        try:
            done = publish.publish(self.shared, key, is_first=is_first)
        except DamagedCheckpointError as error:
            self._refuse(key, str(error))
            return True
        if done is not None:
            publish.prune(self.shared, newest=key, keep=self.keep)
        return done is not None

    def _note_committed(self, parts: dict[Key, list[tuple[Path, Manifest]]]) -> bool:
        """Record a save that has become whole; the host of process 0 sends it to the store."""
        committed = self.shared.committed()
        for key, found in sorted(parts.items()):
            if key not in committed or key in self.done:
                continue
            is_first = any(m.part is not None and m.part.process == 0 for _, m in found)
            if self.url and is_first:
                self._push(committed[key], key)
            self._record("done", key)
            self.done.add(key)
            return True
        return False

    def _push(self, path: Path, key: Key) -> None:
        try:
            num_bytes = remote.push(path, self.url)
        except CheckpointError as error:
            self._record("damaged", key, error=str(error))
            return
        self._record("remote", key, num_bytes=num_bytes)

    def _upload(self, path: Path, manifest: Manifest) -> None:
        """Copy the files of a part that belong on the shared tier; its own manifest last."""
        part, started_s = manifest.part, self.clock()
        assert part is not None
        gathering = self.shared.uploading(manifest.key)
        files = {n: f for n, f in manifest.files.items() if not n.startswith(f"{COPIES}/")}
        try:
            for name, expected in files.items():
                self._copy(path / name, gathering / name, expected)
        except DamagedCheckpointError as error:
            self._refuse(manifest.key, str(error))
            return
        manifests.write(
            gathering, publish.with_files(manifest, files), name=part_name(part.process)
        )
        num_bytes = sum(file.num_bytes for file in files.values())
        self._record("part", manifest.key, num_bytes=num_bytes, total_s=self.clock() - started_s)

    def _copy(self, source: Path, target: Path, expected: FileSum) -> None:
        """Copy one file unless it is there; what does not have the sum it was written with is not.

        Raises:
            DamagedCheckpointError: if the file is not as it was written.
        """
        # It has its name only after its sum was found right.
        if target.exists() and target.stat().st_size == expected.num_bytes:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f"{target.name}.part")
        total, num_bytes, started_s = SUMS[expected.algorithm](), 0, self.clock()
        reach("save.upload")
        with source.open("rb") as have, half.open("wb") as copy:
            while chunk := have.read(CHUNK_BYTES):
                total.update(chunk)
                copy.write(chunk)
                num_bytes += len(chunk)
                self._slow_down(num_bytes, started_s)
            copy.flush()
            os.fsync(copy.fileno())
        if (num_bytes, total.hexdigest()) != (expected.num_bytes, expected.digest):
            half.unlink()
            raise DamagedCheckpointError(
                f"{source} was found damaged while it was copied: checksum {total.hexdigest()}, "
                f"{expected.digest} was written"
            )
        half.rename(target)
        steps.sync(target.parent)

    def _slow_down(self, num_bytes: int, started_s: float) -> None:
        if self.rate_bps:
            ahead_s = num_bytes / self.rate_bps - (self.clock() - started_s)
            if ahead_s > 0:
                self.sleep(ahead_s)

    def _refuse(self, key: Key, reason: str) -> None:
        self.shared.refuse(key, reason)
        self._record("damaged", key, error=reason)

    def _record(self, kind: str, key: Key | None, **values: object) -> None:
        """Append what happened to the record that trainers read."""
        entry = {"kind": kind, "key": key, "time": time.time(), **values}
        log.info("checkpoint.upload", extra=entry)
        with (self.local.root / RECORD).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_records(root: Path, *, first_byte: int = 0) -> tuple[list[dict[str, object]], int]:
    """Return what uploaders recorded under `root` from a position on, and the position after it."""
    path = root / RECORD
    if not path.exists():
        return [], first_byte
    with path.open("rb") as file:
        file.seek(first_byte)
        # A line that is being written is read the next time.
        whole, end, _ = file.read().rpartition(b"\n")
    records = [cast(dict[str, object], json.loads(line)) for line in whole.splitlines()]
    return records, first_byte + len(whole) + len(end)


@contextmanager
def only_one(root: Path) -> Generator[int | None]:
    """Hold the lock of this host's uploader, an open file; None when another has it."""
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield handle
    finally:
        os.close(handle)


def start(options: Sequence[str], *, root: Path) -> int | None:
    """Start an uploader with `options` if none runs for `root`; return its process id.

    It inherits the lock, so that there is no moment without. It has a session of its own, so that
    what ends the trainer does not end it.
    """
    low = [word for ask in LOW_PRIORITY if shutil.which(ask[0]) for word in ask]
    command = [*low, sys.executable, "-m", __package__ or "", *options, f"--lock={LOCK_HANDLE}"]
    log_flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    with only_one(root) as lock:
        if lock is None:
            return None
        started = os.posix_spawnp(
            command[0],
            command,
            {**os.environ, "JAX_PLATFORMS": "cpu"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, lock, LOCK_HANDLE),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(root / OUTPUT), log_flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        # Linux may share processors between sessions first: of their processes' priorities, those
        # in one session count for each other only.
        with suppress(OSError):
            Path(f"/proc/{started}/autogroup").write_text(str(NICENESS))
        return started


def options_of(
    local: LocalTier, shared: Path, *, mbps: float | int, keep: int, url: str
) -> list[str]:
    """Return the command line of an uploader."""
    return [
        f"--local={local.root}",
        f"--host={local.host}",
        f"--shared={shared.absolute()}",
        f"--mbps={mbps}",
        f"--keep={keep}",
        f"--remote={url}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program; 0 when nothing is left to do, 1 when it gave up, 2 when another runs."""
    parser = argparse.ArgumentParser(description="bring checkpoints to the shared tier")
    for name in ("--local", "--host", "--shared"):
        parser.add_argument(name, required=True)
    parser.add_argument("--remote", default="")
    parser.add_argument("--mbps", type=float, default=0.0)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--lock", type=int)
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(max(0, NICENESS - os.nice(0)))
    local = LocalTier(Path(asked.local), asked.host)
    uploader = Uploader(
        local,
        SharedTier(Path(asked.shared)),
        rate_bps=asked.mbps * 1e6,
        keep=asked.keep,
        url=asked.remote,
    )
    if asked.lock is not None:
        return 0 if uploader.run() else 1
    with only_one(local.root) as lock:
        if lock is None:
            return 2
        return 0 if uploader.run() else 1
