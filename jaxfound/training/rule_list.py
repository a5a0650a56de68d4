"""Precision rules from a ranking: fp8 where it may be, the compute format in what is kept from it.

Pure arithmetic on numbers of layers and names of operations.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from jaxfound.config.layer_formats import StackOfLayers, numbers_text
from jaxfound.config.precision import PrecisionConfig, PrecisionRule

By = Literal["layers", "operations"]
# Layers that are kept, by number of segments and by whether the last segment is kept.
type Ways = dict[tuple[int, bool], list[int]]


class Unit(NamedTuple):
    """What rules give one format: a layer, an operation of every layer of a stack, or of one.

    Attributes:
        stack: `leading` or `layers`.
        layer: number of the layer in the model; None for an operation of all layers.
        operation: path of the operation; empty for all of a layer.
    """

    stack: str
    layer: int | None = None
    operation: str = ""

    @property
    def pattern(self) -> str:
        """What a rule calls it."""
        if self.layer is None:
            return self.operation
        return f"{self.stack}.{self.layer}.{self.operation.partition('.')[2] or '*'}"

    def holds(self, path: str, layer: int) -> bool:
        """Return whether an operation of a layer is in it."""
        here = path == self.operation if self.operation else path.startswith(f"{self.stack}.")
        return here and self.layer in (None, layer)


def units_of(stacks: Iterable[StackOfLayers], by: By) -> list[Unit]:
    """Return every unit of a model, in order."""
    if by == "layers":
        return [Unit(stack.name, layer=n) for stack in stacks for n in stack.layers]
    return [Unit(stack.name, operation=path) for stack in stacks for path in stack.operations]


def operations_of(layers: Iterable[Unit], stacks: Iterable[StackOfLayers]) -> list[Unit]:
    """Return every operation of some layers, each by itself."""
    paths = {stack.name: stack.operations for stack in stacks}
    return [unit._replace(operation=path) for unit in layers for path in paths[unit.stack]]


def widened(kept: Iterable[int], layers: range, *, most: int) -> list[int]:
    """Return the fewest layers that hold all of `kept` and leave at most `most` segments.

    Segments are runs of layers that are all kept, or all not. Kept layers stay kept; runs between
    them that are not are filled, so that as few layers as can be are kept besides.

    Args:
        kept: numbers of layers.
        layers: of the whole stack.
        most: segments that there may be, at least 1.
    """
    wanted = set(kept)
    # The cheapest way to walk the layers so far, by number of segments and whether the last is
    # kept.
    ways: Ways = {(0, True): [], (0, False): []}
    for n in layers:
        states = [
            (count, keeps)
            for count in range(1, most + 1)
            for keeps in (True, False)
            if keeps or n not in wanted
        ]
        found = {(count, keeps): _longer(ways, n, count, keeps) for count, keeps in states}
        ways = {state: way for state, way in found.items() if way is not None}
    return min(ways.values(), key=len)


def _longer(ways: Ways, n: int, num_segments: int, keeps: bool) -> list[int] | None:
    """Return the cheapest way that ends with layer `n`, None where there is none."""
    before = ways.get((num_segments, keeps)), ways.get((num_segments - 1, not keeps))
    best = min((way for way in before if way is not None), key=len, default=None)
    return [*best, n] if best is not None and keeps else best


def rules_keeping(
    kept: Sequence[Unit],
    stacks: Sequence[StackOfLayers],
    *,
    compute: Literal["float32", "bfloat16"],
    most_segments: int,
) -> PrecisionConfig:
    """Return rules for fp8 in every layer but for what is kept in `compute`.

    Args:
        kept: units, all layers or all operations.
        stacks: of the model.
        compute: the format of what is kept.
        most_segments: of layers with the same formats, in a stack.
    """
    named = [u.operation for u in kept if u.layer is None]
    rules = [PrecisionRule(pattern=path, format=compute) for path in named]
    for stack in stacks:
        own = [u.layer for u in kept if u.stack == stack.name and u.layer is not None]
        layers = widened(own, stack.layers, most=most_segments)
        if len(layers) == len(stack.layers):
            # What no rule names is in `compute`.
            continue
        for run in runs_of(layers):
            pattern = f"{stack.name}.{numbers_text(run)}.*"
            rules.append(PrecisionRule(pattern=pattern, format=compute))
        if not set(named).issuperset(stack.operations):
            rules.append(PrecisionRule(pattern=f"{stack.name}.*", format="fp8"))
    return PrecisionConfig(compute=compute, rules=tuple(rules))


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return ascending numbers as runs without gaps."""
    runs: list[range] = []
    for n in numbers:
        if runs and runs[-1].stop == n:
            runs[-1] = range(runs[-1].start, n + 1)
        else:
            runs.append(range(n, n + 1))
    return runs


def fewest_kept[T](most: int, tried: Callable[[int], T], passes: Callable[[T], bool]) -> T:
    """Return what was tried with so few kept that one fewer did not pass.

    Bisection: where more kept is not always better there may be another such number. Keeping all
    of them must pass.

    Args:
        most: how many there are.
        tried: the result of keeping so many.
        passes: whether a result will do.
    """
    low, high, best = -1, most, tried(most)
    while high - low > 1:
        middle = 0 if low < 0 else (low + high) // 2
        found = tried(middle)
        if passes(found):
            high, best = middle, found
        else:
            low = middle
    return best
