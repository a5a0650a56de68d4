"""Two passes in one order, so that the exchanges of each are under way while the other computes.

A compiler gives a branch one order of operations and estimates what each of them takes. It knows
little of kernels and of wires, starts an exchange where nothing is left to run beside it, and lets
it block. Here the order is decided beforehand: both passes are traced and opened, a walk with one
device and one wire picks what runs next, and barriers keep the compiler to it. A barrier moves no
byte; values are what they are without it.

Source: DeepSeek-V3 technical report, section 3.2.1, for a forward pass beside a backward pass.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxfound.parallelism.pipeline.opened import (
    PRODUCTS,
    Opened,
    bytes_of,
    each_once,
    needed_for,
    shape_of,
    variables,
)
from jaxfound.parallelism.pipeline.order import Graph, Window, exchanges, windows_of

type PyTree = Any

# A product, and what a compiler makes part of it.
ROUNDED = frozenset({"dot_general", "convert_element_type", "reshape", "sharding_constraint"})
NOTHING: Mapping[Var, Any] = MappingProxyType({})


def interleaved(first: Callable[[], PyTree], second: Callable[[], PyTree]) -> tuple[PyTree, PyTree]:
    """Return what two functions return, computed in one order.

    Neither may depend on the other. Without an exchange, or a product to put beside it, they run as
    they are.
    """

    def both() -> tuple[PyTree, PyTree]:
        return first(), second()

    traced, shapes = jax.make_jaxpr(both, return_shape=True)()
    if not any(exchanges(eqn) for eqn in traced.eqns):
        return both()
    return jax.tree.unflatten(jax.tree.structure(shapes), _results(traced))


def _results(traced: Jaxpr) -> list[jax.Array]:
    """Return what a program without inputs gives, its operations in order."""
    flat = jax.make_jaxpr(Opened(num_params=0).run(traced))()
    once = each_once(flat.eqns)
    wanted = [v if isinstance(v, Literal) else once.stands_for.get(v, v) for v in flat.outvars]
    eqns = needed_for(once.eqns, wanted)
    graph = Graph.of(eqns)
    windows = windows_of(graph)
    if not any(window.beside for window in windows):
        return jaxpr_as_fun(traced)()
    values = dict(zip(flat.constvars, flat.consts, strict=True))
    return _Run(eqns, graph, values).results(windows, wanted)


@dataclass
class _Run:
    """Runs operations with each window's products held between the ends of its exchange."""

    eqns: Sequence[JaxprEqn]
    graph: Graph
    values: dict[Var, Any]

    def results(self, windows: Sequence[Window], wanted: Sequence[Any]) -> list[Any]:
        """Return the values that are wanted."""
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.read_later = {v for eqn in self.eqns for v in variables(eqn.invars)}
        self.read_later |= {*variables(wanted)}
        self.made_at: dict[Var, int] = {}
        self.done: set[int] = set()
        for window in windows:
            if window.beside:
                self.hold(window)
        self.make(range(len(self.eqns)))
        return [self.read(v) for v in wanted]

    def hold(self, window: Window) -> None:
        """Run an exchange and its products, these neither before its start nor behind its end."""
        exchange, beside = window.exchange, set(window.beside)
        self.make(self.before([*window.ahead, exchange]) - {exchange})
        behind = {i: self.before([i]) for i in window.beside}
        heads = [i for i in window.beside if behind[i] & beside == {i}]
        inner = set().union(*(behind[i] - {i} for i in window.beside))
        starts = [self.boundary({exchange}), *(self.latest(behind[i]) for i in heads)]
        held = lax.optimization_barrier([[self.values[v] for v in vs] for vs in starts])
        for work, vs, values in zip(
            [{exchange}, *(behind[i] for i in heads)], starts, held, strict=True
        ):
            self.make(work - self.done, dict(zip(vs, values, strict=True)))
        ends = [v for i in window.beside if i not in inner for v in self.ends(i)]
        gives = [*(v for v in self.eqns[exchange].outvars if v in self.read_later), *ends]
        gives = list(dict.fromkeys(gives))
        over = lax.optimization_barrier([self.values[v] for v in gives])
        self.values.update(zip(gives, over, strict=True))

    def boundary(self, work: Iterable[int]) -> list[Var]:
        """Return the arrays that operations read and others have made.

        Numbers stay as they are: one says which branch is taken, and a compiler that knows it takes
        the branch out.
        """
        eqns = [self.eqns[i] for i in work]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
        return [v for v in read if v in self.maker and v not in made and shape_of(v).shape]

    def ends(self, i: int) -> list[Var]:
        """Run an operation, and return a value that is there once it is done, if one can be held.

        Rows that were packed are held where their exchange reads them, a rounded product behind its
        rounding: no barrier comes between operations that a compiler fuses.
        """
        self.make(self.before([i]))
        if self.graph.is_move[i]:
            return self.packed(i)
        v = min((v for v in self.eqns[i].outvars if v in self.read_later), key=bytes_of)
        while len(self.graph.feeds[i]) == 1 and self.eqns[i].primitive.name in ROUNDED:
            (i,) = self.graph.feeds[i]
            if self.eqns[i].primitive.name not in ROUNDED - PRODUCTS or self.before([i]) != {i}:
                break
            self.make([i])
            (v,) = self.eqns[i].outvars
        return [v]

    def packed(self, i: int) -> list[Var]:
        """Return what the exchange behind a move reads of it, made if all else is there."""
        todo, seen = [i], {i}
        while todo:
            j = todo.pop(0)
            for k in self.graph.feeds[j]:
                if self.graph.work_s[k] or self.graph.wire_s[k]:
                    found = [v for v in variables(self.eqns[k].invars) if self.maker.get(v) == j]
                    return [max(found, key=bytes_of)]
                if k not in seen and self.before([k]) == {k}:
                    seen.add(k)
                    self.make([k])
                    todo.append(k)
        return []

    def before(self, wanted: Iterable[int]) -> set[int]:
        """Return what has to run for these operations and has not, themselves among it."""
        todo, found = list(wanted), set()
        while todo:
            i = todo.pop()
            if i in self.done or i in found:
                continue
            found.add(i)
            todo += [self.maker[v] for v in variables(self.eqns[i].invars) if v in self.maker]
        return found

    def make(self, wanted: Iterable[int], other: Mapping[Var, Any] = NOTHING) -> None:
        """Run operations, in the order in which they were traced.

        Args:
            wanted: the operations.
            other: what they read in place of some values.
        """
        eqns = [self.eqns[i] for i in sorted(set(wanted) - self.done)]
        made = [v for eqn in eqns for v in eqn.outvars]
        known = set(made)
        read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in known)
        part = Jaxpr(
            [], list(read), made, eqns, debug_info=DebugInfo("interleave", "part", None, None)
        )
        given = [other.get(v, self.values[v]) for v in read]
        self.values.update(zip(made, jaxpr_as_fun(part)(*given), strict=True))
        self.made_at.update((v, len(self.made_at) + n) for n, v in enumerate(made))
        self.done.update(wanted)

    def read(self, v: Any) -> Any:
        return v.val if isinstance(v, Literal) else self.values[v]

    def latest(self, work: set[int]) -> list[Var]:
        """Return what was made last of what operations read; a parameter if they read no other."""
        eqns = [self.eqns[i] for i in work]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = {v for eqn in eqns for v in variables(eqn.invars) if shape_of(v).shape} - made
        return sorted(read, key=lambda v: (self.made_at.get(v, -1), -bytes_of(v)))[-1:]
