"""The one place that makes a device mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

from jaxfound.config.parallel import AXES
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.resources.topology import Device


def build_mesh(plan: ParallelPlan, *, devices: Sequence[Device] | None = None) -> Mesh:
    """Lay the plan's six axes over the devices, in the order of its placement.

    Args:
        plan: degrees of the axes and the order in which they walk the devices.
        devices: host by host, as the plan's topology has them; every device of the job by default.

    Raises:
        PlanError: if the degrees do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if plan.num_devices != len(devices):
        raise PlanError(
            f"the plan is for {plan.num_devices} devices ({plan.degrees_text()}), but there are "
            f"{len(devices)}. Make a plan for this topology, or pass the devices to use"
        )
    order = plan.placement.order
    walked = np.asarray(devices).reshape([plan.degree(a) for a in order])
    grid = walked.transpose([order.index(a) for a in AXES])
    # Auto: the partitioner places collectives; Explicit would ask every matmul for its output's.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


# XLA's compiler for CPUs aborts the process where shards add up bfloat16: a pass that would add in
# float32 cannot read an addition as JAX writes it there. Without the pass they are added as they
# are, which is what GPUs do.
PASSES_FLAG, PROMOTION = "xla_disable_hlo_passes", "all-reduce-promotion"


def program_options(mesh: Mesh | None) -> dict[str, str | int | bool]:
    """Return the compiler's options of every program on a mesh."""
    if mesh is None or mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return {}
    return {PASSES_FLAG: PROMOTION}


def jit_on_mesh[**P, R](
    fn: Callable[P, R],
    mesh: Mesh,
    *,
    compiler_options: Mapping[str, str | int | bool] | None = None,
    **options: Any,
) -> "OnMesh[P, R]":
    """Return `jax.jit` of a function, with its mesh set and the options of programs there.

    Args:
        fn: what is compiled.
        mesh: of its devices.
        compiler_options: further ones, by flag.
        options: of `jax.jit`.
    """
    merged = {**program_options(mesh), **(compiler_options or {})}
    jitted = jax.jit(fn, compiler_options=merged or None, **options)
    return OnMesh(cast(Callable[P, R], jitted), mesh)


class OnMesh[**P, R]:
    """A jitted function that is lowered and called with its mesh set.

    Inside a shard_map that leaves an axis automatic JAX asks the mesh that is set for its devices
    when it lowers a kernel. Without one, kernels are refused there or fail.

    Args:
        jitted: from `jax.jit`.
        mesh: of its devices.
    """

    def __init__(self, jitted: Callable[P, R], mesh: Mesh) -> None:
        self._jitted = jitted
        self.mesh = mesh

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function gives; within another program, whose mesh it is, as is."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._jitted(*args, **kwargs)
        with jax.set_mesh(self.mesh):
            return self._jitted(*args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Return its program before it is lowered; lower it inside `jax.set_mesh(mesh)`."""
        with jax.set_mesh(self.mesh):
            return cast(jax.stages.Wrapped, self._jitted).trace(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Return its program as it goes to the compiler."""
        with jax.set_mesh(self.mesh):
            return cast(jax.stages.Wrapped, self._jitted).lower(*args, **kwargs)
