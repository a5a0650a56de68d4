"""Which layouts are legal: every rule that can be checked from a config and a parameter table."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxfound.config.parallel import AXES, AxisName, ParallelConfig, ZeroStage
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism import zero
from jaxfound.parallelism.axes import BATCH_AXES, ShardingRules
from jaxfound.parallelism.context import CHUNKS_EACH
from jaxfound.parallelism.layout import STAGED_DIM, Layout
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.parallelism.pipeline.facts import Pipeline, pipeline_of
from jaxfound.parallelism.pipeline.pipelining import Pipelining
from jaxfound.parallelism.pipeline.schedule import ScheduleError

# Layers of a chunk whose backward pass is cut into I and W: they are unrolled.
MOST_UNROLLED = 8
# What fsdp cuts at most where stages keep parameters at hand.
STAGED_ZERO: ZeroStage = 2


class PlanError(ValueError):
    """A layout that cannot run: names the numbers, the rule and the nearest layouts that can."""


def resolve_degrees(cfg: RunConfig, num_devices: int) -> dict[AxisName, int]:
    """Return the degree of every axis; `data: auto` takes the devices the others leave.

    Args:
        cfg: what was asked.
        num_devices: devices of the job.
    Raises:
        PlanError: if the degrees do not multiply to the devices.
    """
    asked = cfg.parallel
    fixed: dict[AxisName, int] = {a: getattr(asked, a) for a in AXES if a != "data"}
    others = math.prod(fixed.values())
    product = " x ".join(f"{a}={n}" for a, n in fixed.items() if n > 1) or "1"
    if asked.data == "auto" and num_devices % others:
        raise PlanError(
            f"{product} = {others} does not divide {num_devices} devices "
            f"({num_devices} % {others} = {num_devices % others}). "
            f"Choose degrees whose product is in {divisors(num_devices)}"
        )
    data = num_devices // others if asked.data == "auto" else asked.data
    if data * others != num_devices:
        raise PlanError(
            f"data={data} x {product} = {data * others}, but there are {num_devices} devices. "
            f"Set parallel.data={max(num_devices // others, 1)}, or parallel.data=auto"
        )
    return {a: data if a == "data" else fixed[a] for a in AXES}


def choose_rules(
    cfg: RunConfig, degrees: Mapping[AxisName, int]
) -> tuple[ShardingRules, list[str]]:
    """Return the rules for this model and the notes that explain departures from the table.

    Raises:
        PlanError: if fsdp is to cut parameters that stages use in every tick.
    """
    tensor, kv_heads = degrees["tensor"], cfg.model.gqa.num_kv_heads
    stage, notes = choose_zero_stage(cfg.parallel, degrees)
    activations = cfg.parallel.activations
    if activations == "sequence" and tensor == 1:
        notes = [*notes, "activations=sequence cuts nothing: it is cut over tensor, which is 1"]
    rules = ShardingRules(
        zero_stage=stage, activations=activations, degrees=tuple(degrees[a] for a in AXES)
    )
    if cfg.model.mixer == "gqa" and kv_heads % tensor:
        note = (
            f"num_kv_heads={kv_heads} does not divide over tensor={tensor}: every tensor-parallel "
            "device holds and computes all keys and values"
        )
        return replace(rules, unsplit=("kv_heads",)), [note, *notes]
    return rules, notes


def choose_zero_stage(
    parallel: ParallelConfig, degrees: Mapping[AxisName, int]
) -> tuple[ZeroStage, list[str]]:
    """Return the ZeRO stage that was asked; below a pipeline 2 where nobody asked for 3.

    Raises:
        PlanError: if 3 was asked for with stages.
    """
    stage = parallel.zero_stage
    if stage < 3 or degrees["pipeline"] == 1 or degrees["fsdp"] == 1:
        return stage, []
    every_tick = "parameters cut over fsdp would be gathered again in every tick of the pipeline"
    if "zero_stage" in parallel.model_fields_set:
        raise PlanError(
            f"parallel.zero_stage=3 with pipeline={degrees['pipeline']}: {every_tick}. "
            f"Set parallel.zero_stage={STAGED_ZERO}"
        )
    note = (
        f"ZeRO stage {STAGED_ZERO} and not 3, which is what zero_stage is when nobody says: "
        f"{every_tick}"
    )
    return STAGED_ZERO, [note]


def stages_of(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> Pipeline | None:
    """Return the schedule of the stages with what follows from it; None without stages.

    Raises:
        PlanError: if the schedule cannot take these ranks, micro-batches or layers.
    """
    ranks, asked, model = degrees["pipeline"], cfg.parallel, cfg.model
    if ranks == 1:
        return None
    chunks = SCHEDULES[asked.schedule].chunks(asked.chunks)
    pipelining = Pipelining(asked.schedule, ranks, asked.num_microbatches, chunks)
    try:
        found = pipeline_of(pipelining, num_layers=model.num_layers - model.num_leading_layers)
    except ScheduleError as refusal:
        raise PlanError(f"parallel.pipeline={ranks}, parallel.schedule={refusal}") from refusal
    check_unrolled(found)
    return found


def check_unrolled(pipeline: Pipeline) -> None:
    """Refuse to cut the backward pass of more layers than are unrolled.

    Raises:
        PlanError: with the fewest ranks that would do.
    """
    most, schedule = pipeline.stages.layers_a_chunk, pipeline.schedule
    if most <= MOST_UNROLLED or not schedule.splits_backward:
        return
    chunks_apart = schedule.num_stages // schedule.num_ranks * MOST_UNROLLED
    fewest = -(-pipeline.num_layers // chunks_apart)
    # Two directions need an even number of ranks.
    fewest += fewest % schedule.num_copies
    raise PlanError(
        f"parallel.schedule={schedule.name} cuts backward passes into the gradients of inputs and "
        f"of weights, for which the layers of a chunk are unrolled, {MOST_UNROLLED} at most: with "
        f"pipeline={schedule.num_ranks} a chunk has {most}. Use parallel.schedule=paired_1f1b, or "
        f"parallel.pipeline={fewest} or more"
    )


def layout_of(
    cfg: RunConfig, degrees: Mapping[AxisName, int], params: ParamTable
) -> tuple[Layout, list[str]]:
    """Return the layout of `cfg` at these degrees and what a reader should know of it.

    Raises:
        PlanError: if the rows, a dimension or the schedule of the stages do not fit.
    """
    rules, notes = choose_rules(cfg, degrees)
    check_rows(cfg, degrees)
    check_cuts(cfg, degrees, params, rules=rules)
    layout = Layout(
        cfg=cfg,
        params=params,
        rules=rules,
        remat=cfg.parallel.remat,
        num_microbatches=cfg.parallel.num_microbatches,
        pipeline=stages_of(cfg, degrees),
    )
    return layout, [*notes, *zero.notes(layout.stored(), rules)]


def check_cuts(
    cfg: RunConfig,
    degrees: Mapping[AxisName, int],
    params: ParamTable,
    *,
    rules: ShardingRules,
) -> None:
    """Refuse degrees that cannot cut this model or its rows, however the batch is cut.

    Raises:
        PlanError: with the sizes and the degree.
    """
    check_experts(cfg, degrees)
    check_context(cfg, degrees)
    check_stream(cfg, degrees)
    check_dims(params, degrees, rules=rules)


def check_experts(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> None:
    """Refuse to split the experts of a model that has none."""
    expert = degrees["expert"]
    if expert > 1 and cfg.model.ffn != "moe":
        raise PlanError(
            f"parallel.expert={expert}: this model has no experts to split "
            f"(model.ffn={cfg.model.ffn}). Set parallel.expert=1 and give its devices to data "
            "or fsdp"
        )


def check_rows(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> None:
    """Refuse a micro-batch whose rows do not split evenly over the batch axes."""
    split = math.prod(degrees[a] for a in BATCH_AXES)
    rows = cfg.train.batch_size // cfg.parallel.num_microbatches
    if rows % split == 0:
        return
    axes = " x ".join(f"{a}={degrees[a]}" for a in BATCH_AXES if degrees[a] > 1)
    pieces = cfg.parallel.num_microbatches
    lower = max(rows // split, 1) * split * pieces
    upper = -(-rows // split) * split * pieces
    raise PlanError(
        f"a micro-batch of {rows} rows (train.batch_size={cfg.train.batch_size} / "
        f"num_microbatches={pieces}) cannot be split over {axes} = {split} devices: "
        f"{rows} % {split} = {rows % split}. Nearest batch_size: {sorted({lower, upper})}"
    )


def check_context(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> None:
    """Refuse rows that the context axis cannot cut into its chunks."""
    num_chunks, length = CHUNKS_EACH * degrees["context"], cfg.train.seq_len
    if degrees["context"] == 1 or length % num_chunks == 0:
        return
    nearest = sorted(
        {max(length // num_chunks, 1) * num_chunks, -(-length // num_chunks) * num_chunks}
    )
    raise PlanError(
        f"parallel.context={degrees['context']} cuts a row into {num_chunks} chunks, two a device, "
        f"and train.seq_len={length} is no multiple of that ({length} % {num_chunks} = "
        f"{length % num_chunks}). Nearest seq_len: {nearest}"
    )


def check_stream(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> None:
    """Refuse rows of which the devices of tensor cannot hold equal parts."""
    length, context, tensor = cfg.train.seq_len, degrees["context"], degrees["tensor"]
    pieces = (CHUNKS_EACH * context if context > 1 else 1) * tensor
    if cfg.parallel.activations == "replicated" or length % (context * tensor) == 0:
        return
    below, above = length // pieces * pieces, -(-length // pieces) * pieces
    raise PlanError(
        f"parallel.activations=sequence cuts the {length // context} tokens of a row that a device "
        f"has (train.seq_len={length}, context={context}) over tensor={tensor}: "
        f"{length // context} % {tensor} = {length // context % tensor}. Nearest seq_len: "
        f"{sorted({max(below, pieces), above})}, or parallel.activations=replicated"
    )


def check_dims(
    params: ParamTable, degrees: Mapping[AxisName, int], *, rules: ShardingRules
) -> None:
    """Refuse degrees that do not divide a dimension they split; all faults in one message."""
    faults: dict[tuple[str, int, AxisName], list[str]] = {}
    for spec in params:
        for dim, size, axis in splits(spec, rules=rules):
            if size % degrees[axis]:
                faults.setdefault((dim, size, axis), []).append(spec.path)
    if faults:
        raise PlanError("; ".join(_fault_text(k, v, degrees) for k, v in faults.items()))


def splits(spec: ParamSpec, *, rules: ShardingRules) -> Iterator[tuple[str, int, AxisName]]:
    """Yield every dim of a parameter that is split, its size, and the axis that splits it.

    Not the stack of layers: stages that have fewer than the others are filled up.
    """
    cuts = rules.param_axes(spec.dims, spec.shape)
    for dim, size, axes in zip(spec.dims, spec.shape, cuts, strict=True):
        for axis in axes if dim != STAGED_DIM else ():
            yield dim or "", size, axis


def nearest_divisors(n: int, degree: int) -> list[int]:
    """Return the divisors of `n` next to `degree`, below and above it."""
    legal = divisors(n)
    below = [d for d in legal if d <= degree][-1:]
    above = [d for d in legal if d >= degree][:1]
    return sorted({*below, *above})


def _fault_text(
    fault: tuple[str, int, AxisName], paths: list[str], degrees: Mapping[AxisName, int]
) -> str:
    dim, size, axis = fault
    where = paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    way_out = f", or a model.vocab_multiple that {axis} divides" if dim == "vocab" else ""
    return (
        f"{axis}={degrees[axis]} does not divide {dim}={size} of {where} "
        f"({size} % {degrees[axis]} = {size % degrees[axis]}). "
        f"Nearest {axis}: {nearest_divisors(size, degrees[axis])}{way_out}"
    )
