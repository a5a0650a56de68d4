"""Which slot of a buffer each waiting value takes, so that none is written over while needed.

A rank keeps what arrives (stage inputs, gradients of stage outputs) and what I leaves for W in
buffers of a fixed number of slots. Slots are dealt out ahead of time by colouring intervals: on
each rank, in the order of writing, a value takes a slot that is free, and a new one only if none
is. That needs as many slots as values ever wait at once, and no colouring needs fewer.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# A value: the micro-batch and the stage that will read it.
type Value = tuple[int, int]


class Wait(NamedTuple):
    """How long a value waits in a buffer of a rank.

    Attributes:
        value: what waits.
        rank: where.
        written: the tick that writes it, after whatever that tick reads.
        last_read: the last tick that reads it, later than `written`.
    """

    value: Value
    rank: int
    written: int
    last_read: int


@dataclass(frozen=True)
class Slots:
    """The slots of one buffer, as many on every rank.

    Attributes:
        of: the slot of each value.
        count: slots that hold values; the slot of this number is the trash slot, which takes what
            nobody reads.
    """

    of: dict[Value, int]
    count: int

    def slot(self, value: Value) -> int:
        """Return the slot of a value, the trash slot if it never waits."""
        return self.of.get(value, self.count)


def assign_slots(waits: Iterable[Wait]) -> Slots:
    """Return slots in which every value stays from its writing to its last reading.

    A tick reads before it writes, so the tick that reads a value for the last time may give its
    slot to another.
    """
    of: dict[Value, int] = {}
    # Per rank: the slots there are, as (tick that reads the value inside for the last time, slot).
    taken: dict[int, list[tuple[int, int]]] = {}
    for wait in sorted(waits, key=lambda wait: wait.written):
        heap = taken.setdefault(wait.rank, [])
        if heap and heap[0][0] <= wait.written:
            slot = heap[0][1]
            heapq.heapreplace(heap, (wait.last_read, slot))
        else:
            slot = len(heap)
            heapq.heappush(heap, (wait.last_read, slot))
        of[wait.value] = slot
    return Slots(of, max(map(len, taken.values()), default=0))
