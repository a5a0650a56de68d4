"""What was decided: a layout that passed every check, where it lies, what it needs and costs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.params import ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.parallelism.axes import BATCH_AXES, TABLE_RULES, ShardingRules
from jaxfound.parallelism.compute import (
    PASSES_OF_ARRAYS,
    Terms,
    compute_seconds,
    compute_terms,
    part_flops,
    uneven,
)
from jaxfound.parallelism.explain import (
    axis_lines,
    host_lines,
    ledger_lines,
    pipeline_lines,
    seconds_text,
    state_lines,
    terms_line,
    verdict_text,
)
from jaxfound.parallelism.layout import Layout, PackedRows
from jaxfound.parallelism.legal import layout_of, resolve_degrees
from jaxfound.parallelism.memory import (
    MARGIN,
    Ledger,
    Slots,
    adam_slots,
    state_of,
    whole_state_bytes,
)
from jaxfound.parallelism.pipeline.facts import Pipeline, pipeline_of
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.parallelism.pipeline.schedule import Schedule
from jaxfound.parallelism.pipeline.stages import StageLayers
from jaxfound.parallelism.placement import Placement
from jaxfound.parallelism.remedies import remedies
from jaxfound.parallelism.traffic import amounts_of
from jaxfound.parallelism.wires import Wire, best_placement, check_tensor, timed
from jaxfound.resources.topology import Topology

FORMAT_VERSION = 3
# A count of devices alone: one host of a kind that nothing is known of.
UNKNOWN_KIND = "device of unknown kind"
CUT_TEXT = {
    0: "nothing",
    1: "optimizer state",
    2: "optimizer state and summed gradients",
    3: "optimizer state, summed gradients and parameters",
}
# What JAX's allocator takes of a GPU unless this variable says another share.
JAX_SHARE, JAX_SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
# What `remat: auto` tries, from the least recomputed on.
POLICIES: tuple[str, ...] = tuple(PASSES_OF_ARRAYS)
MESH_ORDER = Placement()
NO_LEDGER = Ledger()
# From this share on, what stages that are not alike add to a step is said.
UNEVEN_SHARE = 0.05


@dataclass(frozen=True)
class ParallelPlan:
    """A layout that has passed every check: degrees, rules, micro-batches, scan and remat.

    Attributes:
        degrees: devices along each of the six axes, in mesh order.
        rules: which dims the axes split.
        num_microbatches: pieces of the global batch whose gradients are summed.
        layers_per_scan_step: layers unrolled in one scan step; 0 = all of them, no scan.
        remat: name of the recomputation policy.
        topology: what the plan is for; None when only degrees were given.
        placement: which axis runs over which link.
        num_params: trained parameters of the model.
        state_bytes: parameters, gradients and optimizer state of the whole model, each held once.
        ledger: bytes of one device by kind.
        wires: what each axis sends in a step.
        terms: seconds of a step without traffic, by what takes them; None where peaks are not
            known.
        schedule: when each rank runs which stage; None without stages.
        stages: which layers each chunk holds; None without stages.
        notes: decisions a reader should know, one sentence each.
    """

    degrees: tuple[int, ...]
    rules: ShardingRules = TABLE_RULES
    num_microbatches: int = 1
    layers_per_scan_step: int = 1
    remat: str = "none"
    topology: Topology | None = None
    placement: Placement = MESH_ORDER
    num_params: int = 0
    state_bytes: int = 0
    ledger: Ledger = NO_LEDGER
    wires: tuple[Wire, ...] = ()
    terms: Terms | None = None
    schedule: Schedule | None = None
    stages: StageLayers | None = None
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def num_devices(self) -> int:
        """Devices the plan is for."""
        return math.prod(self.degrees)

    @property
    def batch_degree(self) -> int:
        """Pieces the rows of a micro-batch are split into."""
        return math.prod(self.degree(a) for a in BATCH_AXES)

    @property
    def param_bytes(self) -> int:
        """Bytes of float32 parameters on one device."""
        return self.ledger.of("parameters")

    @property
    def compute_s(self) -> float | None:
        """Seconds of a step without traffic; None where a peak is not known."""
        return None if self.terms is None else self.terms.total

    @property
    def wire_s(self) -> float | None:
        """Seconds of all traffic of a step, one after the other; None where a link is unknown."""
        seconds = [wire.seconds for wire in self.wires]
        return None if None in seconds else sum(cast(list[float], seconds), 0.0)

    @property
    def pipeline(self) -> Pipeline | None:
        """What follows from the schedule and the stages; None without stages."""
        if self.schedule is None or self.stages is None:
            return None
        num_layers = max(self.stages.places) + 1
        return pipeline_of(Pipelining.of(self.schedule), num_layers=num_layers)

    def degree(self, axis: AxisName) -> int:
        """Return the devices along `axis`."""
        return self.degrees[AXES.index(axis)]

    def degrees_text(self) -> str:
        """Return the axes above one as `data=4 x tensor=2`."""
        used = [f"{a}={n}" for a, n in zip(AXES, self.degrees, strict=True) if n > 1]
        return " x ".join(used) or "one device"

    def as_data(self) -> dict[str, object]:
        """Return the plan as plain data for JSON, with its format_version."""
        topology = asdict(self.topology) if self.topology is not None else None
        ledger = {e.kind: e.num_bytes for e in self.ledger.entries}
        return {
            "format_version": self.format_version,
            "topology": topology,
            "num_params": self.num_params,
            "mesh": dict(zip(AXES, self.degrees, strict=True)),
            "device_order": list(self.placement.order),
            "zero_stage": self.rules.zero_stage,
            "activations": self.rules.activations,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule.name if self.schedule is not None else None,
            "pipeline": self.pipeline.as_data() if self.pipeline is not None else None,
            "layers_per_scan_step": self.layers_per_scan_step,
            "remat": self.remat,
            "memory_bytes": {**ledger, "total": self.ledger.total_bytes},
            "argument_bytes": self.ledger.argument_bytes,
            "capacity_bytes": self.ledger.capacity_bytes,
            "fits": self.ledger.fits,
            "wires": [asdict(wire) for wire in self.wires],
            "compute_s": self.compute_s,
            "terms_s": None if self.terms is None else self.terms._asdict(),
            "wire_s": self.wire_s,
            "notes": list(self.notes),
        }

    def explain(self) -> str:
        """Return the decisions as text, one a line, the same for the same inputs."""
        return "\n".join(explanation(self))


def make_plan(
    cfg: RunConfig,
    topology: Topology | int,
    *,
    params: ParamTable,
    optimizer_slots: Slots | None = None,
    packed: PackedRows | None = None,
) -> ParallelPlan:
    """Decide the layout of `cfg` on a topology, or refuse it with the numbers.

    A plan that does not fit the memory is returned with that verdict: activations are estimates.

    Args:
        cfg: what was asked.
        topology: what there is; a number is that many devices of one host and unknown kind.
        params: the model's parameters, from `models.describe`.
        optimizer_slots: what the update rule keeps; AdamW's two moments by default.
        packed: what the rows of the text ask of attention, where that is known.

    Raises:
        PlanError: the degrees, the batch or a dimension do not divide, or tensor leaves its host.
    """
    if isinstance(topology, int):
        topology = Topology(1, topology, UNKNOWN_KIND, 0)
    slots = adam_slots(params) if optimizer_slots is None else optimizer_slots
    degrees = resolve_degrees(cfg, topology.num_devices)
    asked, notes = layout_of(cfg, degrees, params)
    asked = replace(asked, packed=packed)
    layout, ledger = choose_remat(asked, slots=slots, topology=topology)
    amounts = amounts_of(layout)
    placement = best_placement(degrees, topology, amounts)
    wires = timed(amounts, placement, topology)
    check_tensor(cfg, degrees["tensor"], wires, topology=topology)
    terms = compute_terms(layout, topology)
    compute_s = None if terms is None else terms.total
    notes += [*stage_notes(layout), *wire_notes(wires, compute_s=compute_s)]
    notes += memory_notes(layout, ledger, topology=topology, slots=slots)
    step = cfg.parallel.layers_per_scan_step
    return ParallelPlan(
        degrees=tuple(degrees[a] for a in AXES),
        rules=layout.rules,
        num_microbatches=layout.num_microbatches,
        layers_per_scan_step=0 if step == "all" else step,
        remat=layout.remat,
        topology=topology,
        placement=placement,
        num_params=params.size,
        state_bytes=whole_state_bytes(params, slots),
        ledger=ledger,
        wires=wires,
        terms=terms,
        schedule=layout.pipeline.schedule if layout.pipeline is not None else None,
        stages=layout.pipeline.stages if layout.pipeline is not None else None,
        notes=tuple(notes),
    )


def choose_remat(layout: Layout, *, slots: Slots, topology: Topology) -> tuple[Layout, Ledger]:
    """Return the layout and its ledger with the policy that was asked.

    Of `auto` the fastest by this plan among those that fit; the last one where none does, and where
    times are not known the first that fits. To keep more is not always faster: a loop over layers
    copies what it keeps.
    """
    state = state_of(layout, slots=slots)
    policies = POLICIES if layout.remat == "auto" else (layout.remat,)
    layouts = [replace(layout, remat=policy) for policy in policies]
    ledgers = [state.with_activations(each, topology=topology) for each in layouts]
    found = list(zip(layouts, ledgers, strict=True))
    fitting = [each for each in found if each[1].fits is not False]
    if not fitting:
        return found[-1]
    return min(fitting, key=lambda each: compute_seconds(each[0], topology) or 0.0)


def stage_notes(layout: Layout) -> Iterator[str]:
    """Yield what stages that are not alike cost, where it is worth a sentence."""
    share = uneven(layout)
    if layout.pipeline is None or share < UNEVEN_SHARE:
        return
    flops, held = part_flops(layout), layout.pipeline.stages
    last, first = flops.last / flops.layer, flops.first / flops.layer
    yield (
        f"pipeline: a step takes {share:.0%} longer than with stages that have the same to do: "
        f"{held.num_masked} of {len(held.places)} places hold no layer, the first stage's own part "
        f"is {first:.1f} layers of work and the last's {last:.1f}"
    )


def wire_notes(wires: Sequence[Wire], *, compute_s: float | None) -> Iterator[str]:
    """Yield a warning when what crosses hosts outweighs the arithmetic of a step."""
    crossing = sum(w.seconds or 0.0 for w in wires if w.crosses_hosts)
    if compute_s is not None and crossing > compute_s:
        yield (
            f"warning: what crosses hosts takes {seconds_text(crossing)} of a step, more than the "
            f"{seconds_text(compute_s)} of arithmetic: devices wait for the network. Use a faster "
            "one, more NICs a host, fewer micro-batches, or axes that stay inside a host"
        )


def memory_notes(
    layout: Layout, ledger: Ledger, *, topology: Topology, slots: Slots
) -> Iterator[str]:
    """Yield the way out of a plan that does not fit, or what a full device needs to be told."""
    if ledger.fits is False:
        parallel = layout.cfg.parallel.model_copy(update={"remat": layout.remat})
        cfg = layout.cfg.model_copy(update={"parallel": parallel})
        degrees = dict(zip(AXES, layout.rules.degrees, strict=True))
        yield remedies(cfg, degrees, layout.params, slots=slots, ledger=ledger, topology=topology)
        return
    used = ledger.total_bytes - ledger.of("margin")
    if topology.is_whole_gpu and used > JAX_SHARE * ledger.capacity_bytes:
        yield (
            f"JAX takes {JAX_SHARE:.0%} of a GPU's memory at start: run this with "
            f"{JAX_SHARE_VARIABLE}={1 - MARGIN:g}"
        )


def explanation(plan: ParallelPlan) -> Iterator[str]:
    """Yield the lines of `plan.explain()`."""
    degrees = dict(zip(AXES, plan.degrees, strict=True))
    if plan.topology is not None and plan.topology.device_kind != UNKNOWN_KIND:
        yield plan.topology.text()
    yield f"mesh: {plan.degrees_text()} ({plan.num_devices} devices)"
    yield from axis_lines(degrees, plan.placement, plan.wires)
    yield from host_lines(degrees, plan.placement)
    yield f"batch rows split over {plan.batch_degree} devices"
    yield f"micro-batches: {plan.num_microbatches}"
    if plan.pipeline is not None:
        yield from pipeline_lines(plan.pipeline)
    yield f"layers in one scan step: {plan.layers_per_scan_step or 'all'}; remat: {plan.remat}"
    if plan.degree("fsdp") > 1:
        stage, staged = plan.rules.zero_stage, plan.schedule is not None
        yield f"ZeRO stage {stage}: fsdp cuts {CUT_TEXT[min(stage, 1) if staged else stage]}"
    if plan.rules.cuts_stream:
        parts = plan.degree("tensor")
        yield f"activations: between blocks a device has one of {parts} parts of the sequence"
    yield from state_lines(plan.num_params, plan.state_bytes, num_devices=plan.num_devices)
    yield "memory of one device:"
    yield from ledger_lines(plan.ledger)
    yield verdict_text(plan.ledger)
    if plan.terms is not None:
        yield terms_line(plan.terms)
        if plan.wires:
            yield f"wires: {seconds_text(plan.wire_s)} a step, were none of it behind arithmetic"
    yield from plan.notes
