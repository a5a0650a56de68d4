"""What each axis sends in a step: which collective, of what, how many bytes in how many calls."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxfound.communication.cost import CollectiveName
from jaxfound.config.parallel import AxisName
from jaxfound.config.params import STACK_DIMS, ParamSpec
from jaxfound.parallelism.layout import (
    FLOAT32_BYTES,
    Layout,
    in_layer,
    is_shared,
    runs_first,
    stack_size,
)


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


def summed_over(spec: ParamSpec, layout: Layout, axis: AxisName) -> bool:
    """Return whether the devices along a batch axis have a parameter's gradient to sum."""
    cut = {a for axes in layout.rules.used_axes(spec.dims) for a in axes}
    return axis not in cut


def gradients_over(axis: AxisName) -> Callable[[Layout], Amount]:
    """Return how much gradient the devices along an axis sum: each holds a copy to add.

    Over `fsdp` it is whole; what goes on over the others is fsdp's part of it, as in a hierarchical
    reduction. Every micro-batch sends, because the sum over them is cut like the result; stages of
    a pipeline add up on each device first and send each array once.
    """

    def amount(layout: Layout) -> Amount:
        pieces = 1 if axis == "fsdp" else layout.degree("fsdp")
        elements = sum(
            layout.used_elements(s) * scatters(s, layout, axis)
            for s in layout.trained()
            if summed_over(s, layout, axis)
        )
        if layout.pipeline is not None:
            return Amount(elements // pieces * FLOAT32_BYTES, sum(1 for _ in layout.trained()))
        sums = layout.num_microbatches
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


def summed_to_parts(layout: Layout) -> Amount:
    """Return the gradients of which each device along fsdp needs the sum of its part only.

    Stages, which hold whole sums until the step's end, hand out parts at every stage that cuts
    the optimizer's arrays.
    """
    first = 2 if layout.pipeline is None else 1
    return gradients_over("fsdp")(layout) if layout.rules.zero_stage >= first else NOTHING


def summed_whole(layout: Layout) -> Amount:
    """Return the gradients of which each device along fsdp needs the whole sum."""
    return NOTHING if summed_to_parts(layout).calls else gradients_over("fsdp")(layout)


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
    """Return the activations that tensor-parallel products sum whole, and their gradients.

    Where the residual stream is cut, those that belong to it are `scattered_sums`; of the embedding
    the sum is made whole and cut afterwards.
    """
    return _sums(layout, scattered=False)


def scattered_sums(layout: Layout) -> Amount:
    """Return the sums of which each device needs its part of the sequence."""
    return _sums(layout, scattered=True)


def _sums(layout: Layout, *, scattered: bool) -> Amount:
    """Return the sums of activations and their gradients, whole ones or those that are cut.

    Forward the rows of a product whose inputs are cut, backward the gradient of the inputs of each
    product whose outputs are cut: products are rounded one by one, so theirs are not added before
    they are sent. Sums are float32. Recomputation repeats what feeds the rest of its layer, the
    mixer's product; a stage that is run again, all of them. Of stages it is the device that runs
    most: its layers, and one end or the other.
    """
    sums = {"main": NOTHING, "first": NOTHING, "last": NOTHING}
    for spec in layout.trained():
        is_summed = spec.is_matrix and "tensor" in _axes_of(spec, layout)
        if is_summed and _gives_stream(spec, layout) == scattered:
            part = "main" if not is_shared(spec) else "first" if runs_first(spec) else "last"
            times = _times_summed(spec, layout)
            channels = sums[part].num_bytes + times * _whole_channels(spec, layout)
            sums[part] = Amount(channels, sums[part].calls + times)
    if layout.pipeline is not None:
        del sums[min(("first", "last"), key=lambda end: sums[end])]
    channels = sum(part.num_bytes for part in sums.values())
    calls = sum(part.calls for part in sums.values())
    num_bytes = channels * layout.tokens * FLOAT32_BYTES * layout.num_microbatches
    return Amount(num_bytes, calls * layout.num_microbatches)


def _gives_stream(spec: ParamSpec, layout: Layout) -> bool:
    """Return whether the sums of a matrix's products are cut along the sequence."""
    if not layout.rules.cuts_stream or spec.path.startswith("embedding."):
        return False
    return "embed" in spec.dims


def tokens_of_stream(layout: Layout) -> Amount:
    """Return the tokens that blocks and the head gather, and the gradients of what blocks add.

    Twice a layer: for the mixer and for the feed-forward. They are not kept, so the backward pass
    gathers them again, and each sum's gradient besides; a stage that is run again, once more. The
    head's tokens too are gathered in both directions, and the gradient of each embedding.
    """
    if not layout.rules.cuts_stream:
        return NOTHING
    staged = layout.pipeline is not None
    ends = (2 if staged else 3) * (1 + layout.cfg.model.mtp_depth)
    calls = (2 * (3 + staged) * layout.num_layers + ends) * layout.num_microbatches
    row_bytes = layout.tokens * layout.cfg.model.embed_dim * layout.compute_bytes
    return Amount(calls * row_bytes, calls)


def stream_gradients(layout: Layout) -> Amount:
    """Return the gradients of what is applied to each device's part of the sequence."""
    if not layout.rules.cuts_stream:
        return NOTHING
    held = [layout.used_elements(s) for s in layout.trained() if applied_to_stream(s)]
    sums = layout.num_microbatches
    return Amount(sum(held) * FLOAT32_BYTES * sums, len(held) * sums)


def applied_to_stream(spec: ParamSpec) -> bool:
    """Return whether a parameter is applied between blocks: norms, and the join of a prediction."""
    inside = ".mixer." in spec.path or ".ffn." in spec.path
    return spec.path.endswith((".scale", ".join.kernel")) and not inside


def _times_summed(spec: ParamSpec, layout: Layout) -> int:
    """Return how often a device sums the outputs or the gradients of a matrix's products."""
    staged = layout.pipeline
    uses = stack_size(spec) if in_layer(spec) else 1 + layout.cfg.model.mtp_depth
    if staged is not None and not is_shared(spec):
        uses = staged.layers_run
    again = layout.recomputes and spec.path.endswith(".mixer.out.kernel")
    passes = 1 + again + (staged is not None)
    return uses * (passes if _inputs_are_cut(spec, layout) else 1)


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
    model, staged = layout.cfg.model, layout.pipeline
    layers = model.num_moe_layers if staged is None else staged.layers_run
    layers += model.mtp_depth if model.ffn == "moe" else 0
    calls = (layout.forward_passes + 1) * layers * layout.num_microbatches
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
    calls = layout.forward_passes * layout.num_layers * layout.num_microbatches
    tokens = layout.tokens * layout.degree("context")
    return Amount(width * tokens * layout.compute_bytes * calls, calls)


def key_value_gradients(layout: Layout) -> Amount:
    """Return the gradients of gathered keys and values, once for each layer."""
    gathered = keys_and_values(layout)
    passes = layout.forward_passes
    return Amount(gathered.num_bytes // passes, gathered.calls // passes)


def handed_on(layout: Layout) -> Amount:
    """Return what a rank hands to others at the end of every tick, in one go.

    The output of a stage to the rank of the next, the gradient of an input to that of the one
    before: rows of zeros when there is neither. A schedule of two directions has both of each.
    """
    staged = layout.pipeline
    if staged is None:
        return NOTHING
    row_bytes = layout.stream_tokens * layout.cfg.model.embed_dim * layout.compute_bytes
    return Amount(staged.num_ticks * staged.num_sends * row_bytes, staged.num_ticks)


def shared_gradients(layout: Layout) -> Amount:
    """Return the gradients of what every rank holds whole, summed once a step: fsdp's part."""
    place = layout.rules.slot_axes
    shared = [layout.elements(s, place) for s in layout.trained() if is_shared(s)]
    return Amount(sum(shared) * FLOAT32_BYTES, len(shared))


def copies_gradients(layout: Layout) -> Amount:
    """Return the gradients of stages that are there twice, exchanged by their ranks once a step."""
    if layout.pipeline is None or layout.pipeline.schedule.num_copies == 1:
        return NOTHING
    held = [layout.used_elements(s) for s in layout.trained() if not is_shared(s)]
    return Amount(sum(held) * FLOAT32_BYTES, len(held))


TRAFFIC: Mapping[AxisName, tuple[Traffic, ...]] = {
    "pipeline": (
        Traffic("pipeline", "permute", "activations and their gradients, every tick", handed_on),
        Traffic("pipeline", "all_reduce", "gradients of what no stage cuts", shared_gradients),
        Traffic("pipeline", "permute", "gradients, between copies of stages", copies_gradients),
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
            summed_to_parts,
        ),
        Traffic(
            "fsdp",
            "all_reduce",
            "gradients",
            summed_whole,
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
    "tensor": (
        Traffic("tensor", "all_reduce", "activations, partial sums", partial_sums),
        Traffic("tensor", "reduce_scatter", "activations, partial sums", scattered_sums),
        Traffic("tensor", "all_gather", "activations of the whole sequence", tokens_of_stream),
        Traffic("tensor", "all_reduce", "gradients of norms and joins", stream_gradients),
    ),
}


def amounts_of(layout: Layout) -> tuple[tuple[Traffic, Amount], ...]:
    """Return what a layout sends in a step, axis by axis in mesh order, wherever it lies."""
    rows = (r for axis, rows in TRAFFIC.items() if layout.degree(axis) > 1 for r in rows)
    found = ((row, row.amount(layout)) for row in rows)
    return tuple((row, amount) for row, amount in found if amount.calls)


def _axes_of(spec: ParamSpec, layout: Layout) -> tuple[AxisName, ...]:
    return tuple(a for axes in layout.rules.used_axes(spec.dims) for a in axes)


def _fsdp_cuts(spec: ParamSpec, layout: Layout) -> bool:
    return any("fsdp" in axes for axes in layout.rules.param_axes(spec.dims, spec.shape))


def _inputs_are_cut(spec: ParamSpec, layout: Layout) -> bool:
    """Return whether tensor cuts the first dim of a matrix, its stacks apart."""
    axes = layout.rules.used_axes(spec.dims)
    first = next(i for i, d in enumerate(spec.dims) if d not in STACK_DIMS)
    return "tensor" in axes[first]


def _whole_channels(spec: ParamSpec, layout: Layout) -> int:
    """Return the channels on the side of a matrix that tensor does not cut."""
    sizes = [n for d, n in zip(spec.dims, spec.shape, strict=True) if d not in STACK_DIMS]
    return sizes[-1] if _inputs_are_cut(spec, layout) else sizes[0]
