"""What the processes of a job say to each other outside of device programs.

JAX's coordination service is the only control plane: a store of keys and barriers with time limits,
kept by process 0. A wait that ends early names who is missing, so nobody hangs in silence. The one
file that touches the service's client, which is private to JAX; its contract is tested.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax
from jax._src import distributed

# Between two looks at the store: short against a save, long against the cost of a look.
LONGEST_PAUSE_S = 0.1


class PeerError(RuntimeError):
    """Other processes of the job did not come, or the service that joins them is gone.

    Attributes:
        missing: the processes that did not come; empty when the service cannot be asked.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


@runtime_checkable
class Store(Protocol):
    """The keys that all processes see."""

    def put(self, key: str, value: str) -> None:
        """Set `key`, over any earlier value."""
        ...

    def read(self, folder: str) -> dict[str, str]:
        """Return what is under `folder/`, by the rest of the key."""
        ...

    def delete(self, folder: str) -> None:
        """Remove `folder` and all under it."""
        ...


class LocalStore:
    """The keys of a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        """Set `key`, over any earlier value."""
        self._values[key] = value

    def read(self, folder: str) -> dict[str, str]:
        """Return what is under `folder/`, by the rest of the key."""
        prefix = f"{folder}/"
        found = list(self._values.items())
        return {key[len(prefix) :]: value for key, value in found if key.startswith(prefix)}

    def delete(self, folder: str) -> None:
        """Remove `folder` and all under it."""
        doomed = [key for key in self._values if key == folder or key.startswith(f"{folder}/")]
        for key in doomed:
            del self._values[key]


class CoordinationStore:
    """The keys of JAX's coordination service.

    Raises:
        PeerError: from every call, if the service is gone: process 0 has ended.
    """

    def __init__(self) -> None:
        client = distributed.global_state.client
        if client is None:
            raise PeerError(
                "this process has not joined a job: call jax.distributed.initialize first, or "
                "start it by `jaxfound launch`"
            )
        self._client = client

    def put(self, key: str, value: str) -> None:
        """Set `key`, over any earlier value."""
        try:
            self._client.key_value_set(key, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error

    def read(self, folder: str) -> dict[str, str]:
        """Return what is under `folder/`, by the rest of the key."""
        prefix = f"{folder}/"
        try:
            found = self._client.key_value_dir_get(prefix)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error
        return {key[len(prefix) :]: value for key, value in found}

    def delete(self, folder: str) -> None:
        """Remove `folder` and all under it."""
        try:
            self._client.key_value_delete(folder)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error


def _gone(error: Exception) -> PeerError:
    return PeerError(
        f"the coordination service does not answer ({error}): process 0 has ended or cannot be "
        "reached. Look at its log; `jaxfound launch` restarts the job"
    )


@dataclass
class ControlPlane:
    """This process among those of the job.

    All processes make the same calls of `barrier`, `gather` and `broadcast` in the same order for
    one name; calls of different names (from other threads) do not mix.

    Attributes:
        process: number of this process, from 0.
        count: how many there are.
        store: the keys they share.
        timeout_s: how long a wait may last where the call names no limit.
    """

    process: int
    count: int
    store: Store
    timeout_s: float | int = 300
    _rounds: dict[str, int] = field(default_factory=dict[str, int], repr=False)

    @classmethod
    def of_job(cls, *, timeout_s: float | int = 300) -> "ControlPlane":
        """Return the plane of the job that this process has joined, or of this process alone."""
        if distributed.global_state.client is None:
            return cls(0, 1, LocalStore(), timeout_s)
        state = distributed.global_state
        return cls(state.process_id, state.num_processes, CoordinationStore(), timeout_s)

    @property
    def is_first(self) -> bool:
        """True for process 0, which decides where one must."""
        return self.process == 0

    def gather(
        self, name: str, value: str, *, timeout_s: float | int | None = None
    ) -> tuple[str, ...]:
        """Return every process's `value`, in order of the processes, when all have given theirs.

        Raises:
            PeerError: if some have not within the limit; names them.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        turn = self._rounds.get(name, 0)
        self._rounds[name] = turn + 1
        folder = f"jaxfound/{name}/{turn}"
        self.store.put(f"{folder}/{self.process}", value)
        # All have read the round before the last when they come to this one.
        if turn >= 2 and self.is_first:
            self.store.delete(f"jaxfound/{name}/{turn - 2}")
        return self._all_of(folder, name=name, limit_s=limit_s)

    def barrier(self, name: str, *, timeout_s: float | int | None = None) -> None:
        """Return when every process has come here; raises as `gather` does."""
        self.gather(name, "", timeout_s=timeout_s)

    def broadcast(self, name: str, value: str, *, timeout_s: float | int | None = None) -> str:
        """Return process 0's `value` on every process; raises as `gather` does."""
        return self.gather(name, value if self.is_first else "", timeout_s=timeout_s)[0]

    def _all_of(self, folder: str, *, name: str, limit_s: float | int) -> tuple[str, ...]:
        ends_s = time.monotonic() + limit_s
        pause_s = 0.001
        while True:
            found = self.store.read(folder)
            missing = tuple(p for p in range(self.count) if str(p) not in found)
            if not missing:
                return tuple(found[str(p)] for p in range(self.count))
            if time.monotonic() > ends_s:
                raise PeerError(
                    f"process {self.process} waited {limit_s:.0f} s at {name!r} for processes "
                    f"{list(missing)} of {self.count}: they have ended, hang, or are slower than "
                    "that. Look at their logs, or raise the limit",
                    missing=missing,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
