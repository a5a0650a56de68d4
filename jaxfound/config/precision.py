"""Which number format each operation uses."""

from typing import Literal

from jaxfound.config.schema import Section, key

Format = Literal["float32", "bfloat16", "fp8"]


class PrecisionRule(Section):
    """Linear operations whose path matches `pattern` compute in `format`.

    A path is a parameter path without `.kernel`; `jaxfound model PRESET --params` lists them.
    Embedding, head, router, experts and norms have formats of their own.
    """

    pattern: str = key(..., "shell pattern on an operation, e.g. layers.mixer.*", min_length=1)
    format: Format = key(..., "format of the matmul's operands")


class PrecisionConfig(Section):
    """Formats by operation; master weights and optimizer state are always float32."""

    compute: Literal["float32", "bfloat16"] = key("bfloat16", "activations and matmul operands")
    rules: tuple[PrecisionRule, ...] = key((), "first match wins; no match = compute")
