"""What each axis sends in a step, on which link, and the seconds of it by the alpha-beta model."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxfound.communication.cost import COLLECTIVES, CollectiveName, Group
from jaxfound.config.parallel import AxisName
from jaxfound.config.params import ParamSpec
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism.layout import FLOAT32_BYTES, Layout, in_layer, stack_size
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.placement import Placement, group_of, orders, place
from jaxfound.resources.topology import Topology


class Amount(NamedTuple):
    """What one device contributes to the collectives of a step.

    Attributes:
        num_bytes: bytes of all calls together: for an all_gather of what it has afterwards, for the
            others of what it has before.
        calls: how often the collective runs in a step.
    """

    num_bytes: int
    calls: int


NOTHING = Amount(0, 0)


class Traffic(NamedTuple):
    """One kind of thing that one axis sends.

    Attributes:
        axis: who takes part.
        collective: how it is sent.
        what: what is sent.
        amount: how much of it in a step.
    """

    axis: AxisName
    collective: CollectiveName
    what: str
    amount: Callable[[Layout], Amount]


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


def summed_over(spec: ParamSpec, layout: Layout, axis: AxisName) -> bool:
    """Return whether the devices along a batch axis have a parameter's gradient to sum."""
    cut = {a for axes in layout.rules.used_axes(spec.dims) for a in axes}
    return axis not in cut


def gradients_over(axis: AxisName) -> Callable[[Layout], Amount]:
    """Return how much gradient the devices along an axis sum: each holds a copy to add.

    Over `fsdp` it is whole; what goes on over the others is fsdp's part of it, as in a hierarchical
    reduction. Every micro-batch sends, because the sum over them is cut like the result; stages of
    a pipeline add up on each device first.
    """

    def amount(layout: Layout) -> Amount:
        pieces = 1 if axis == "fsdp" else layout.degree("fsdp")
        elements = sum(
            layout.used_elements(s) * scatters(s, layout, axis)
            for s in layout.trained()
            if summed_over(s, layout, axis)
        )
        sums = 1 if layout.degree("pipeline") > 1 else layout.num_microbatches
        return Amount(elements // pieces * FLOAT32_BYTES * sums, layout.num_layers * sums)

    return amount


def scatters(spec: ParamSpec, layout: Layout, axis: AxisName) -> int:
    """Return how often a micro-batch sums a gradient over an axis: the head's, chunk by chunk.

    The loop over chunks of the loss keeps it cut over fsdp, where parameters are.
    """
    tied = layout.cfg.model.tie_embeddings and spec.path.startswith("embedding.")
    is_head = tied or spec.path.startswith("head.")
    if axis != "fsdp" or layout.rules.zero_stage != 3 or not is_head:
        return 1
    return -(-layout.row_tokens // layout.chunk_tokens)


def when(
    amount: Callable[[Layout], Amount], *, stages: tuple[int, ...]
) -> Callable[[Layout], Amount]:
    """Return `amount` at these ZeRO stages and nothing at the others."""
    return lambda layout: amount(layout) if layout.rules.zero_stage in stages else NOTHING


def weights_in_use(layout: Layout) -> Amount:
    """Return the weights that fsdp gathers: forward and backward, in the format of compute."""
    passes = 2 * layout.num_microbatches
    elements = sum(layout.used_elements(s) for s in layout.trained() if _fsdp_cuts(s, layout))
    return Amount(elements * layout.compute_bytes * passes, layout.num_layers * passes)


def updated_weights(layout: Layout) -> Amount:
    """Return the parameters that are gathered once a step, where each device updated a part."""
    elements = sum(layout.used_elements(s) for s in layout.trained())
    return Amount(elements * FLOAT32_BYTES, sum(1 for _ in layout.trained()))


def partial_sums(layout: Layout) -> Amount:
    """Return the activations that tensor-parallel products sum, and their gradients.

    Forward the rows of a product whose inputs are cut, backward the gradient of the inputs of each
    product whose outputs are cut: products are rounded one by one, so theirs are not added before
    they are sent. Sums are float32. Recomputation repeats what feeds the rest of its layer, the
    mixer's product.
    """
    channels = calls = 0
    for spec in layout.trained():
        if not spec.is_matrix or "tensor" not in _axes_of(spec, layout):
            continue
        ahead = 1 + layout.cfg.model.mtp_depth
        uses = stack_size(spec) if in_layer(spec) else ahead
        again = 1 + (layout.recomputes and spec.path.endswith(".mixer.out.kernel"))
        times = uses * (again if _inputs_are_cut(spec, layout) else 1)
        channels += times * _whole_channels(spec, layout)
        calls += times
    stages = layout.degree("pipeline")
    num_bytes = channels * layout.tokens * FLOAT32_BYTES * layout.num_microbatches // stages
    return Amount(num_bytes, calls * layout.num_microbatches // stages)


def dispatched_tokens(layout: Layout) -> Amount:
    """Return the tokens that go to the devices of their experts, once to each, and their gradients.

    By an even router: of N devices with E / N experts each, a choice of k touches
    N (1 - C(E - E/N, k) / C(E, k)) on average.
    """
    moe, degree = layout.cfg.model.moe, layout.degree("expert")
    elsewhere = math.comb(moe.num_experts - moe.num_experts // degree, moe.top_k)
    touched = degree * (1 - elsewhere / math.comb(moe.num_experts, moe.top_k))
    return _exchanged(layout, copies=touched)


def combined_outputs(layout: Layout) -> Amount:
    """Return the outputs of all choices that come home, and go out as gradients."""
    return _exchanged(layout, copies=layout.cfg.model.moe.top_k)


def _exchanged(layout: Layout, *, copies: int | float) -> Amount:
    model = layout.cfg.model
    layers = model.num_moe_layers + (model.mtp_depth if model.ffn == "moe" else 0)
    calls = (3 if layout.recomputes else 2) * layers * layout.num_microbatches
    sent = copies * layout.tokens * model.embed_dim * layout.compute_bytes
    return Amount(round(sent * calls), calls)


def keys_and_values(layout: Layout) -> Amount:
    """Return the keys and values of whole rows: grouped heads, or the latent and the shared key."""
    model = layout.cfg.model
    if model.mixer == "mla":
        width = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        kv_heads = layout.channels("kv_heads", model.gqa.num_kv_heads)
        width = 2 * kv_heads * model.gqa.head_dim
    calls = (2 if layout.recomputes else 1) * layout.num_layers * layout.num_microbatches
    tokens = layout.tokens * layout.degree("context")
    return Amount(width * tokens * layout.compute_bytes * calls, calls)


def key_value_gradients(layout: Layout) -> Amount:
    """Return the gradients of gathered keys and values, once for each layer."""
    gathered = keys_and_values(layout)
    passes = 2 if layout.recomputes else 1
    return Amount(gathered.num_bytes // passes, gathered.calls // passes)


def stage_inputs(layout: Layout) -> Amount:
    """Return the activations that go on to the next stage and the gradients that come back."""
    calls = 2 * layout.num_microbatches
    return Amount(layout.tokens * layout.cfg.model.embed_dim * layout.compute_bytes * calls, calls)


TRAFFIC: Mapping[AxisName, tuple[Traffic, ...]] = {
    "pipeline": (
        Traffic("pipeline", "permute", "activations, between stages each way", stage_inputs),
    ),
    "data": (Traffic("data", "all_reduce", "gradients", gradients_over("data")),),
    "fsdp": (
        Traffic(
            "fsdp",
            "all_gather",
            "weights, before each use",
            when(weights_in_use, stages=(3,)),
        ),
        Traffic(
            "fsdp",
            "reduce_scatter",
            "gradients",
            when(gradients_over("fsdp"), stages=(2, 3)),
        ),
        Traffic(
            "fsdp",
            "all_reduce",
            "gradients",
            when(gradients_over("fsdp"), stages=(0, 1)),
        ),
        Traffic(
            "fsdp",
            "all_gather",
            "updated parameters",
            when(updated_weights, stages=(1, 2)),
        ),
    ),
    "expert": (
        Traffic("expert", "all_to_all", "tokens, to their experts", dispatched_tokens),
        Traffic("expert", "all_to_all", "outputs of experts, home", combined_outputs),
        Traffic(
            "expert", "all_reduce", "gradients of what is not experts'", gradients_over("expert")
        ),
    ),
    "context": (
        Traffic("context", "all_gather", "keys and values of whole rows", keys_and_values),
        Traffic("context", "reduce_scatter", "their gradients", key_value_gradients),
        Traffic("context", "all_reduce", "gradients", gradients_over("context")),
    ),
    "tensor": (Traffic("tensor", "all_reduce", "activations, partial sums", partial_sums),),
}


def amounts_of(layout: Layout) -> tuple[tuple[Traffic, Amount], ...]:
    """Return what a layout sends in a step, axis by axis in mesh order, wherever it lies."""
    rows = (r for axis, rows in TRAFFIC.items() if layout.degree(axis) > 1 for r in rows)
    found = ((row, row.amount(layout)) for row in rows)
    return tuple((row, amount) for row, amount in found if amount.calls)


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


def _axes_of(spec: ParamSpec, layout: Layout) -> tuple[AxisName, ...]:
    return tuple(a for axes in layout.rules.used_axes(spec.dims) for a in axes)


def _fsdp_cuts(spec: ParamSpec, layout: Layout) -> bool:
    return any("fsdp" in axes for axes in layout.rules.param_axes(spec.dims, spec.shape))


def _inputs_are_cut(spec: ParamSpec, layout: Layout) -> bool:
    """Return whether tensor cuts the first dim of a matrix, its stacks apart."""
    axes = layout.rules.used_axes(spec.dims)
    first = next(i for i, d in enumerate(spec.dims) if d not in ("layers", "experts"))
    return "tensor" in axes[first]


def _whole_channels(spec: ParamSpec, layout: Layout) -> int:
    """Return the channels on the side of a matrix that tensor does not cut."""
    sizes = [
        n for d, n in zip(spec.dims, spec.shape, strict=True) if d not in ("layers", "experts")
    ]
    return sizes[-1] if _inputs_are_cut(spec, layout) else sizes[0]


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
