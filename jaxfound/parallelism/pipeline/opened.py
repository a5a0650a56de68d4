"""A traced program opened: its operations one by one, calls and unrolled loops taken apart."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import (
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    primitives,
)

type Atom = Var | Literal

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call"})
# Calls that are opened, and the parameter that holds their program.
CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


class Opened:
    """Runs a program operation by operation, its calls and unrolled loops opened."""

    def __init__(self, *, num_params: int) -> None:
        self._num_params = num_params
        # Values that depend on more than parameters, by id; held so that no other gets their id.
        self._moving: dict[int, Any] = {}

    def run(self, traced: Jaxpr) -> Callable[..., list[Any]]:
        """Return `traced` as a function of its inputs, the parameters first."""

        def opened(*args: jax.Array) -> list[Any]:
            moving = [*args[self._num_params :], *(c for c in traced.consts if is_traced(c))]
            self._moving.update((id(x), x) for x in moving)
            return self._program(traced, args)

        return opened

    def _program(self, jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for eqn in jaxpr.eqns:
            opened = self._call if eqn.primitive in CALLS else self._operation
            if eqn.primitive is primitives.scan_p and _is_unrolled(eqn):
                opened = self._loop
            values.update(zip(eqn.outvars, opened(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _operation(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        takes = [v for v in eqn.invars if isinstance(v, Var)]
        given = [x for x, v in zip(inputs, eqn.invars, strict=True) if isinstance(v, Var)]
        names = DebugInfo("opened", eqn.primitive.name, None, None)
        alone = Jaxpr([], takes, eqn.outvars, [eqn], debug_info=names)
        return self._made_of(given, jaxpr_as_fun(alone)(*given))

    def _call(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if eqn.primitive is primitives.remat_p and eqn.params["differentiated"]:
            inputs = self._apart(inputs, eqn.params["prevent_cse"])
        with jax.named_scope(str(eqn.source_info.name_stack)):
            return self._program(eqn.params[CALLS[eqn.primitive]], inputs)

    def _apart(self, inputs: list[Any], asked: bool | tuple[bool, ...]) -> list[Any]:
        """Return the inputs of a recomputation so that no compiler merges it with the original.

        Parameters stay as they are: W has them anyway.
        """
        flags = asked if isinstance(asked, tuple) else (asked,) * len(inputs)
        places = [i for i, x in enumerate(inputs) if flags[i] and id(x) in self._moving]
        if not places:
            return inputs
        given = [inputs[i] for i in places]
        barred = self._made_of(given, jax.lax.optimization_barrier(given))
        replaced = dict(zip(places, barred, strict=True))
        return [replaced.get(i, x) for i, x in enumerate(inputs)]

    def _loop(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        p = eqn.params
        consts, carry, stacked = (list(part) for part in p["ft_in"].update(inputs).unpack())
        steps = range(p["length"])
        rows: dict[int, list[Any]] = {}
        with jax.named_scope(str(eqn.source_info.name_stack)):
            for i in reversed(steps) if p["reverse"] else steps:
                row = [jax.lax.index_in_dim(x, i, keepdims=False) for x in stacked]
                for x, part in zip(stacked, row, strict=True):
                    self._made_of([x], [part])
                results = self._program(p["jaxpr"], [*consts, *carry, *row])
                carry, rows[i] = results[: len(carry)], results[len(carry) :]
            columns = zip(*(rows[i] for i in steps), strict=True)
            return [*carry, *(self._made_of(c, [jnp.stack(c)])[0] for c in columns)]

    def _made_of(self, inputs: Iterable[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """Return `outputs`, noted as moving if an input is."""
        if any(id(x) in self._moving for x in inputs):
            self._moving.update((id(x), x) for x in outputs)
        return outputs


def _is_unrolled(scan: JaxprEqn) -> bool:
    return 0 < scan.params["length"] <= scan.params["unroll"]


def needed_for(
    eqns: Sequence[JaxprEqn], wanted: Iterable[Atom], *, given: Iterable[Var] = ()
) -> list[JaxprEqn]:
    """Return the operations, in order, that make `wanted` from the inputs and `given`."""
    known = set(given)
    needed, found = set(variables(wanted)) - known, []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(v for v in variables(eqn.invars) if v not in known)
    return found[::-1]


class Once(NamedTuple):
    """Operations of which none is done twice.

    Attributes:
        eqns: in order.
        stands_for: what to read in place of results that were there already.
    """

    eqns: list[JaxprEqn]
    stands_for: dict[Var, Var]


def each_once(eqns: Sequence[JaxprEqn]) -> Once:
    """Return operations without those that repeat an earlier one on the same values.

    Behind a barrier values are others, so that what is computed again on purpose stays. What sends
    stays too: two devices have to agree on each send.
    """
    kept: list[JaxprEqn] = []
    stands_for: dict[Var, Var] = {}
    first: dict[Any, JaxprEqn] = {}
    for eqn in eqns:
        takes = [v if isinstance(v, Literal) else stands_for.get(v, v) for v in eqn.invars]
        eqn = eqn.replace(invars=takes)
        key = _key(eqn)
        before = first.get(key) if key is not None else None
        if before is None:
            kept.append(eqn)
            if key is not None:
                first[key] = eqn
        else:
            stands_for.update(zip(eqn.outvars, before.outvars, strict=True))
    return Once(kept, stands_for)


def _key(eqn: JaxprEqn) -> Any:
    """Return what two operations that give the same have in common; None for one that stays."""
    if eqn.effects or eqn.primitive.name == "optimization_barrier":
        return None
    takes = tuple((str(v.aval), str(v.val)) if isinstance(v, Literal) else v for v in eqn.invars)
    key = (eqn.primitive, takes, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return what is no constant, in order."""
    return [v for v in atoms if not isinstance(v, Literal)]


def bytes_of(v: Var) -> int:
    """Return the bytes of a value."""
    shape = shape_of(v)
    return shape.size * shape.dtype.itemsize


def shape_of(v: Var) -> jax.ShapeDtypeStruct:
    """Return the shape and the format of a value."""
    assert isinstance(v.aval, ShapedArray), v.aval
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def is_traced(constant: object) -> bool:
    """Return whether a constant of a program is a value of the trace around it."""
    return isinstance(constant, Tracer)
