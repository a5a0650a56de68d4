"""How a model is executed here: formats, sharding rules, scan and remat; never stored with it."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import jax.numpy as jnp

from jaxfound.config.params import ParamTable
from jaxfound.config.precision import Format, PrecisionConfig
from jaxfound.config.schema import ConfigError
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.parallelism.plan import ParallelPlan

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FLOAT32 = PrecisionConfig(compute="float32")
KERNEL = ".kernel"
# Kernels that always compute in their own format, whatever the rules say.
OWN_FORMAT = frozenset({"head", "router"})


@dataclass(frozen=True)
class Execution:
    """What a module needs to know of the machine; hashable, so it is static under jit.

    Attributes:
        precision: formats by operation.
        rules: which dims the mesh axes split.
        layers_per_scan_step: layers unrolled in one scan step; 0 = all, no scan.
        remat: name of a recomputation policy (parallelism/remat.py).
        pipelining: the pipeline over the main stack of layers; None for none.
    """

    precision: PrecisionConfig = FLOAT32
    rules: ShardingRules = TABLE_RULES
    layers_per_scan_step: int = 1
    remat: str = "none"
    pipelining: Pipelining | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Format of activations between operations."""
        return jnp.dtype(DTYPES[self.precision.compute])

    @property
    def whole(self) -> "Execution":
        """The same without stages: a model whose layers are all there, once and in order."""
        return replace(self, pipelining=None)

    def format_of(self, path: str) -> Format:
        """Return the format of the operation at `path`: the first rule that matches it."""
        for rule in self.precision.rules:
            if fnmatchcase(path, rule.pattern):
                return rule.format
        return self.precision.compute


ONE_DEVICE = Execution()


def check_precision(precision: PrecisionConfig, table: ParamTable) -> None:
    """Refuse a precision rule that no linear operation of the model matches.

    Raises:
        ConfigError: names the pattern and what there is to match.
    """
    paths = [s.path.removesuffix(KERNEL) for s in table if s.path.endswith(KERNEL)]
    linear = [p for p in paths if p.rpartition(".")[2] not in OWN_FORMAT]
    for rule in precision.rules:
        if not any(fnmatchcase(path, rule.pattern) for path in linear):
            raise ConfigError(
                f"precision.rules: pattern {rule.pattern!r} matches no linear operation of this "
                f"model, so {rule.format} would be used nowhere. There are: {', '.join(linear)}"
            )


def execution_of(plan: ParallelPlan, precision: PrecisionConfig) -> Execution:
    """Return the execution that a plan and a precision policy ask for."""
    return Execution(
        precision=precision,
        rules=plan.rules,
        layers_per_scan_step=plan.layers_per_scan_step,
        remat=plan.remat,
        pipelining=None if plan.schedule is None else Pipelining.of(plan.schedule),
    )
