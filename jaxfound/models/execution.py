"""How a model is executed here: formats, sharding rules, scan and remat; never stored with it."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from jaxfound.config.precision import PrecisionConfig
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.parallelism.plan import ParallelPlan

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FLOAT32 = PrecisionConfig(compute="float32")
# How attention keeps the documents of a row apart: as runs that each call looks for on the device,
# as runs that the loader vouches for, or not at all.
Documents = Literal["runs", "checked", "joined"]


@dataclass(frozen=True)
class Execution:
    """What a module needs to know of the machine; hashable, so it is static under jit.

    Attributes:
        precision: formats by operation.
        rules: which dims the mesh axes split.
        layers_per_scan_step: layers unrolled in one scan step; 0 = all, no scan.
        remat: name of a recomputation policy (parallelism/remat.py).
        pipelining: the pipeline over the main stack of layers; None for none.
        documents: how attention keeps the documents of a row apart.
        most_documents: where that is checked, documents that attention has a place for in each row;
            None for the kernel's own number.
    """

    precision: PrecisionConfig = FLOAT32
    rules: ShardingRules = TABLE_RULES
    layers_per_scan_step: int = 1
    remat: str = "none"
    pipelining: Pipelining | None = None
    documents: Documents = "runs"
    most_documents: int | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Format of activations between operations."""
        return jnp.dtype(DTYPES[self.precision.compute])

    @property
    def whole(self) -> "Execution":
        """The same without stages: a model whose layers are all there, once and in order."""
        return replace(self, pipelining=None)


ONE_DEVICE = Execution()


def execution_of(
    plan: ParallelPlan,
    precision: PrecisionConfig,
    *,
    documents: Documents = "runs",
    most_documents: int | None = None,
) -> Execution:
    """Return the execution that a plan and a precision policy ask for."""
    return Execution(
        precision=precision,
        rules=plan.rules,
        layers_per_scan_step=plan.layers_per_scan_step,
        remat=plan.remat,
        pipelining=None if plan.schedule is None else Pipelining.of(plan.schedule),
        documents=documents,
        most_documents=most_documents,
    )
