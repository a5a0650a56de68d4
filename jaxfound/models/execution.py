"""How a model is executed here: formats, sharding rules, scan and remat; never stored with it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax.numpy as jnp

from jaxfound.config.precision import Format, PrecisionConfig
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules
from jaxfound.parallelism.plan import ParallelPlan

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FLOAT32 = PrecisionConfig(compute="float32")


@dataclass(frozen=True)
class Execution:
    """What a module needs to know of the machine; hashable, so it is static under jit.

    Attributes:
        precision: formats by operation.
        rules: which dims the mesh axes split.
        layers_per_scan_step: layers unrolled in one scan step; 0 = all, no scan.
        remat: name of a recomputation policy (parallelism/remat.py).
    """

    precision: PrecisionConfig = FLOAT32
    rules: ShardingRules = TABLE_RULES
    layers_per_scan_step: int = 1
    remat: str = "none"

    @property
    def dtype(self) -> jnp.dtype:
        """Format of activations between operations."""
        return jnp.dtype(DTYPES[self.precision.compute])

    def format_of(self, path: str) -> Format:
        """Return the format of the operation at `path`: the first rule that matches it."""
        for rule in self.precision.rules:
            if fnmatchcase(path, rule.pattern):
                return rule.format
        return self.precision.compute


ONE_DEVICE = Execution()


def execution_of(plan: ParallelPlan, precision: PrecisionConfig) -> Execution:
    """Return the execution that a plan and a precision policy ask for."""
    return Execution(
        precision=precision,
        rules=plan.rules,
        layers_per_scan_step=plan.layers_per_scan_step,
        remat=plan.remat,
    )
