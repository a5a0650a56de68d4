"""A program run an operation at a time, twice: as it is, and in float32 or on another device.

Calls and loops are opened, so that an operation is a line of the model's source. The second run
follows the first: what has a narrow format there has float32 here, and each operation takes the
second run's own inputs, so that a difference grows as it would in a run of that kind. A compiler
that fuses operations may round less often than the first run does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jaxfound.resources.topology import Device

# Parameters of operations that stand for what they call.
CALLS = ("jaxpr", "call_jaxpr")
OPENED = frozenset(
    (
        *("jit", "closed_call", "core_call", "eval_jaxpr"),
        *("remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
    )
)
# They move no number on one device.
PLACING = frozenset(("sharding_constraint", "reshard", "mesh_cast"))
# They mean the bits of a format, not its numbers.
OF_BITS = frozenset(("bitcast_convert_type",))
FRAMES = 3
# A value in the first run and in the second.
type Pair = tuple[Any, Any]


class Op(NamedTuple):
    """One operation of the program, and what it gave.

    Attributes:
        number: how many operations ran before it.
        name: of the primitive.
        source: lines of the program that asked for it, the innermost first.
        occurrence: how many operations of that name and source ran before it; of layers that are
            walked one by one, the layer.
        shape: of its first result that is not an integer.
        dtype: of that.
        num_bad: values of it that are not finite.
        difference: norm of the difference to the second run over that run's norm; infinite where
            one of both is not finite and the other is.
    """

    number: int
    name: str
    source: str
    occurrence: int
    shape: tuple[int, ...]
    dtype: str
    num_bad: int
    difference: float

    def text(self) -> str:
        """Return it as one line."""
        nth = f", occurrence {self.occurrence + 1}" if self.occurrence else ""
        return f"{self.name} {self.dtype}{list(self.shape)} at {self.source}{nth}"


@dataclass(frozen=True)
class Versus:
    """What the second run does otherwise.

    Attributes:
        in_float32: whether narrow formats become float32.
        device: where it runs; None = where the first does.
    """

    in_float32: bool
    device: Device | None = None


@dataclass
class Trace:
    """What both runs found.

    Attributes:
        bound: difference from which one is told.
        num_ops: operations run.
        first_bad: the first that made a NaN or an infinity of what was none, as the program is.
        first_bad_other: the same of the second run.
        first_difference: the first that differs by more than the bound.
    """

    bound: float | int
    num_ops: int = 0
    first_bad: Op | None = None
    first_bad_other: Op | None = None
    first_difference: Op | None = None
    _seen: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def note(self, eqn: JaxprEqn, inputs: Sequence[Pair], outputs: Sequence[Pair]) -> None:
        """Look at what one operation was given and what it gave, in both runs."""
        number, name, source = self.num_ops, eqn.primitive.name, source_of(eqn)
        occurrence = self._seen.get((name, source), 0)
        self._seen[name, source] = occurrence + 1
        self.num_ops += 1
        for a, b in outputs:
            if not jnp.issubdtype(a.dtype, jnp.floating):
                continue
            num_a, num_b, apart = (float(x) for x in compared(a, jax.device_put(b, a.device)))
            op = Op(number, name, source, occurrence, a.shape, str(a.dtype), int(num_a), apart)
            if self.first_bad is None and num_a and goes_wrong(a, [x for x, _ in inputs]):
                self.first_bad = op
            if self.first_bad_other is None and num_b and goes_wrong(b, [x for _, x in inputs]):
                self.first_bad_other = op._replace(num_bad=int(num_b), dtype=str(b.dtype))
            if self.first_difference is None and apart > self.bound:
                self.first_difference = op


def goes_wrong(output: Any, inputs: Sequence[Any]) -> bool:
    """Say whether an operation made a NaN of none, or an infinity of finite values.

    An infinity that is handed on is left alone: a mask is made of them.
    """
    found = [kinds(x) for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
    has_nan, has_inf = any(nan for nan, _ in found), any(inf for _, inf in found)
    nan, inf = kinds(output)
    return (nan and not has_nan) or (inf and not has_nan and not has_inf)


def kinds(x: Any) -> tuple[bool, bool]:
    """Return whether an array holds NaN, and whether it holds an infinity."""
    return bool(jnp.isnan(x).any()), bool(jnp.isinf(x).any())


@jax.jit
def compared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return how many values of each are not finite, and norm(a - b) / norm(b).

    The norms are of values that are finite in both; where only one is, or both are something else
    that is not finite, the difference is infinite.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    alike = finite | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    bad_a, bad_b = (~jnp.isfinite(a)).sum(), (~jnp.isfinite(b)).sum()
    a, b = jnp.where(finite, a, 0.0), jnp.where(finite, b, 0.0)
    # Scaled, so that squares of large numbers do not overflow.
    scale = jnp.maximum(jnp.abs(b).max(initial=0.0), jnp.abs(a).max(initial=0.0))
    scale = jnp.where(scale > 0, scale, 1.0)
    norm = jnp.sqrt(jnp.square(b / scale).sum())
    apart = jnp.sqrt(jnp.square((a - b) / scale).sum())
    relative = jnp.where(apart == 0, 0.0, apart / norm)
    return bad_a, bad_b, jnp.where(alike.all(), relative, jnp.inf)


def run_twice(
    program: Jaxpr, args: Sequence[Any], *, versus: Versus, bound: float | int
) -> tuple[list[Any], list[Any], Trace]:
    """Return the results of both runs, and what differs between them.

    Args:
        program: of `jax.make_jaxpr`.
        args: its inputs, flat.
        bound: relative difference of one operation's results from which it is told.
    """
    runs = _Runs(versus, Trace(bound))
    device = jax.local_devices()[0]
    own = [jax.device_put(np.asarray(x), device) for x in args]
    pairs = runs.program(program, [(x, runs.other(x)) for x in own])
    return [a for a, _ in pairs], [b for _, b in pairs], runs.trace


@dataclass
class _Runs:
    """Both runs of a program, side by side."""

    versus: Versus
    trace: Trace

    def other(self, x: Any) -> Any:
        """Return a value as the second run has it."""
        x = jnp.asarray(x)
        if self.versus.in_float32 and _is_narrow(x.dtype):
            x = x.astype(jnp.float32)
        return x if self.versus.device is None else jax.device_put(x, self.versus.device)

    def program(self, jaxpr: Any, args: Sequence[Pair]) -> list[Pair]:
        closed = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        consts = [(jnp.asarray(c), self.other(c)) for c in closed]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if _is_var(v)}
        kept = {v for v in jaxpr.outvars if _is_var(v)}
        for i, eqn in enumerate(jaxpr.eqns):
            inputs = [self.read(v, values) for v in eqn.invars]
            values.update(zip(eqn.outvars, self.operation(eqn, inputs), strict=True))
            # What nothing reads any more is let go: both runs hold every value.
            for v in [v for v in (*eqn.invars, *eqn.outvars) if _is_var(v)]:
                if last.get(v, i) <= i and v not in kept:
                    values.pop(v, None)
        return [self.read(v, values) for v in jaxpr.outvars]

    def read(self, v: Any, values: Mapping[Any, Pair]) -> Pair:
        if isinstance(v, Literal):
            value = jnp.asarray(v.val, cast(ShapedArray, v.aval).dtype)
            return value, self.other(value)
        return values[v]

    def operation(self, eqn: JaxprEqn, inputs: list[Pair]) -> list[Pair]:
        name = eqn.primitive.name
        if name in OPENED:
            called = next(eqn.params[key] for key in CALLS if key in eqn.params)
            return self.program(called, inputs)
        if name in LOOPS:
            return LOOPS[name](self, eqn, inputs)
        if name in PLACING:
            return inputs
        own = _bind(eqn, [a for a, _ in inputs], eqn.params)
        other = self.second(eqn, inputs)
        outputs = list(zip(own, other, strict=True))
        self.trace.note(eqn, inputs, outputs)
        return outputs

    def second(self, eqn: JaxprEqn, inputs: list[Pair]) -> list[Any]:
        """Return the results of an operation in the second run."""
        values, params = [b for _, b in inputs], eqn.params
        with jax.default_device(self.versus.device):
            if not self.versus.in_float32:
                return _bind(eqn, values, params)
            if eqn.primitive.name == "reduce_precision":
                return values
            if eqn.primitive.name in OF_BITS or any(True for _ in jaxprs_in_params(params)):
                # What it holds is written for the formats as they are.
                values = [b.astype(a.dtype) for a, b in inputs]
                return [self.other(x) for x in _bind(eqn, values, params)]
            return _bind(eqn, values, _widened(eqn))


def _scan(runs: _Runs, eqn: JaxprEqn, inputs: list[Pair]) -> list[Pair]:
    p = eqn.params
    places = p["ft_in"].update(range(len(inputs))).unpack()
    consts, carry, stacked = ([inputs[i] for i in part] for part in places)
    rows: dict[int, list[Pair]] = {}
    steps = range(p["length"])
    for i in reversed(steps) if p["reverse"] else steps:
        results = runs.program(p["jaxpr"], [*consts, *carry, *((a[i], b[i]) for a, b in stacked)])
        carry, rows[i] = results[: len(carry)], results[len(carry) :]
    columns = zip(*(rows[i] for i in steps), strict=True)
    return [*carry, *((_stacked(column, 0), _stacked(column, 1)) for column in columns)]


def _stacked(column: Sequence[Pair], run: int) -> Any:
    return jnp.stack([pair[run] for pair in column])


def _while(runs: _Runs, eqn: JaxprEqn, inputs: list[Pair]) -> list[Pair]:
    p = eqn.params
    asks, does = p["cond_nconsts"], p["body_nconsts"]
    asked, done, carry = inputs[:asks], inputs[asks : asks + does], inputs[asks + does :]
    while bool(runs.program(p["cond_jaxpr"], [*asked, *carry])[0][0]):
        carry = runs.program(p["body_jaxpr"], [*done, *carry])
    return carry


def _cond(runs: _Runs, eqn: JaxprEqn, inputs: list[Pair]) -> list[Pair]:
    # Both take the branch that the program as it is takes.
    branches = eqn.params["branches"]
    taken = min(max(int(inputs[0][0]), 0), len(branches) - 1)
    return runs.program(branches[taken], inputs[1:])


LOOPS: Mapping[str, Callable[[_Runs, JaxprEqn, list[Pair]], list[Pair]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def source_of(eqn: JaxprEqn) -> str:
    """Return the lines of our own sources and the caller's that asked for an operation."""
    traced = eqn.source_info.traceback
    frames = [] if traced is None else [f for f in traced.frames if _is_ours(f.file_name)]
    shown = [f"{'/'.join(Path(f.file_name).parts[-2:])}:{f.line_num}" for f in frames[:FRAMES]]
    return " < ".join(shown) or "unknown"


def _is_ours(file: str) -> bool:
    return not any(part in file for part in ("/jax/", "/jaxlib/", "/flax/", "/jaxtyping/", "<"))


def _bind(eqn: JaxprEqn, values: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(dict(params)))
    return list(found) if eqn.primitive.multiple_results else [found]


def _widened(eqn: JaxprEqn) -> dict[str, Any]:
    """Return an operation's parameters with float32 for every narrow format."""
    params = dict(_wide_items(eqn.params))
    if eqn.primitive.name == "dot_general":
        params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return params


def _wide_items(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        narrow = isinstance(value, np.dtype) and _is_narrow(value)
        yield name, np.dtype(np.float32) if narrow else value


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def _is_var(v: Any) -> bool:
    return not isinstance(v, Literal)
