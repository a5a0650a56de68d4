"""The order of products and exchanges: one device, one wire, the longest chain first.

What each takes is reckoned from its shapes, roughly: an order follows from what seconds are to each
other. Arithmetic that is no product takes none, because a compiler makes it part of its neighbours.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jaxfound.parallelism.pipeline.opened import PRODUCTS, bytes_of, shape_of, variables

EXCHANGES = frozenset({"all_to_all", "ragged_all_to_all"})
KERNELS = frozenset(
    {
        "pallas_call",
        "mpmd_map",
        "core_map",
        "dot_product_attention_fwd_wrapper",
        "dot_product_attention_bwd_wrapper",
    }
)
# What the order is found with: FLOP/s of products, bytes/s of memory and of a wire, seconds of a
# message. Those of an H200 in round numbers; the order follows from what they are to each other.
FLOPS, MEMORY_BPS, WIRE_BPS, MESSAGE_S = 1e15, 5e12, 2e11, 2e-5


@dataclass(frozen=True)
class Window:
    """An exchange, and what is computed while it is under way; operations by their place.

    Attributes:
        exchange: what is sent.
        ahead: what runs before it, while nothing is sent.
        beside: what runs while it is under way, in order.
    """

    exchange: int
    ahead: tuple[int, ...]
    beside: tuple[int, ...]


def windows_of(graph: "Graph") -> list[Window]:
    """Return the exchanges in the order in which they take the wire.

    Of what can run, that comes first behind which the longest chain of work and of sends waits.
    """
    return _Walk(graph).run()


@dataclass(frozen=True)
class Graph:
    """What operations wait for, and what they take.

    Attributes:
        feeds: the operations that read each one's results.
        num_waits: how many operations each one waits for.
        work_s: seconds of its products, or of its rows that are moved; 0 for all else.
        is_move: whether its work is moving rows.
        wire_s: seconds of an exchange; 0 for all else.
        tail_s: seconds from its start to the end of the longest chain behind it.
    """

    feeds: list[list[int]]
    num_waits: list[int]
    work_s: list[float]
    is_move: list[bool]
    wire_s: list[float]
    tail_s: list[float]

    @classmethod
    def of(cls, eqns: Sequence[JaxprEqn]) -> "Graph":
        """Return the graph of operations that stand in the order in which they were traced.

        Rows that are gathered for a product count as work of that product, since a compiler makes
        gathers of gathers one.
        """
        maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        feeds: list[list[int]] = [[] for _ in eqns]
        num_waits = []
        for i, eqn in enumerate(eqns):
            made_by = {maker[v] for v in variables(eqn.invars) if v in maker}
            num_waits.append(len(made_by))
            for j in made_by:
                feeds[j].append(i)
        work = [product_seconds(eqn) for eqn in eqns]
        wire = [0.0 if w else exchange_seconds(eqn) for w, eqn in zip(work, eqns, strict=True)]
        is_move = [False] * len(eqns)
        for i in reversed(range(len(eqns))):
            seconds = 0.0 if work[i] or wire[i] else move_seconds(eqns[i])
            into = (
                _readers(i, feeds, [a + b for a, b in zip(work, wire, strict=True)])
                if seconds
                else []
            )
            is_move[i] = bool(seconds) and not any(work[j] for j in into)
            work[next((j for j in into if work[j]), i)] += seconds
        tail = [0.0] * len(eqns)
        for i in reversed(range(len(eqns))):
            tail[i] = work[i] + wire[i] + max((tail[j] for j in feeds[i]), default=0.0)
        return cls(feeds, num_waits, work, is_move, wire, tail)


def _readers(i: int, feeds: Sequence[Sequence[int]], takes_s: Sequence[float]) -> list[int]:
    """Return the operations that take time and that read what comes of operation i without any."""
    todo, seen, found = [i], {i}, []
    while todo:
        for j in feeds[todo.pop()]:
            if j not in seen:
                seen.add(j)
                (found if takes_s[j] else todo).append(j)
    return sorted(found)


@dataclass
class _Walk:
    """One device that computes and one wire that sends, until everything is done."""

    graph: Graph
    now: float = 0.0
    sending: tuple[int, float] | None = None
    windows: list[Window] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    to_compute: list[tuple[float, int]] = field(default_factory=list)
    to_send: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> list[Window]:
        self.waits = list(self.graph.num_waits)
        self.release(i for i, count in enumerate(self.waits) if not count)
        while self.to_compute or self.to_send or self.sending:
            self.send()
            if self.to_compute:
                self.compute()
            elif self.sending is not None:
                self.now = max(self.now, self.sending[1])
            self.arrive()
        return self.windows

    def release(self, ready: Iterable[int]) -> None:
        """Let operations run whose inputs are there; those that take no time are run."""
        todo = list(ready)
        while todo:
            i = todo.pop()
            if self.graph.work_s[i]:
                heapq.heappush(self.to_compute, (-self.graph.tail_s[i], i))
            elif self.graph.wire_s[i]:
                heapq.heappush(self.to_send, (-self.graph.tail_s[i], i))
            else:
                todo += self.finished(i)

    def finished(self, i: int) -> list[int]:
        """Return what nothing else holds up once an operation is done."""
        freed = []
        for j in self.graph.feeds[i]:
            self.waits[j] -= 1
            if not self.waits[j]:
                freed.append(j)
        return freed

    def send(self) -> None:
        if self.sending is None and self.to_send:
            _, i = heapq.heappop(self.to_send)
            self.sending = i, self.now + self.graph.wire_s[i]

    def compute(self) -> None:
        _, i = heapq.heappop(self.to_compute)
        self.now += self.graph.work_s[i]
        (self.ahead if self.sending is None else self.beside).append(i)
        self.release(self.finished(i))

    def arrive(self) -> None:
        if self.sending is not None and self.sending[1] <= self.now:
            i, self.sending = self.sending[0], None
            self.windows.append(Window(i, tuple(self.ahead), tuple(self.beside)))
            self.ahead, self.beside = [], []
            self.release(self.finished(i))


def product_seconds(eqn: JaxprEqn) -> float:
    """Return the seconds of the matrix products of an operation; of branches, the shortest.

    Work that is no product is left out: the compiler fuses it with its neighbours.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        (inner, _), _ = eqn.params["dimension_numbers"]
        shape = shape_of(eqn.invars[0]).shape  # type: ignore[arg-type]
        flops = 2 * shape_of(eqn.outvars[0]).size * math.prod(shape[d] for d in inner)
        return max(flops / FLOPS, _moved_bytes(eqn) / MEMORY_BPS)
    if name in PRODUCTS | KERNELS:
        return _moved_bytes(eqn) / MEMORY_BPS
    inside = [sum((product_seconds(e) for e in p.eqns), 0.0) for p in jaxprs_in_params(eqn.params)]
    steps = eqn.params.get("length", 1) if name == "scan" else 1
    return steps * min(inside, default=0.0)


def move_seconds(eqn: JaxprEqn) -> float:
    """Return the seconds in which rows are gathered; 0 for other operations, and for few rows."""
    if eqn.primitive.name != "gather":
        return 0.0
    seconds = 2 * bytes_of(eqn.outvars[0]) / MEMORY_BPS
    return seconds if seconds > MESSAGE_S else 0.0


def exchange_seconds(eqn: JaxprEqn) -> float:
    """Return the seconds of an exchange of rows; 0 for what is none."""
    if not exchanges(eqn):
        return 0.0
    sides = (eqn.invars, eqn.outvars)
    num_bytes = min(sum(bytes_of(v) for v in variables(side)) for side in sides)
    return MESSAGE_S + num_bytes / WIRE_BPS


def exchanges(eqn: JaxprEqn) -> bool:
    """Return whether an operation sends rows, or one inside it."""
    inside = (e for p in jaxprs_in_params(eqn.params) for e in p.eqns)
    return eqn.primitive.name in EXCHANGES or any(exchanges(e) for e in inside)


def _moved_bytes(eqn: JaxprEqn) -> int:
    return sum(bytes_of(v) for v in [*variables(eqn.invars), *eqn.outvars])
