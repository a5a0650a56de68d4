"""The hosts that came: they meet by name, within limits, and nobody waits twice for the same."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfound.resources.control import PeerError, Store

# Process 0 may have started this much later than another one.
MARGIN_S = 5.0


@dataclass
class Party:
    """The processes that came, meeting by name; who is late once is not waited for again."""

    store: Store
    process: int
    count: int
    limit_s: float | int
    present: list[int] = field(default_factory=list[int])
    lost: dict[int, str] = field(default_factory=dict[int, str])

    def greet(self) -> None:
        """Find out who is there: process 0 waits for all, at most the limit, and decides."""
        self.store.put(f"hello/{self.process}", "")
        if self.process == 0:
            came = self._wait("hello", range(self.count), self.limit_s)
            self.present = sorted(map(int, came))
            self.store.put("present/list", json.dumps(self.present))
            return
        found = self._wait("present", ("list",), self.limit_s + MARGIN_S)
        if not found:
            raise PeerError("process 0 does not say who came", missing=(0,))
        self.present = json.loads(found["list"])

    def gather[T](self, name: str, value: T, *, extra_s: float | int = 0) -> dict[int, T]:
        """Return what each process that is there gave as `name`, as JSON data.

        Args:
            extra_s: what the work before it may take longer on another host.
        """
        self.store.put(f"{name}/{self.process}", json.dumps([value]))
        found = self._wait(name, self.present, self.limit_s + extra_s)
        for late in [p for p in self.present if str(p) not in found]:
            self.present.remove(late)
            self.lost[late] = name
        return {p: json.loads(found[str(p)])[0] for p in self.present}

    def leave(self) -> None:
        """Say that nothing more is needed; process 0, which keeps the keys, goes last."""
        self.store.put(f"bye/{self.process}", "")
        if self.process == 0:
            self._wait("bye", self.present, MARGIN_S)

    def _wait(self, folder: str, keys: Sequence[object], limit_s: float | int) -> dict[str, str]:
        ends_s, wanted = time.monotonic() + limit_s, {str(key) for key in keys}
        while True:
            found = self.store.read(folder)
            if wanted <= found.keys() or time.monotonic() > ends_s:
                return found
            time.sleep(0.01)
