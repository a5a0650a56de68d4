"""Which number format each operation uses."""

import re
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from jaxfound.config.schema import Section, key

# "fp8" has both operands and gradients of a product in 8 bits, "fp8_weights" its weights alone.
Format = Literal["float32", "bfloat16", "fp8", "fp8_weights"]

# `layers.4-7.ffn.down`: a stack, layers by number, an operation of theirs.
NUMBERED = re.compile(
    r"(?P<stack>leading|layers)\.(?P<first>\d+)(?:-(?P<last>\d+))?\.(?P<operation>.+)"
)

# Decoding multiplies queries and values by these, as they are, where a prompt multiplies latents:
# for the two to agree their weights are not rounded.
ABSORBED = (".mixer.key_up", ".mixer.value_up")


class LayerPattern(NamedTuple):
    """A pattern that holds for some layers of a stack.

    Attributes:
        first: number of the first layer, counted over the whole model from 0.
        last: number of the last one, included.
        operation: shell pattern on the operation's path, without the numbers.
    """

    first: int
    last: int
    operation: str


class PrecisionRule(Section):
    """Operations whose path matches `pattern` compute in `format`.

    A path is a parameter path without `.kernel`; `jaxfound model PRESET --params` lists them. Layer
    numbers may follow the stack: `layers.4-7.ffn.*` is layers 4 to 7 of the model, counted from 0
    with the leading dense ones first, `layers.7.ffn.down` one operation of layer 7.
    Embedding, head, router and norms have formats of their own. Experts are one operation, e.g.
    `layers.ffn.experts`. `fp8_weights` is not for what decoding absorbs, MLA's key_up and value_up,
    which then are in the compute format.
    """

    pattern: str = key(
        ..., "shell pattern on an operation, e.g. layers.mixer.*, layers.0-3.ffn.*", min_length=1
    )
    format: Format = key(..., "format of the matmul's operands")

    @property
    def layers(self) -> LayerPattern | None:
        """The layers that the pattern names by number, None where it names none."""
        found = NUMBERED.fullmatch(self.pattern)
        if found is None:
            return None
        first = int(found["first"])
        last = first if found["last"] is None else int(found["last"])
        return LayerPattern(first, last, f"{found['stack']}.{found['operation']}")

    def matches(self, path: str, layer: int | None = None) -> bool:
        """Return whether the rule is of the operation at `path`.

        Args:
            path: without numbers of layers.
            layer: number of its layer in the model; None leaves out rules that name layers.
        """
        layers = self.layers
        if layers is None:
            return fnmatchcase(path, self.pattern)
        there = layer is not None and layers.first <= layer <= layers.last
        return there and fnmatchcase(path, layers.operation)


class PrecisionConfig(Section):
    """Formats by operation; master weights and optimizer state are always float32."""

    compute: Literal["float32", "bfloat16"] = key("bfloat16", "activations and matmul operands")
    rules: tuple[PrecisionRule, ...] = key((), "first match wins; no match = compute")

    @property
    def names_layers(self) -> bool:
        """Whether a rule holds for some layers of a stack and not for others."""
        return any(rule.layers is not None for rule in self.rules)

    def format_of(self, path: str, layer: int | None = None) -> Format:
        """Return the format of the operation at `path`: the first rule that matches it.

        Args:
            path: without numbers of layers.
            layer: number of its layer in the model; None leaves out rules that name layers.
        """
        for rule in self.rules:
            if rule.matches(path, layer):
                absorbed = rule.format == "fp8_weights" and path.endswith(ABSORBED)
                return self.compute if absorbed else rule.format
        return self.compute
