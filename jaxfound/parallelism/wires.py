"""On which link each axis sends, and the seconds of it by the alpha-beta model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxfound.communication.cost import COLLECTIVES, CollectiveName, Group
from jaxfound.config.parallel import AxisName
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.placement import Placement, group_of, orders, place
from jaxfound.parallelism.traffic import Amount, Traffic
from jaxfound.resources.topology import Topology


@dataclass(frozen=True)
class Wire:
    """One kind of traffic of a plan.

    Attributes:
        axis: who takes part.
        collective: how it is sent.
        what: what is sent.
        num_bytes: of one device in a step, as `Amount` counts them.
        calls: collectives in a step.
        crosses_hosts: whether it leaves a host.
        seconds: of a step, when nothing else uses the link; None when a link is not known.
    """

    axis: AxisName
    collective: CollectiveName
    what: str
    num_bytes: int
    calls: int
    crosses_hosts: bool
    seconds: float | None


def timed(
    amounts: Iterable[tuple[Traffic, Amount]], placement: Placement, topology: Topology
) -> tuple[Wire, ...]:
    """Return the traffic with the links that it takes in this placement, and its seconds."""
    return tuple(
        Wire(
            axis=row.axis,
            collective=row.collective,
            what=row.what,
            num_bytes=amount.num_bytes,
            calls=amount.calls,
            crosses_hosts=placement.crosses(row.axis),
            seconds=_seconds(row, amount, group_of(row.axis, placement, topology)),
        )
        for row, amount in amounts
    )


def _seconds(row: Traffic, amount: Amount, group: Group | None) -> float | None:
    if group is None:
        return None
    return amount.calls * COLLECTIVES[row.collective](amount.num_bytes / amount.calls, group)


def best_placement(
    degrees: Mapping[AxisName, int],
    topology: Topology,
    amounts: Iterable[tuple[Traffic, Amount]],
) -> Placement:
    """Return the placement whose traffic takes the fewest seconds; of equals, mesh order's.

    On one host, or where a link is not known, that is mesh order.
    """
    if topology.hosts == 1:
        return place(degrees, topology)
    sent = tuple(amounts)

    def cost(placement: Placement) -> tuple[bool, float, int]:
        seconds = [w.seconds for w in timed(sent, placement, topology)]
        total = sum(s for s in seconds if s is not None)
        crossing = sum(placement.crosses(a) for a in degrees if degrees[a] > 1)
        return placement.crosses("tensor"), total, crossing

    return min((place(degrees, topology, order=order) for order in orders(degrees)), key=cost)


def check_tensor(cfg: RunConfig, degree: int, wires: Iterable[Wire], *, topology: Topology) -> None:
    """Refuse tensor parallelism that leaves its host, unless `parallel.tensor_span` allows it.

    Raises:
        PlanError: with the seconds that it would take.
    """
    sums = [w for w in wires if w.axis == "tensor" and w.crosses_hosts]
    if not sums or cfg.parallel.tensor_span == "cluster":
        return
    inside = topology.devices_per_host
    across = f"{sum(w.num_bytes for w in sums) / 1e9:,.1f} GB a device and step"
    if all(w.seconds is not None for w in sums):
        across += f", {sum(w.seconds or 0.0 for w in sums):,.3g} s by the network"
    raise PlanError(
        f"parallel.tensor={degree} does not stay inside a host of {inside} devices: "
        f"it sums activations in the middle of every layer, {across}. Use a tensor that divides "
        f"{inside}: {divisors(inside)}, or parallel.tensor_span=cluster to have it all the same"
    )
