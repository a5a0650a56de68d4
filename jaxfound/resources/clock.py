"""How far this process's clock is from process 0's, by the round trip that was shortest.

Source: Mills, RFC 5905 (NTP), section 8: offset and delay of one exchange; the exchange with the
least delay bounds the error best.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxfound.resources.control import ControlPlane, Store

log = logging.getLogger(__name__)

# The event by which a log says how its times compare with those of process 0's log.
OFFSET_EVENT = "clock.offset"
ROUNDS = 10
PAUSE_S = 0.0005


class Offset(NamedTuple):
    """Where a clock is against process 0's.

    Attributes:
        offset_s: what to add to this process's time to get process 0's.
        error_s: the most by which that can be wrong: half of the round trip.
    """

    offset_s: float
    error_s: float


def measure_offset(
    store: Store,
    *,
    process: int,
    peers: Sequence[int],
    name: str = "clock",
    limit_s: float | int = 30,
    clock: Callable[[], float] = time.time,
) -> Offset | None:
    """Return this clock's offset, measured while process 0 answers; None if the limit passed.

    Every process makes this call at about the same time, process 0 among them.

    Args:
        store: keys that all see.
        process: this one.
        peers: the others but process 0.
        name: folder of the keys, another one for each measurement.
        clock: Unix time in seconds.
    """
    ends_s = time.monotonic() + limit_s
    if process == 0:
        _answer(store, set(peers), name=name, ends_s=ends_s, clock=clock)
        return Offset(0.0, 0.0)
    best: Offset | None = None
    for turn in range(ROUNDS):
        found = _ask(store, process, turn, name=name, ends_s=ends_s, clock=clock)
        if found is None:
            break
        if best is None or found.error_s < best.error_s:
            best = found
    store.put(f"{name}/done/{process}", "")
    return best


def log_offset(plane: ControlPlane, *, limit_s: float | int = 30) -> Offset | None:
    """Measure this clock against process 0's and log it; all processes of a job make this call.

    A job of one process has nothing to compare.
    """
    if plane.count == 1:
        return None
    peers = range(1, plane.count)
    found = measure_offset(plane.store, process=plane.process, peers=peers, limit_s=limit_s)
    if found is not None:
        log.info(OFFSET_EVENT, extra=found._asdict())
    return found


def _ask(
    store: Store,
    process: int,
    turn: int,
    *,
    name: str,
    ends_s: float,
    clock: Callable[[], float],
) -> Offset | None:
    sent_s = clock()
    store.put(f"{name}/ping/{process}-{turn}", "")
    while time.monotonic() < ends_s:
        pong = store.read(f"{name}/pong/{process}-{turn}").get("at")
        if pong is not None:
            back_s = clock()
            return Offset(float(pong) - (sent_s + back_s) / 2, (back_s - sent_s) / 2)
        time.sleep(PAUSE_S)
    return None


def _answer(
    store: Store, waiting: set[int], *, name: str, ends_s: float, clock: Callable[[], float]
) -> None:
    answered: set[str] = set()
    while waiting and time.monotonic() < ends_s:
        for key in store.read(f"{name}/ping"):
            if key not in answered:
                store.put(f"{name}/pong/{key}/at", repr(clock()))
                answered.add(key)
        waiting -= {int(done) for done in store.read(f"{name}/done")}
        time.sleep(PAUSE_S)
