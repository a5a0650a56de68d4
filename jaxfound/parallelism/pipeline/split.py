"""A stage's backward pass cut in two: what its neighbours wait for, and its weight gradients.

The backward pass is traced once, calls inside it are opened, and its operations go to two programs:
I has those that any output but the weight gradients needs, W the rest. Between them lie the arrays
with the fewest bytes from which W follows by work that is cheap to do again: a minimum cut.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2, for I and W.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import (
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
    primitives,
)

from jaxfound.parallelism.pipeline.opened import (
    PRODUCTS,
    Atom,
    Opened,
    bytes_of,
    is_traced,
    needed_for,
    shape_of,
    variables,
)

type PyTree = Any

# What W may do again instead of having the result kept: moves, and arithmetic element by element.
# fmt: off
CHEAP = frozenset({
    "bitcast_convert_type", "broadcast_in_dim", "broadcast_to", "concatenate", "copy",
    "convert_element_type", "iota", "name", "pad", "pvary", "reshape", "rev", "select_n",
    "sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient", "tile",
    "transpose", "unstack",
    "abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "cos", "div", "eq", "erf", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
# What I may do for W alone, because the result has fewer bytes than what it is made of.
SHRINKING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
# The price of keeping a byte, and of one that I computes for W alone: W's work stays in W unless
# that saves memory.
BYTE, BYTE_FOR_W, UNBOUNDED = 16, 17, 1 << 62


class InputPart(NamedTuple):
    """What I gives.

    Attributes:
        outputs: what the backward pass returns beside the weight gradients.
        kept: arrays for W, as `SplitBackward.kept` describes them.
    """

    outputs: PyTree
    kept: list[jax.Array]


@dataclass(frozen=True)
class SplitBackward:
    """A backward pass as two programs.

    Attributes:
        kept: shape and format of each array between I and W; none of them is a parameter.
        input_products: matrix products of I, those in loops counted at each step.
        weight_products: matrix products of W.
        uncut: operations of I that also make what only W asks for, e.g. a scan over layers.
    """

    kept: tuple[jax.ShapeDtypeStruct, ...]
    input_products: int
    weight_products: int
    uncut: tuple[str, ...]
    _input: Jaxpr
    _weight: Jaxpr
    _outputs_tree: PyTree
    _grads_tree: PyTree

    @property
    def is_cut(self) -> bool:
        """Whether no product that only weight gradients need is in I."""
        return not self.uncut

    @property
    def kept_bytes(self) -> int:
        """Bytes between I and W of one micro-batch, whole over the axes left to the partitioner."""
        return sum(a.size * a.dtype.itemsize for a in self.kept)

    def input_part(self, params: PyTree, *operands: PyTree) -> InputPart:
        """Run I on arguments of the shapes, formats and mesh axes that were traced."""
        results = jaxpr_as_fun(self._input)(*jax.tree.leaves((params, operands)))
        count = self._outputs_tree.num_leaves
        return InputPart(self._outputs_tree.unflatten(results[:count]), list(results[count:]))

    def weight_part(self, params: PyTree, kept: Sequence[jax.Array]) -> PyTree:
        """Run W: the weight gradients, from the parameters that I had and what it kept."""
        results = jaxpr_as_fun(self._weight)(*jax.tree.leaves(params), *kept)
        return self._grads_tree.unflatten(results)


def split_backward(
    backward: Callable[..., tuple[PyTree, PyTree]], params: PyTree, *operands: PyTree
) -> SplitBackward:
    """Return `backward` cut in two; its parts run in any branch of the trace that calls this.

    Args:
        backward: takes params and operands, runs the stage forward and backward, returns its weight
            gradients and everything else. Arrays it closes over are constants of both parts; a
            value of the trace around it is kept for W like an operand.
        params: arrays, or their shapes and formats.
        operands: likewise.

    Raises:
        ValueError: if the backward pass has side effects, which would be lost or happen twice.
    """
    leaves, num_params = jax.tree.leaves((params, operands)), len(jax.tree.leaves(params))
    traced, (grads, outputs) = jax.make_jaxpr(backward, return_shape=True)(params, *operands)
    _refuse_effects(traced)
    flat = jax.make_jaxpr(Opened(num_params=num_params).run(traced))(*leaves)
    count = len(jax.tree.leaves(grads))
    of_grads, of_outputs = flat.outvars[:count], flat.outvars[count:]
    constants = [v for v, c in zip(flat.constvars, flat.consts, strict=True) if not is_traced(c)]
    free = [*flat.invars[:num_params], *constants]

    kept = _cheapest(flat, of_grads, of_outputs, free=free)
    first = needed_for(flat.eqns, [*of_outputs, *kept])
    second = needed_for(flat.eqns, of_grads, given=kept)
    return SplitBackward(
        kept=tuple(shape_of(v) for v in kept),
        input_products=_products(first),
        weight_products=_products(second),
        uncut=_uncut(flat, of_grads, of_outputs),
        _input=_program(flat, first, flat.invars, [*of_outputs, *kept]),
        _weight=_program(flat, second, [*flat.invars[:num_params], *kept], of_grads),
        _outputs_tree=jax.tree.structure(outputs),
        _grads_tree=jax.tree.structure(grads),
    )


def _refuse_effects(traced: Jaxpr) -> None:
    # That an operation runs over a mesh axis counts as an effect too.
    effects = [str(e) for e in traced.effects if type(e).__name__ != "NamedAxisEffect"]
    if effects:
        raise ValueError(
            f"the backward pass of a stage has side effects {effects}: cut in two, they would be "
            "lost or happen twice. Take debug prints and callbacks out of the stage, or use a "
            "schedule that leaves the backward pass whole"
        )


def _program(
    flat: Jaxpr, eqns: Sequence[JaxprEqn], takes: Sequence[Var], gives: Sequence[Atom]
) -> Jaxpr:
    """Return the program of these operations, with those constants of `flat` that it reads."""
    read = {*variables(gives), *(v for eqn in eqns for v in variables(eqn.invars))} - {*takes}
    constants = [(v, c) for v, c in zip(flat.constvars, flat.consts, strict=True) if v in read]
    held, values = [v for v, _ in constants], [c for _, c in constants]
    names = DebugInfo("split_backward", "part", None, None)
    return Jaxpr(held, takes, gives, eqns, debug_info=names, consts=values)


def _cheapest(
    flat: Jaxpr, grads: Sequence[Atom], outputs: Sequence[Atom], *, free: Sequence[Var]
) -> list[Var]:
    """Return the values with the fewest bytes that I can make and that W can go on from."""
    first = {id(eqn) for eqn in needed_for(flat.eqns, outputs)}
    known = {*free}
    price = {v: BYTE * bytes_of(v) for v in [*flat.constvars, *flat.invars] if v not in known}
    # The values that W can make itself, from other values.
    origins: dict[Var, list[Var]] = {}
    for eqn in flat.eqns:
        name, needs = eqn.primitive.name, [v for v in variables(eqn.invars) if v not in known]
        if id(eqn) in first:
            price.update((v, BYTE * bytes_of(v)) for v in eqn.outvars)
        elif name in CHEAP | SHRINKING and all(v in price for v in needs):
            price.update((v, BYTE_FOR_W * bytes_of(v)) for v in eqn.outvars)
        if id(eqn) not in first or name in CHEAP:
            origins.update((v, needs) for v in eqn.outvars)

    network = _Network()
    todo = [v for v in variables(grads) if v not in known]
    for v in todo:
        network.connect((v, "out"), "sink", UNBOUNDED)
    seen = set(todo)
    while todo:
        v = todo.pop()
        network.connect((v, "in"), (v, "out"), price.get(v, UNBOUNDED))
        if v not in origins:
            network.connect("source", (v, "in"), UNBOUNDED)
        for origin in origins.get(v, ()):
            network.connect((origin, "out"), (v, "in"), UNBOUNDED)
            todo.extend({origin} - seen)
            seen.add(origin)
    late = network.side_of_sink()
    made = [*flat.constvars, *flat.invars, *(v for eqn in flat.eqns for v in eqn.outvars)]
    return [v for v in made if (v, "out") in late and (v, "in") not in late]


class _Network:
    """A directed graph whose edges have capacities."""

    def __init__(self) -> None:
        self._left: dict[Any, dict[Any, int]] = {"source": {}, "sink": {}}

    def connect(self, start: object, end: object, capacity: int) -> None:
        """Add an edge."""
        self._left.setdefault(start, {})[end] = capacity
        self._left.setdefault(end, {}).setdefault(start, 0)

    def side_of_sink(self) -> set[object]:
        """Return the nodes behind the minimum cut that is closest to the sink.

        Source: Edmonds & Karp (1972); searched from the sink.
        """
        while True:
            following = self._paths_to_sink()
            if "source" not in following:
                return set(following)
            path = ["source"]
            while path[-1] != "sink":
                path.append(following[path[-1]])
            edges = list(itertools.pairwise(path))
            flow = min(self._left[a][b] for a, b in edges)
            for a, b in edges:
                self._left[a][b] -= flow
                self._left[b][a] += flow

    def _paths_to_sink(self) -> dict[Any, Any]:
        """Return, for each node with room on a shortest way to the sink, the node after it."""
        following: dict[Any, Any] = {"sink": None}
        queue = ["sink"]
        for node in queue:
            room = (n for n in self._left[node] if self._left[n][node] > 0)
            found = [n for n in room if n not in following]
            following.update(dict.fromkeys(found, node))
            queue.extend(found)
            if "source" in following:
                break
        return following


def _products(eqns: Iterable[JaxprEqn]) -> int:
    """Return the matrix products of these operations, counted at each step of a loop."""
    total = 0
    for eqn in eqns:
        inside = sum(_products(inner.eqns) for inner in jaxprs_in_params(eqn.params))
        steps = eqn.params["length"] if eqn.primitive is primitives.scan_p else 1
        total += 1 if eqn.primitive.name in PRODUCTS else steps * inside
    return total


def _uncut(flat: Jaxpr, grads: Sequence[Atom], outputs: Sequence[Atom]) -> tuple[str, ...]:
    """Return the operations with products inside that `outputs` need and that also serve W alone.

    Of their results there is one that nothing on the way to `outputs` reads.
    """
    first = needed_for(flat.eqns, outputs)
    in_first = {id(eqn) for eqn in first}
    later = [eqn for eqn in needed_for(flat.eqns, grads) if id(eqn) not in in_first]
    for_w = {*variables(grads), *(v for eqn in later for v in variables(eqn.invars))}
    for_w -= {*variables(outputs), *(v for eqn in first for v in variables(eqn.invars))}
    found = [eqn for eqn in first if not for_w.isdisjoint(eqn.outvars)]
    counts = [(eqn.primitive.name, _products([eqn])) for eqn in found]
    return tuple(f"{name} with {count} matrix products" for name, count in counts if count)
