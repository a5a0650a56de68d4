"""Weights and gradients that a device holds for a while, besides its state.

Copies in the format of compute, copies for the gather, and gradients before they are cut or added.
"""

from typing import NamedTuple

from jaxfound.config.layer_formats import (
    linear_operations,
    operations_in_fp8,
    segments_alike,
    stacks_of,
)
from jaxfound.config.params import LAYER_DIMS, ParamSpec
from jaxfound.parallelism.activations import is_free
from jaxfound.parallelism.layout import FLOAT32_BYTES, Layout, in_layer, is_shared, runs_first
from jaxfound.parallelism.pipeline.facts import Pipeline


class Ends(NamedTuple):
    """The embedding and the head of one device, elements.

    Attributes:
        widest: of the wider of the two, as it lies while it is used.
        head: of the matrix that makes logits, likewise.
        own_head: of its gradient, as it lies while it is summed.
    """

    widest: int
    head: int
    own_head: int


class StageElements(NamedTuple):
    """What a rank of a pipeline holds, elements.

    Attributes:
        chunk: of one chunk of its layers.
        made_at_once: of a chunk, those whose gradients are made before they are added up.
        first: of what the first stage has besides its layers.
        last: of what the last has.
    """

    chunk: int
    made_at_once: int
    first: int
    last: int


def widest_matrix(layout: Layout) -> int:
    """Return the elements of the widest weight of a layer while it is used, all experts together.

    XLA gathers a weight before its product and cuts its gradient behind it, one after the other.
    """
    found = (
        layout.used_elements(spec) // layout.layers_here(spec)
        for spec in layout.trained()
        if in_layer(spec)
    )
    return max(found, default=0)


def waiting_bytes(layout: Layout) -> int:
    """Return the bytes of experts' weights that lie whole through a layer's backward pass.

    Where fsdp cuts them they are gathered by name, all of them before the first product. Their
    gradients wait in the format of compute: XLA scatters those of a layer while it goes through the
    next.
    """
    if layout.degree("fsdp") == 1 or layout.rules.zero_stage < 3:
        return 0
    experts = sum(
        layout.used_elements(spec) // layout.layers_here(spec)
        for spec in layout.trained()
        if spec.path.startswith("layers.") and "experts" in spec.dims and spec.is_matrix
    )
    return 2 * layout.compute_bytes * experts


def ends_of(layout: Layout) -> Ends:
    """Return the elements of the embedding and the head on one device."""
    ends = {s.path: s for s in layout.trained() if s.path.startswith(("embedding.", "head."))}
    makes_logits = [s for path, s in ends.items() if path.startswith("head.")] or [*ends.values()]
    return Ends(
        max((layout.used_elements(s) for s in ends.values()), default=0),
        sum(layout.used_elements(s) for s in makes_logits),
        sum(layout.elements(s, layout.rules.grad_axes) for s in makes_logits),
    )


def copied_bytes(layout: Layout) -> int:
    """Return the bytes of the copies from which parameters that fsdp cuts are gathered.

    A gather joins pieces along the first dim in memory. Of a parameter that is cut along another
    one XLA makes a copy in that order, all layers at once and before any loop, in float32.
    """
    return FLOAT32_BYTES * sum(
        layout.elements(spec, layout.rules.param_axes)
        for spec in layout.trained()
        if _is_turned(layout, spec)
    )


def segment_bytes(layout: Layout) -> int:
    """Return the bytes of the parameters that are copied out of a stack to loop over a part of it.

    Where rules name layers, each segment of layers with the same formats is a loop over a slice of
    the stack, in float32. XLA makes the slices of one segment at a time; in a loop over
    micro-batches it keeps those of all.
    """
    copied = 0
    for stack in stacks_of(layout.params):
        segments = segments_alike(layout.cfg.precision, stack.operations, stack.layers)
        if len(segments) == 1:
            continue
        held = sum(
            layout.elements(spec, layout.rules.param_axes)
            for spec in layout.trained()
            if spec.path.startswith(f"{stack.name}.")
        )
        longest = max(len(segment) for segment in segments)
        at_once = len(stack.layers) if layout.num_microbatches > 1 else longest
        copied += FLOAT32_BYTES * held * at_once // len(stack.layers)
    return copied


def quantized_bytes(layout: Layout) -> int:
    """Return the bytes of the weights that are quantised before a step's micro-batches.

    One an element; scales, one for each 128x128, are not counted. The transpose that is made beside
    serves the forward pass and is gone at the peak behind it, but where more micro-batches follow.
    Stages quantise theirs in every tick, what fsdp cuts is quantised behind each gather, and
    experts that tensor cuts in each use.
    """
    if layout.pipeline is not None or layout.rules.cuts_parameters:
        return 0
    in_fp8 = operations_in_fp8(layout.cfg.precision, layout.params)
    copies = 2 if layout.num_microbatches > 1 else 1
    return copies * sum(
        layout.used_elements(spec)
        for spec in layout.trained()
        if spec.path.rpartition(".")[0] in in_fp8
        and (layout.degree("tensor") == 1 or "experts" not in spec.dims)
    )


def regathered_bytes(layout: Layout) -> int:
    """Return the bytes of updated parameters that lie beside the old ones for a moment.

    Where fsdp cuts moments and not parameters, each device updates its part and gathers the rest.
    Parts along the first dim in memory are gathered in place, the others into arrays of their own.
    """
    rules = layout.rules
    if layout.degree("fsdp") == 1 or rules.zero_stage not in (1, 2):
        return 0
    return FLOAT32_BYTES * sum(
        layout.elements(spec, rules.param_axes)
        for spec in layout.trained()
        if any("fsdp" in a for a in rules.slot_axes(spec.dims, layout.stored_shape(spec))[1:])
    )


def _is_turned(layout: Layout, spec: ParamSpec) -> bool:
    axes = layout.rules.param_axes(spec.dims, layout.stored_shape(spec))
    of_layer = [a for a, dim in zip(axes, spec.dims, strict=True) if dim not in LAYER_DIMS]
    cut = [i for i, a in enumerate(of_layer) if "fsdp" in a]
    return layout.degree("fsdp") > 1 and any(i > 0 for i in cut)


def stage_elements(layout: Layout) -> StageElements | None:
    """Return the elements of a rank's stages; None without stages.

    The last has the embedding too where it is the head, or where it predicts further ahead.
    """
    if layout.pipeline is None:
        return None
    model, num_chunks = layout.cfg.model, layout.pipeline.schedule.num_chunks
    held = first = last = 0
    for spec in layout.trained():
        used = layout.used_elements(spec)
        if not is_shared(spec):
            held += used
            continue
        again = spec.path.startswith("embedding.") and (model.tie_embeddings or model.mtp_depth)
        first += used if runs_first(spec) else 0
        last += used if again or not runs_first(spec) else 0
    chunk = held // num_chunks
    made = chunk // layout.pipeline.stages.layers_a_chunk * layers_at_once(layout, layout.pipeline)
    return StageElements(chunk, made, first, last)


def layers_at_once(layout: Layout, staged: Pipeline) -> int:
    """Return the layers of a chunk whose gradients are made before they are added up.

    B adds those of each step of its walk as it passes, W makes a whole chunk's.
    """
    chunk, step = staged.stages.layers_a_chunk, layout.cfg.parallel.layers_per_scan_step
    whole = staged.schedule.splits_backward or step == "all"
    return chunk if whole else min(int(step), chunk)


class Left(NamedTuple):
    """Of a device that has all of each product and goes through its layers without a loop, bytes.

    Attributes:
        gradients: of one micro-batch; a product's in the format in which its weights were used
            (`pallas_kernels/linear.py`).
        rounded: the weights in the format of compute, all of them at once.
    """

    gradients: int
    rounded: int


def left_of(layout: Layout) -> Left | None:
    """Return what lies otherwise on such a device; None for others."""
    if layout.num_devices > 1 or not is_free(layout, in_a_row=layout.cfg.model.num_layers):
        return None
    linear, place = linear_operations(layout.params), layout.rules.grad_axes
    in_fp8 = operations_in_fp8(layout.cfg.precision, layout.params)
    float32 = {s.path: FLOAT32_BYTES * layout.elements(s, place) for s in layout.trained()}
    used = {path: float32[f"{path}.kernel"] for path in linear}
    narrow = layout.compute_bytes / FLOAT32_BYTES
    used |= {
        s.path: float32[s.path] for s in layout.trained() if "experts" in s.dims and s.is_matrix
    }
    rounded = sum(
        size
        for path, size in used.items()
        if not in_fp8.intersection((path, path.rpartition(".")[0]))
    )
    return Left(
        gradients=round(sum(float32.values()) - (1 - narrow) * sum(used.values())),
        rounded=round(narrow * rounded),
    )
