"""The flags that a step is compiled with: one table a platform, each flag with its reason."""

import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxfound.config.parallel import AXES
from jaxfound.parallelism.mesh import PASSES_FLAG, PROMOTION
from jaxfound.parallelism.plan import ParallelPlan
from pallas_kernels import hardware

# XLA's GPU scheduler aims below this share of the memory; of what arguments leave of that, below
# this many per cent, which is the default of the flag.
XLA_SHARE = 0.8
SLOP_FLAG = "xla_gpu_memory_limit_slop_factor"
SLOP_DEFAULT = 95
SCHEDULER_FLAG = "xla_gpu_enable_latency_hiding_scheduler"
PRODUCTS_FLAG = "xla_gpu_enable_triton_gemm"


class Flag(NamedTuple):
    """A flag of the compiler.

    Attributes:
        name: as XLA has it.
        value: for a plan on a device; None leaves the compiler's default.
        reason: why it is not left there.
    """

    name: str
    value: Callable[[ParallelPlan, hardware.Hardware], str | int | bool | None]
    reason: str


def scheduler_for(plan: ParallelPlan, row: hardware.Hardware) -> bool | None:
    """Return True where stages send tokens to experts; None keeps XLA's own choice."""
    del row
    return True if plan.schedule is not None and plan.degrees[AXES.index("expert")] > 1 else None


def slop_for(plan: ParallelPlan, row: hardware.Hardware) -> int | None:
    """Return the factor that lets XLA plan with 95 % of the memory; None keeps XLA's own.

    Asked for where stages pair passes, whose ticks hold two passes and have exchanges to cover.
    Arguments are taken from the plan, which knows them to the byte. Where they alone are above what
    XLA plans with, no factor makes room.
    """
    if plan.schedule is None or not plan.ledger.capacity_bytes:
        return None
    room = int(XLA_SHARE * row.memory_bytes) - plan.ledger.argument_bytes
    wanted = plan.ledger.capacity_bytes * SLOP_DEFAULT // 100 - plan.ledger.argument_bytes
    if room <= 0 or 100 * wanted // room <= SLOP_DEFAULT:
        return None
    return 100 * wanted // room


def triton_products_for(plan: ParallelPlan, row: hardware.Hardware) -> bool | None:
    """Return False on one device; None keeps XLA's own choice.

    Products of several devices leave float32 sums (`pallas_kernels/linear.py`), which only a
    kernel of XLA's own rounds before it writes them.
    """
    del row
    return False if plan.num_devices == 1 else None


def promotion_for(plan: ParallelPlan, row: hardware.Hardware) -> str | None:
    """Return the pass that several devices of a CPU leave out."""
    del row
    return PROMOTION if plan.num_devices > 1 else None


FLAGS: Mapping[hardware.Platform, tuple[Flag, ...]] = {
    "cuda": (
        Flag(
            PRODUCTS_FLAG,
            triton_products_for,
            "cuBLAS multiplies large matrices faster, and what stands beside its products is fused "
            "with its neighbours: SwiGLU's two gradients are one kernel",
        ),
        Flag(
            SCHEDULER_FLAG,
            scheduler_for,
            "off by default in a program with a collective that XLA has no estimate for, such as a "
            "ragged all_to_all; without it half of the exchanges of a tick block",
        ),
        Flag(
            SLOP_FLAG,
            slop_for,
            "XLA plans with 80 % of a GPU's memory; above that it computes products again and "
            "takes collectives out of the background",
        ),
    ),
    "rocm": (),
    "tpu": (),
    "cpu": (
        Flag(
            PASSES_FLAG,
            promotion_for,
            "the compiler aborts the process where shards add up bfloat16; evaluation and the "
            "server's programs have it too (`parallelism.mesh.program_options`)",
        ),
    ),
}


def options_for(plan: ParallelPlan, device_kind: str) -> dict[str, str | int | bool]:
    """Return the compiler's options of a plan's step on devices of a kind, by flag.

    What XLA_FLAGS says of a flag stands: an option would come before it.
    """
    said = set(re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", "")))
    row = hardware.find(device_kind)
    flags = [flag for flag in FLAGS.get(row.platform, ()) if flag.name not in said]
    values = ((flag.name, flag.value(plan, row)) for flag in flags)
    return {name: value for name, value in values if value is not None}
