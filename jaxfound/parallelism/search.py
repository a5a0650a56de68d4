"""Every layout of a config on a topology, ranked in seconds, and why each loser lost; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jaxfound.config.parallel import AXES, AxisName, ZeroStage
from jaxfound.config.params import ParamTable
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism.axes import BATCH_AXES, ShardingRules
from jaxfound.parallelism.compute import PASSES_OF_ARRAYS, busy_seconds, waiting
from jaxfound.parallelism.explain import bytes_text, seconds_text
from jaxfound.parallelism.layout import Layout
from jaxfound.parallelism.legal import STAGED_ZERO, PlanError, check_cuts, choose_rules, stages_of
from jaxfound.parallelism.memory import Ledger, Slots, State, state_of
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.parallelism.traffic import amounts_of
from jaxfound.parallelism.wires import best_placement, check_tensor, timed
from jaxfound.resources.topology import Topology

# The axes that are varied; the others stay as the config has them.
VARIED: tuple[AxisName, ...] = ("data", "fsdp", "expert", "tensor")
STAGES: tuple[ZeroStage, ...] = (1, 2, 3)
type Outcome = Literal["ranked", "too large", "illegal"]


@dataclass(frozen=True)
class Candidate:
    """One layout that was looked at.

    Attributes:
        change: keys of `parallel` that give it, with their values.
        outcome: whether it has a rank, does not fit, or is refused.
        why: what a loser loses by; nothing for the winner.
        seconds: of a step by what takes them, were nothing hidden: an axis, `arithmetic`, and
            `waiting` of stages for each other.
        total_bytes: memory of one device that it needs.
    """

    change: Mapping[str, int | str]
    outcome: Outcome
    why: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    total_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """Return the layout as overrides of the command line, degrees of one left out."""
        told = {k: v for k, v in self.change.items() if k not in AXES or v != 1 or k == "data"}
        return " ".join(f"parallel.{key}={value}" for key, value in told.items())


class Subject(NamedTuple):
    """What all layouts of a search share."""

    cfg: RunConfig
    topology: Topology
    params: ParamTable
    slots: Slots


def search(
    cfg: RunConfig, topology: Topology, *, params: ParamTable, slots: Slots
) -> tuple[Candidate, ...]:
    """Return every layout: those that fit from the fastest on, then the others with their reason.

    Of each mesh, ZeRO stage and policy the fewest micro-batches that fit are taken, because each
    more is traffic more. Stages wait the less the more micro-batches there are: with a pipeline
    every schedule is looked at, with the number that makes it fastest. Pipeline and context stay as
    the config has them.

    Args:
        cfg: what was asked.
        topology: what there is; its kind needs a peak and its links figures.
        params: the model's parameters.
        slots: what the update rule keeps.

    Raises:
        PlanError: if the topology has no figures to rank by.
    """
    check_figures(cfg, topology)
    subject = Subject(cfg, topology, params, slots)
    meshes = meshes_of(cfg, topology.num_devices)
    found = [candidate for degrees in meshes for candidate in _of_mesh(subject, degrees)]
    ranked = sorted((c for c in found if c.outcome == "ranked"), key=lambda c: c.step_s)
    large = sorted((c for c in found if c.outcome == "too large"), key=lambda c: c.total_bytes)
    illegal = [c for c in found if c.outcome == "illegal"]
    return (*_compared(ranked), *large, *illegal)


def check_figures(cfg: RunConfig, topology: Topology) -> None:
    """Refuse a topology whose seconds cannot be worked out."""
    compute = cfg.precision.compute
    missing = []
    if compute not in topology.peak_flops:
        missing.append(f"a published {compute} peak of {topology.device_kind}")
    if not topology.memory_bytes:
        missing.append("the memory of a device")
    if topology.devices_per_host > 1 and topology.inside_link is None:
        missing.append("the link inside a host")
    if topology.hosts > 1 and topology.network is None:
        missing.append("the network between hosts")
    if missing:
        raise PlanError(
            f"a search ranks by seconds, which need {', '.join(missing)}: name a topology, e.g. "
            "3x8:h200:ib400, or describe one in a file"
        )


def meshes_of(cfg: RunConfig, num_devices: int) -> Iterator[dict[AxisName, int]]:
    """Yield every product of the varied axes that uses all devices."""
    fixed = {a: getattr(cfg.parallel, a) for a in AXES if a not in VARIED}
    left, rest = num_devices, 0
    for degree in fixed.values():
        left, rest = left // degree, rest or left % degree
    varied = [a for a in VARIED if (a != "expert" or cfg.model.ffn == "moe")]
    if rest:
        return
    for product in _products(left, len(varied)):
        chosen = dict(zip(varied, product, strict=True))
        yield {a: fixed.get(a, chosen.get(a, 1)) for a in AXES}


def _products(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered way to write n as a product."""
    if factors == 1:
        yield (n,)
        return
    for first in divisors(n):
        for others in _products(n // first, factors - 1):
            yield (first, *others)


def _of_mesh(subject: Subject, degrees: Mapping[AxisName, int]) -> Iterator[Candidate]:
    """Yield the layouts of a mesh, or the one rule that refuses all of them."""
    pieces, staged = _pieces(subject.cfg, degrees), degrees["pipeline"] > 1
    try:
        rules, _ = choose_rules(_with(subject.cfg, zero_stage=STAGED_ZERO), degrees)
        check_cuts(subject.cfg, degrees, subject.params, rules=rules)
        check_pieces(subject.cfg, degrees, pieces)
        if not staged:
            check_span(subject, Layout(subject.cfg, subject.params, rules, "full", 1))
    except PlanError as refusal:
        yield Candidate({**degrees}, "illegal", str(refusal).partition("; ")[0])
        return
    if staged:
        for schedule in SCHEDULES:
            yield from _of_schedule(subject, rules, schedule, pieces)
        return
    for stage in STAGES if degrees["fsdp"] > 1 else STAGES[-1:]:
        cut = replace(rules, zero_stage=stage)
        layouts = [Layout(subject.cfg, subject.params, cut, "full", n) for n in pieces]
        yield from _of_stage(subject, layouts)


def _of_schedule(
    subject: Subject, rules: ShardingRules, schedule: str, pieces: Sequence[int]
) -> Iterator[Candidate]:
    """Yield the layouts of a schedule of stages, or the rule that refuses it."""
    degrees = dict(zip(AXES, rules.degrees, strict=True))
    layouts, refused = [], ""
    for count in pieces:
        cfg = _with(subject.cfg, schedule=schedule, num_microbatches=count)
        try:
            found = Layout(cfg, subject.params, rules, "full", count, stages_of(cfg, degrees))
            check_span(subject, found)
        except PlanError as refusal:
            refused = str(refusal).partition("; ")[0]
        else:
            layouts.append(found)
    if layouts:
        yield from _of_stage(subject, layouts)
    else:
        yield Candidate({**degrees, "schedule": schedule}, "illegal", refused)


def _with(cfg: RunConfig, **changes: int | str) -> RunConfig:
    """Return a config with other values of `parallel`."""
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update=changes)})


def _of_stage(subject: Subject, layouts: Sequence[Layout]) -> Iterator[Candidate]:
    """Yield the best layout of each policy, of some that differ in their micro-batches."""
    state = state_of(layouts[0], slots=subject.slots)
    for remat in PASSES_OF_ARRAYS:
        yield _best(subject, state, [replace(one, remat=remat) for one in layouts])


def _pieces(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> list[int]:
    """Return the numbers of micro-batches that give every device whole rows."""
    split = 1
    for axis in BATCH_AXES:
        split *= degrees[axis]
    rows = cfg.train.batch_size
    return [] if rows % split else divisors(rows // split)


def check_pieces(cfg: RunConfig, degrees: Mapping[AxisName, int], pieces: Sequence[int]) -> None:
    """Refuse a mesh that cannot share the rows of a batch."""
    if not pieces:
        axes = " x ".join(f"{a}={degrees[a]}" for a in BATCH_AXES if degrees[a] > 1)
        raise PlanError(f"train.batch_size={cfg.train.batch_size} rows do not divide over {axes}")


def check_span(subject: Subject, layout: Layout) -> None:
    """Refuse a mesh whose tensor axis leaves its host."""
    degrees = dict(zip(AXES, layout.rules.degrees, strict=True))
    amounts = amounts_of(layout)
    placement = best_placement(degrees, subject.topology, amounts)
    wires = timed(amounts, placement, subject.topology)
    check_tensor(subject.cfg, degrees["tensor"], wires, topology=subject.topology)


def _best(subject: Subject, state: State, layouts: Sequence[Layout]) -> Candidate:
    """Return the first layout that fits, of stages the fastest; else what the least lacks."""
    found = [(one, state.with_activations(one, topology=subject.topology)) for one in layouts]
    fitting = [(one, ledger) for one, ledger in found if ledger.fits]
    if fitting:
        several = fitting if layouts[0].pipeline is not None else fitting[:1]
        return min((_timed(subject, *pair) for pair in several), key=lambda c: c.step_s)
    layout, ledger = min(found, key=lambda pair: pair[1].total_bytes)
    entry = max(ledger.entries, key=lambda e: e.num_bytes)
    why = (
        f"does not fit by {bytes_text(-ledger.spare_bytes)} even in {layout.num_microbatches} "
        f"micro-batches; most is {entry.kind}, {bytes_text(entry.num_bytes)}"
    )
    return Candidate(_change(layout), "too large", why, total_bytes=ledger.total_bytes)


def _timed(subject: Subject, layout: Layout, ledger: Ledger) -> Candidate:
    degrees = dict(zip(AXES, layout.rules.degrees, strict=True))
    amounts = amounts_of(layout)
    placement = best_placement(degrees, subject.topology, amounts)
    busy = busy_seconds(layout, subject.topology) or 0.0
    seconds = {"arithmetic": busy}
    if layout.pipeline is not None:
        seconds["waiting"] = busy * waiting(layout)
    for wire in timed(amounts, placement, subject.topology):
        seconds[wire.axis] = seconds.get(wire.axis, 0.0) + (wire.seconds or 0.0)
    return Candidate(_change(layout), "ranked", seconds=seconds, total_bytes=ledger.total_bytes)


def _change(layout: Layout) -> dict[str, int | str]:
    degrees = dict(zip(AXES, layout.rules.degrees, strict=True))
    stage = {"zero_stage": layout.rules.zero_stage} if degrees["fsdp"] > 1 else {}
    schedule = {"schedule": layout.pipeline.schedule.name} if layout.pipeline else {}
    return {
        **degrees,
        **stage,
        **schedule,
        "remat": layout.remat,
        "num_microbatches": layout.num_microbatches,
    }


def _compared(ranked: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the ranked with what each spends more than the first."""
    if not ranked:
        return
    first = ranked[0]
    yield first
    for other in ranked[1:]:
        more = {
            what: other.seconds.get(what, 0.0) - first.seconds.get(what, 0.0)
            for what in (*other.seconds, *first.seconds)
        }
        worst = sorted(more, key=lambda what: -more[what])[:2]
        told = " and ".join(f"{w} {seconds_text(more[w])}" for w in worst if more[w] > 0)
        slower = seconds_text(other.step_s - first.step_s)
        yield replace(other, why=f"slower by {slower}: more in {told}" if told else "as fast")


def ranking_lines(found: Sequence[Candidate], *, top: int) -> Iterator[str]:
    """Yield a search as text: the first `top` of each outcome with what they lose by.

    Args:
        found: from `search`.
        top: how many to show of each outcome.
    """
    groups = {o: [c for c in found if c.outcome == o] for o in ("ranked", "too large", "illegal")}
    yield (
        f"{len(found)} layouts: {len(groups['ranked'])} fit, "
        f"{len(groups['too large'])} are too large, {len(groups['illegal'])} are refused"
    )
    for rank, one in enumerate(groups["ranked"][:top], 1):
        spent = " + ".join(f"{what} {seconds_text(s)}" for what, s in one.seconds.items())
        yield f"{rank}. {seconds_text(one.step_s)} = {spent}; {bytes_text(one.total_bytes)}"
        yield f"   {one.text()}"
        if one.why:
            yield f"   {one.why}"
    for title, outcome in (("too large, the nearest first:", "too large"), ("refused:", "illegal")):
        if groups[outcome]:
            yield title
        for one in groups[outcome][:top]:
            yield f"   {one.text()}"
            yield f"      {one.why}"
