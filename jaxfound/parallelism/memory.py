"""The memory ledger: bytes of one device by kind, each with its formula.

State is exact, because the rules that place it are asked: parameters, summed gradients and the
optimizer's arrays are float32, and a compiled step's arguments are `Ledger.argument_bytes`.
Activations, buffers and what a micro-batch's gradients are left in are estimates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxfound.config.params import ParamTable
from jaxfound.parallelism.activations import (
    kept_bytes,
    stage_slot_bytes,
    stream_bytes,
    widest_layer_bytes,
)
from jaxfound.parallelism.backward import Moment, moments_of
from jaxfound.parallelism.layout import FLOAT32_BYTES, Layout, Place, in_layer
from jaxfound.parallelism.weights import (
    Ends,
    Left,
    StageElements,
    copied_bytes,
    ends_of,
    left_of,
    quantized_bytes,
    regathered_bytes,
    segment_bytes,
    stage_elements,
)
from jaxfound.resources.topology import Topology

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "stage slots",
    "logits",
    "buffers",
    "workspace",
    "margin",
]
# Of the memory, left free for fragments and for what the driver and the collectives allocate: the
# share that XLA's own scheduler leaves (its xla_gpu_memory_limit_slop_factor is 95).
MARGIN = 0.05
# tokens, targets, positions and segment ids are int32, the loss mask is one byte. Rows that are one
# document count their own positions, and the step is not given any.
BATCH_BYTES_A_TOKEN = {"apart": 17, "joined": 13}
# The step is int32, the random state two uint32.
COUNTER_BYTES = 12
# What is there of gradients at the peak, without and with several micro-batches.
GRADIENTS = ("float32", "of one micro-batch and the sum of all, float32")
# The same where one device has all of each product.
LEFT_GRADIENTS = "of products in the format of compute"
# What stages add up in every tick is there all the time.
STAGED_GRADIENTS = "sum of all micro-batches, float32, whole over fsdp until the end of the step"
# Streams [tokens embed] at the loss: the last layer's result, the normalised one and its gradient.
LOSS_STREAMS = 3


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


def ledger_of(layout: Layout, *, slots: Slots, topology: Topology) -> Ledger:
    """Return the ledger of a layout at the point of the step that needs the most.

    That is the backward pass of a layer, the loss where the vocabulary outweighs the layers, or the
    update where parameters outweigh both; what the others hold is freed before or made after.

    Args:
        layout: what runs.
        slots: what the update rule keeps.
        topology: whose devices it runs on; where their memory is not known there is no margin.
    """
    return state_of(layout, slots=slots).with_activations(layout, topology=topology)


class Peak(NamedTuple):
    """What a step holds at one point besides parameters, moments and batch: bytes of one device.

    Attributes:
        workspace: what cuDNN asks for; the others are what XLA makes.
    """

    gradients: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    workspace: int = 0

    @property
    def of_xla(self) -> int:
        """Bytes of what XLA makes."""
        return sum(self) - self.workspace


@dataclass(frozen=True)
class State:
    """What does not depend on rows: bytes of one device.

    Attributes:
        parameters: float32.
        gradients: of one micro-batch, or of the sum of all; of stages, what they add up in.
        left: what lies otherwise where one device goes through layers without a loop; else None.
        end_gradients: of these, what is not the layers'; it is made last.
        optimizer: what the update rule keeps.
        biases: routers' biases.
        copies: of parameters: in the order in which they are gathered, of segments of layers, and
            in 8-bit.
        regathered: of updated parameters, beside the old ones.
        ends: embedding and head, elements.
        stages: elements of a chunk of a rank, and of what the first and the last stage have
            besides; None without stages.
        rule: name of the update rule.
    """

    parameters: int
    gradients: int
    left: Left | None
    end_gradients: int
    optimizer: int
    biases: int
    copies: int
    regathered: int
    ends: Ends
    stages: StageElements | None
    rule: str

    def with_activations(self, layout: Layout, *, topology: Topology) -> Ledger:
        """Return the ledger of a layout that has this state, on a device of the topology."""
        peaks = list(self.peaks(layout, architecture=topology.architecture))
        peak = max(peaks, key=lambda p: p.of_xla)
        capacity_bytes = topology.memory_bytes
        held = f"{layout.rows} x {layout.row_tokens:,} tokens, remat={layout.remat}"
        chunk = f"{layout.chunk_tokens:,} tokens of a row at a time"
        freed = "" if peak.logits else f"; {logit_bytes(layout):,} B, freed before the peak"
        entries = (
            Entry("parameters", self.parameters, "float32"),
            Entry("gradients", peak.gradients, gradient_text(layout)),
            Entry("optimizer", self.optimizer, f"{self.rule}, float32"),
            Entry("inputs", self.biases + batch_bytes(layout), "batch, counters, routers' biases"),
            Entry("activations", peak.activations, held),
            *slot_entries(layout),
            Entry("logits", peak.logits, f"{chunk}{freed}"),
            Entry("buffers", peak.buffers, "copies of weights, gradients before they are cut"),
            *workspace_entries(peaks, peak),
            Entry("margin", int(MARGIN * capacity_bytes), f"{MARGIN:.0%} of the memory left free"),
        )
        return Ledger(entries, capacity_bytes)

    def peaks(self, layout: Layout, *, architecture: str) -> Iterator[Peak]:
        """Yield what a step holds where it may need the most: a layer, the ends, the update."""
        moments = moments_of(layout, architecture=architecture, are_kept=self.left is not None)
        if self.stages is not None:
            yield from self.staged_peaks(layout, moments, self.stages)
            return
        kept, used, float32 = sum(kept_bytes(layout)), layout.compute_bytes, FLOAT32_BYTES
        ends = self.ends
        summed = self.gradients if layout.num_microbatches > 1 else 0
        if self.left is not None:
            yield from self.left_peaks(layout, moments, self.left, summed=summed)
            return
        there = summed + self.gradients
        # The head's gradient is summed in the format of its use; the embedding's, or the head
        # itself until the loss is known, lies whole beside it: first where their gradients will.
        waiting = used * (ends.widest + ends.own_head)
        beyond = self.copies + max(waiting - self.end_gradients, 0)
        for m in moments:
            yield Peak(there, kept + m.activations, 0, beyond + m.weights, m.workspace)
        head = waiting + (used + float32) * ends.head + float32 * ends.own_head
        beyond = self.copies + max(head - self.end_gradients, 0)
        streams = LOSS_STREAMS * stream_bytes(layout, False)
        yield Peak(there, kept + streams, logit_bytes(layout), beyond)
        yield Peak(self.gradients, buffers=self.regathered)

    def left_peaks(
        self, layout: Layout, moments: Sequence[Moment], left: Left, *, summed: int
    ) -> Iterator[Peak]:
        """Yield the same of one device whose layers are no loop.

        Weights are rounded once, before the first layer, and gradients are there when the layers
        behind them are done: none at the loss.
        """
        kept, used = sum(kept_bytes(layout)), layout.compute_bytes
        copies = self.copies + left.rounded
        streams = LOSS_STREAMS * stream_bytes(layout, False)
        head = copies + used * self.ends.head
        yield Peak(summed, kept + streams, logit_bytes(layout), head)
        for m in moments:
            there = summed + self.end_gradients
            yield Peak(there, kept + m.activations, 0, copies + m.weights, m.workspace)
        last = widest_layer_bytes(layout) + max(m.activations for m in moments)
        yield Peak(summed + left.gradients, last, 0, copies)
        yield Peak(summed or left.gradients, buffers=self.regathered)

    def staged_peaks(
        self, layout: Layout, moments: Sequence[Moment], stages: StageElements
    ) -> Iterator[Peak]:
        """Yield the same of a rank of a pipeline, whose gradients are added up in every tick."""
        kept, logits, own = kept_bytes(layout), logit_bytes(layout), self.gradients
        used, float32 = layout.compute_bytes, FLOAT32_BYTES
        chunk, last = float32 * stages.made_at_once, float32 * stages.last
        head = used * self.ends.widest + last
        yield Peak(own, kept.main + kept.ahead, logits, head)
        # The slots' room is free when parameters are updated.
        yield Peak(own, buffers=max(self.regathered - stage_slot_bytes(layout), 0))
        for m in moments:
            yield Peak(own, kept.main + m.activations, 0, chunk + m.weights, m.workspace)
            if kept.ahead:
                ahead = kept.main + kept.ahead + m.activations
                yield Peak(own, ahead, 0, head + m.weights, m.workspace)
            if kept.leading:
                first = chunk + float32 * stages.first
                yield Peak(own, kept.leading + m.activations, 0, first + m.weights, m.workspace)


def workspace_entries(peaks: Sequence[Peak], peak: Peak) -> Iterator[Entry]:
    """Yield the line of what cuDNN's workspace adds to the peak, where it asks for one."""
    asked = max((p.workspace for p in peaks), default=0)
    if asked:
        more = max(sum(p) for p in peaks) - peak.of_xla
        told = f"what cuDNN's {asked:,} B in attention's backward pass add to the peak"
        yield Entry("workspace", more, told)


def gradient_text(layout: Layout) -> str:
    """Return which gradients are there at the peak."""
    if layout.pipeline is not None:
        return STAGED_GRADIENTS
    several = layout.num_microbatches > 1
    return GRADIENTS[several] if several or left_of(layout) is None else LEFT_GRADIENTS


def state_of(layout: Layout, *, slots: Slots) -> State:
    """Return the bytes of a layout that rows do not change, asked of its rules."""
    rules = layout.rules
    optimizer = slots.counter_bytes + sum(
        FLOAT32_BYTES * slots.by_path.get(s.path, 0) * layout.elements(s, rules.slot_axes)
        for s in layout.trained()
    )
    ends = [s for s in layout.trained() if not in_layer(s)]
    return State(
        parameters=_float32_bytes(layout, rules.param_axes),
        gradients=gradient_bytes(layout),
        left=left_of(layout),
        end_gradients=FLOAT32_BYTES * sum(layout.elements(s, rules.grad_axes) for s in ends),
        optimizer=optimizer,
        biases=sum(
            FLOAT32_BYTES * layout.elements(s, rules.param_axes)
            for s in layout.params
            if s.kind == "buffer"
        ),
        copies=copied_bytes(layout) + segment_bytes(layout) + quantized_bytes(layout),
        regathered=regathered_bytes(layout),
        ends=ends_of(layout),
        stages=stage_elements(layout),
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
    train = layout.cfg.train
    return rows * train.seq_len * BATCH_BYTES_A_TOKEN[train.documents] + COUNTER_BYTES


def logit_bytes(layout: Layout) -> int:
    """Return the bytes of logits that exist at one time: float32, and what is multiplied.

    Their gradient takes the place of the one, rounded to the format of compute it is the other.
    """
    vocab = layout.channels("vocab", layout.cfg.model.padded_vocab_size)
    each = FLOAT32_BYTES + layout.compute_bytes
    return layout.rows * layout.chunk_tokens * vocab * each
