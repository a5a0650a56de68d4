"""The one place that makes a device mesh."""

from collections.abc import Sequence

import jax
import numpy as np
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
