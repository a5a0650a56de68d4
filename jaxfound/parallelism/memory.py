"""The memory ledger: bytes of one device by kind, each with its formula.

State is exact, because the rules that place it are asked: parameters, gradients and the optimizer's
arrays are float32, and a compiled step's arguments are `Ledger.argument_bytes`. Activations and
buffers are estimates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxfound.config.params import ParamTable
from jaxfound.parallelism.activations import kept_bytes, stage_slot_bytes, working_bytes
from jaxfound.parallelism.layout import (
    FLOAT32_BYTES,
    Layout,
    Place,
    in_layer,
    is_shared,
    runs_first,
)
from jaxfound.parallelism.pipeline.facts import Pipeline

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "stage slots",
    "logits",
    "buffers",
    "margin",
]
# Of the memory, left free for fragments and for what the driver and the collectives allocate: the
# share that XLA's own scheduler leaves (its xla_gpu_memory_limit_slop_factor is 95).
MARGIN = 0.05
# tokens, targets, positions and segment ids are int32, the loss mask is one byte.
BATCH_BYTES_A_TOKEN = 17
# The step is int32, the random state two uint32.
COUNTER_BYTES = 12
# By how many times a gradient is there at the peak.
GRADIENTS = ("made after the peak", "float32", "of one micro-batch and the sum of all, float32")
# What stages add up in every tick is there all the time.
STAGED_GRADIENTS = "sum of all micro-batches, float32, whole over fsdp until the end of the step"
# Logits of a chunk in the backward pass: themselves and their gradient, float32.
LOGIT_COPIES = 2


class Slots(NamedTuple):
    """What an update rule keeps: float32 arrays the shape of a parameter, and counters.

    Attributes:
        by_path: how many of a parameter's arrays, by its path; a path that is missing has none.
        counter_bytes: the rest, which every device holds.
    """

    by_path: Mapping[str, int]
    counter_bytes: int


def adam_slots(params: ParamTable) -> Slots:
    """Return what AdamW keeps: two moments of every parameter and one count."""
    return Slots({s.path: 2 for s in params if s.kind == "param"}, 4)


def whole_state_bytes(params: ParamTable, slots: Slots) -> int:
    """Return the bytes of parameters, gradients and optimizer state, each held once by all."""
    moments = sum(slots.by_path.get(s.path, 0) * s.size for s in params if s.kind == "param")
    return FLOAT32_BYTES * (2 * params.size + moments)


class Entry(NamedTuple):
    """One line of the ledger.

    Attributes:
        kind: what the bytes are for.
        num_bytes: of one device.
        how: what is counted.
    """

    kind: Kind
    num_bytes: int
    how: str


@dataclass(frozen=True)
class Ledger:
    """Bytes of one device.

    Attributes:
        entries: one of each kind.
        capacity_bytes: memory of the device; 0 = not known.
    """

    entries: tuple[Entry, ...] = ()
    capacity_bytes: int = 0

    def of(self, kind: Kind) -> int:
        """Return the bytes of one kind, 0 when it is not in the ledger."""
        return sum(e.num_bytes for e in self.entries if e.kind == kind)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(e.num_bytes for e in self.entries)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments of a compiled step: state and batch."""
        return sum(self.of(kind) for kind in ("parameters", "optimizer", "inputs"))

    @property
    def spare_bytes(self) -> int:
        """Bytes that are left; negative when the plan does not fit."""
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None where the memory is not known."""
        return self.spare_bytes >= 0 if self.capacity_bytes else None


def ledger_of(layout: Layout, *, slots: Slots, capacity_bytes: int) -> Ledger:
    """Return the ledger of a layout at the point of the step that needs the most.

    That is the backward pass of a layer, or the loss where the vocabulary outweighs the layers;
    what the other holds is freed before or made after.

    Args:
        layout: what runs.
        slots: what the update rule keeps.
        capacity_bytes: memory of one device; 0 = not known, which leaves out the margin.
    """
    state = state_of(layout, slots=slots)
    return state.with_activations(layout, capacity_bytes=capacity_bytes)


class Peak(NamedTuple):
    """What a step holds at one point besides parameters, moments and batch: bytes of one device."""

    gradients: int
    activations: int
    logits: int
    buffers: int


@dataclass(frozen=True)
class State:
    """What does not depend on rows: bytes of one device.

    Attributes:
        parameters: float32.
        gradients: of one micro-batch, or of the sum of all; of stages, what they add up in.
        optimizer: what the update rule keeps.
        biases: routers' biases.
        layer_buffers: weights of the widest layer in use, and its gradients before they are cut;
            of stages, before they are added up, of as many layers as are made at once.
        end_buffers: the same of the embedding or the head, the larger; they wait through the
            layers. Of stages, of all that the last has besides its layers: added up at once.
        first_buffers: of stages, of all that the first has besides its layers.
        rule: name of the update rule.
    """

    parameters: int
    gradients: int
    optimizer: int
    biases: int
    layer_buffers: int
    end_buffers: int
    first_buffers: int
    rule: str

    def with_activations(self, layout: Layout, *, capacity_bytes: int) -> Ledger:
        """Return the ledger of a layout that has this state."""
        peak = max(self.peaks(layout), key=sum)
        held = f"{layout.rows} x {layout.row_tokens:,} tokens, remat={layout.remat}"
        gradients = GRADIENTS[peak.gradients // max(self.gradients, 1)]
        chunk = f"{layout.chunk_tokens:,} tokens of a row at a time"
        freed = "" if peak.logits else f"; {logit_bytes(layout):,} B, freed before the peak"
        entries = (
            Entry("parameters", self.parameters, "float32"),
            Entry("gradients", peak.gradients, STAGED_GRADIENTS if layout.pipeline else gradients),
            Entry("optimizer", self.optimizer, f"{self.rule}, float32"),
            Entry("inputs", self.biases + batch_bytes(layout), "batch, counters, routers' biases"),
            Entry("activations", peak.activations, held),
            *slot_entries(layout),
            Entry("logits", peak.logits, f"{chunk}{freed}"),
            Entry("buffers", peak.buffers, "weights in use, gradients before they are cut"),
            Entry("margin", int(MARGIN * capacity_bytes), f"{MARGIN:.0%} of the memory left free"),
        )
        return Ledger(entries, capacity_bytes)

    def peaks(self, layout: Layout) -> Iterator[Peak]:
        """Yield what a step holds where it may need the most: in a layer, and at its ends."""
        kept, working, logits = kept_bytes(layout), working_bytes(layout), logit_bytes(layout)
        own = self.gradients
        if layout.pipeline is None:
            summed = own if layout.num_microbatches > 1 else 0
            both = self.layer_buffers + self.end_buffers
            yield Peak(summed + own, sum(kept) + working, 0, both)
            yield Peak(summed, sum(kept), logits, self.end_buffers)
            return
        yield Peak(own, kept.main + working, 0, self.layer_buffers)
        yield Peak(own, kept.main + kept.ahead, logits, self.end_buffers)
        if kept.ahead:
            yield Peak(own, kept.main + kept.ahead + working, 0, self.end_buffers)
        yield Peak(own, kept.leading + (working if kept.leading else 0), 0, self.first_buffers)


def state_of(layout: Layout, *, slots: Slots) -> State:
    """Return the bytes of a layout that rows do not change, asked of its rules."""
    rules = layout.rules
    optimizer = slots.counter_bytes + sum(
        FLOAT32_BYTES * slots.by_path.get(s.path, 0) * layout.elements(s, rules.slot_axes)
        for s in layout.trained()
    )
    buffers = buffer_bytes(layout)
    return State(
        parameters=_float32_bytes(layout, rules.param_axes),
        gradients=gradient_bytes(layout),
        optimizer=optimizer,
        biases=sum(
            FLOAT32_BYTES * layout.elements(s, rules.param_axes)
            for s in layout.params
            if s.kind == "buffer"
        ),
        layer_buffers=buffers.layer,
        end_buffers=buffers.end,
        first_buffers=buffers.first,
        rule=layout.cfg.optimizer.name,
    )


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes of one set of gradients on a device.

    What stages add up in is whole over fsdp, whatever the ZeRO stage: a reduce_scatter in every
    tick would be one for each micro-batch. It is cut when the step's are summed.
    """
    if layout.pipeline is not None:
        return FLOAT32_BYTES * sum(layout.used_elements(s) for s in layout.trained())
    return _float32_bytes(layout, layout.rules.grad_axes)


def slot_entries(layout: Layout) -> Iterator[Entry]:
    """Yield the line of a pipeline's slots, where there is one."""
    staged = layout.pipeline
    if staged is None:
        return
    told = f"{staged.num_input_slots} + 1 inputs, {staged.num_grad_slots} + 1 gradients of stages"
    if staged.schedule.splits_backward:
        told += f", {staged.num_kept_slots} + 1 of what weights' gradients are made from"
    yield Entry("stage slots", stage_slot_bytes(layout), told)


def _float32_bytes(layout: Layout, place: Place) -> int:
    return sum(FLOAT32_BYTES * layout.elements(s, place) for s in layout.trained())


def batch_bytes(layout: Layout) -> int:
    """Return the bytes of a step's batch and counters on one device.

    Rows arrive whole; the step itself arranges them for the context axis.
    """
    rows = layout.rows * layout.num_microbatches
    return rows * layout.cfg.train.seq_len * BATCH_BYTES_A_TOKEN + COUNTER_BYTES


def logit_bytes(layout: Layout) -> int:
    """Return the bytes of the logits that exist at one time."""
    vocab = layout.channels("vocab", layout.cfg.model.padded_vocab_size)
    return layout.rows * layout.chunk_tokens * vocab * FLOAT32_BYTES * LOGIT_COPIES


class BufferBytes(NamedTuple):
    """Weights in the format of compute and gradients before they are cut or added up.

    Attributes:
        layer: of the widest layer, whole over fsdp; of stages, with the gradients of as many as
            `layers_at_once` says.
        end: of the embedding or the head, which are never in use at one time; of stages, with the
            gradients of all that the last stage has besides its layers.
        first: of stages, of what the first has besides its layers.
    """

    layer: int
    end: int
    first: int


def buffer_bytes(layout: Layout) -> BufferBytes:
    """Return the bytes of weights in use and of gradients that are not yet where they belong."""
    layer, end = widest(layout)
    if layout.pipeline is None:
        both = layout.compute_bytes + FLOAT32_BYTES
        return BufferBytes(both * layer, both * end, 0)
    held, first, last = stage_elements(layout)
    made = held // layout.pipeline.layers_held * layers_at_once(layout, layout.pipeline)
    in_use, grads = layout.compute_bytes, FLOAT32_BYTES
    return BufferBytes(
        in_use * layer + grads * made,
        in_use * end + grads * last,
        in_use * layer + grads * first,
    )


def layers_at_once(layout: Layout, staged: Pipeline) -> int:
    """Return the layers of a chunk whose gradients are made before they are added up.

    B adds those of each step of its walk as it passes, W makes a whole chunk's.
    """
    chunk, step = staged.stages.layers_a_chunk, layout.cfg.parallel.layers_per_scan_step
    whole = staged.schedule.splits_backward or step == "all"
    return chunk if whole else min(int(step), chunk)


def widest(layout: Layout) -> tuple[int, int]:
    """Return the elements of the widest layer in use, and of the embedding or the head."""
    a_layer: dict[str, int] = {}
    end = 0
    for spec in layout.trained():
        used = layout.used_elements(spec)
        if in_layer(spec):
            stack = spec.path.partition(".mixer")[0].partition(".ffn")[0]
            a_layer[stack] = a_layer.get(stack, 0) + used // layout.layers_here(spec)
        else:
            end = max(end, used)
    return max(a_layer.values(), default=0), end


def stage_elements(layout: Layout) -> tuple[int, int, int]:
    """Return the elements of a rank's layers, and what the first and the last stage have besides.

    The last has the embedding too where it is the head, or where it predicts further ahead.
    """
    model = layout.cfg.model
    held = first = last = 0
    for spec in layout.trained():
        used = layout.used_elements(spec)
        if not is_shared(spec):
            held += used
            continue
        again = spec.path.startswith("embedding.") and (model.tie_embeddings or model.mtp_depth)
        first += used if runs_first(spec) else 0
        last += used if again or not runs_first(spec) else 0
    return held, first, last
