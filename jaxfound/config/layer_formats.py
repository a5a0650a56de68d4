"""Which layers of a model compute alike, and the refusal of rules that cannot hold."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

from jaxfound.config.params import LAYER_DIMS, ParamTable
from jaxfound.config.precision import LayerPattern, PrecisionConfig, PrecisionRule
from jaxfound.config.schema import ConfigError

KERNEL = ".kernel"
# Of the matrices of experts this one stands for all.
EXPERTS, EXPERT = ".experts", ".experts.gate"
# Kernels that always compute in their own format, whatever the rules say.
OWN_FORMAT = frozenset({"head", "router"})
# Each segment of a stack is a loop of its own, which is compiled and whose weights are copied out
# of the stack.
MOST_SEGMENTS = 4


class StackOfLayers(NamedTuple):
    """The layers that lie in one set of arrays.

    Attributes:
        name: `leading` or `layers`, as paths begin.
        layers: numbers of its layers in the model.
        operations: paths of what rules are about: its linear operations and its experts.
    """

    name: str
    layers: range
    operations: tuple[str, ...]


def ruled_operations(table: ParamTable) -> list[str]:
    """Return the paths of the operations that precision rules are about."""
    return linear_operations(table) + expert_operations(table)


def linear_operations(table: ParamTable) -> list[str]:
    """Return the paths of those that are one matrix."""
    paths = [s.path.removesuffix(KERNEL) for s in table if s.path.endswith(KERNEL)]
    return [p for p in paths if p.rpartition(".")[2] not in OWN_FORMAT]


def expert_operations(table: ParamTable) -> list[str]:
    """Return the paths of the experts of each stack, all matrices of which are one operation."""
    return [s.path.removesuffix(EXPERT) + EXPERTS for s in table if s.path.endswith(EXPERT)]


def stacks_of(table: ParamTable) -> list[StackOfLayers]:
    """Return the stacks of a model in the order in which a token passes them."""
    counts = {s.path.split(".")[0]: s.shape[0] for s in table if s.dims[0] in LAYER_DIMS}
    ruled, first = ruled_operations(table), 0
    found: list[StackOfLayers] = []
    for name in sorted(counts, key=("leading", "layers").index):
        layers = range(first, first + counts[name])
        own = tuple(path for path in ruled if path.startswith(f"{name}."))
        found.append(StackOfLayers(name, layers, own))
        first = layers.stop
    return found


def segments_alike(
    precision: PrecisionConfig, operations: Iterable[str], layers: range
) -> list[range]:
    """Return the longest runs of layers whose operations all have the same formats.

    Args:
        precision: formats by operation.
        operations: paths of a stack's operations.
        layers: numbers of its layers in the model.
    """
    if not precision.names_layers:
        return [layers]
    paths = tuple(operations)
    runs = groupby(layers, lambda n: [precision.format_of(path, n) for path in paths])
    whole = [list(run) for _, run in runs]
    return [range(run[0], run[-1] + 1) for run in whole]


def operations_in_fp8(precision: PrecisionConfig, table: ParamTable) -> frozenset[str]:
    """Return the paths of the operations that are in fp8 in a layer at least."""
    stacks, found = stacks_of(table), set[str]()
    for stack in stacks:
        for path in stack.operations:
            if any(precision.format_of(path, n) == "fp8" for n in stack.layers):
                found.add(path)
    stacked = {path for stack in stacks for path in stack.operations}
    alone = [path for path in ruled_operations(table) if path not in stacked]
    return frozenset(found.union(p for p in alone if precision.format_of(p) == "fp8"))


def check_precision(precision: PrecisionConfig, table: ParamTable) -> None:
    """Refuse precision rules that the model has nothing for, or too many segments of layers.

    Raises:
        ConfigError: names the pattern and what there is to match, or the segments.
    """
    there, stacks = ruled_operations(table), stacks_of(table)
    for rule in precision.rules:
        check_layers(rule, stacks)
        pattern = rule.pattern if rule.layers is None else rule.layers.operation
        if not any(fnmatchcase(path, pattern) for path in there):
            raise ConfigError(
                f"precision.rules: pattern {rule.pattern!r} matches no operation of this "
                f"model, so {rule.format} would be used nowhere. There are: {', '.join(there)}"
            )
    for stack in stacks:
        segments = segments_alike(precision, stack.operations, stack.layers)
        if len(segments) > MOST_SEGMENTS:
            told = ", ".join(numbers_text(segment) for segment in segments)
            raise ConfigError(
                f"precision.rules: layers with the same formats are {len(segments)} segments of "
                f"`{stack.name}` ({told}), and each is a loop of its own: at most {MOST_SEGMENTS}. "
                "Let rules name neighbouring layers, e.g. layers.0-3.*"
            )


def check_layers(rule: PrecisionRule, stacks: Iterable[StackOfLayers]) -> None:
    """Refuse numbers of layers that are not in the stack that a pattern names.

    Raises:
        ConfigError: names the layers that the stack has.
    """
    named = rule.layers
    if named is None:
        return
    name = named.operation.split(".")[0]
    layers = next((stack.layers for stack in stacks if stack.name == name), range(0))
    if named.first > named.last:
        wrong = f"the last layer comes before the first: write {name}.{named.last}-{named.first}"
    elif not layers:
        wrong = f"this model has no stack `{name}`"
    elif named.first not in layers or named.last not in layers:
        wrong = (
            f"`{name}` of this model is layers {numbers_text(layers)}, counted from 0 with the "
            f"leading ones first; {_outside(named, layers)} not there"
        )
    else:
        return
    raise ConfigError(f"precision.rules: pattern {rule.pattern!r}: {wrong}")


def numbers_text(layers: range) -> str:
    """Return numbers of layers as patterns write them: `4-7`, or `4`."""
    last = layers.stop - 1
    return f"{layers.start}" if last == layers.start else f"{layers.start}-{last}"


def _outside(named: LayerPattern, layers: range) -> str:
    outside = [n for n in dict.fromkeys((named.first, named.last)) if n not in layers]
    return f"{' and '.join(map(str, outside))} {'are' if len(outside) > 1 else 'is'}"
