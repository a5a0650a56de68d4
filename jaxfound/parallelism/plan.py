"""What was decided: degrees of the mesh axes, checked against the model before any compile."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism.axes import BATCH_AXES, TABLE_RULES, ShardingRules

# Axes whose collectives this version writes; the others are refused above degree 1.
SPLITTABLE: tuple[AxisName, ...] = ("data", "fsdp", "tensor")


class PlanError(ValueError):
    """A layout that cannot run: names the numbers, the rule and the nearest layouts that can."""


class Traffic(NamedTuple):
    """What one axis sends in a step, for `explain`."""

    axis: AxisName
    collective: str
    what: str


TRAFFIC: Mapping[AxisName, tuple[Traffic, ...]] = {
    "data": (Traffic("data", "all_reduce", "gradients"),),
    "fsdp": (
        Traffic("fsdp", "all_gather", "weights, before each use"),
        Traffic("fsdp", "reduce_scatter", "gradients"),
    ),
    "tensor": (Traffic("tensor", "all_reduce", "activations, twice a layer each way"),),
}


@dataclass(frozen=True)
class ParallelPlan:
    """A layout that has passed every check: degrees, rules, micro-batches, scan and remat.

    Attributes:
        degrees: devices along each of the six axes, in mesh order.
        rules: which dims the axes split.
        num_microbatches: pieces of the global batch whose gradients are summed.
        layers_per_scan_step: layers unrolled in one scan step; 0 = all of them, no scan.
        remat: name of the recomputation policy.
        param_bytes: bytes of float32 parameters on one device.
        notes: decisions a reader should know, one sentence each.
    """

    degrees: tuple[int, ...]
    rules: ShardingRules = TABLE_RULES
    num_microbatches: int = 1
    layers_per_scan_step: int = 1
    remat: str = "none"
    param_bytes: int = 0
    notes: tuple[str, ...] = ()
    format_version: int = 1

    @property
    def num_devices(self) -> int:
        """Devices the plan is for."""
        return math.prod(self.degrees)

    @property
    def batch_degree(self) -> int:
        """Pieces the rows of a micro-batch are split into."""
        return math.prod(self.degree(a) for a in BATCH_AXES)

    def degree(self, axis: AxisName) -> int:
        """Return the devices along `axis`."""
        return self.degrees[AXES.index(axis)]

    def degrees_text(self) -> str:
        """Return the axes above one as `data=4 x tensor=2`."""
        used = [f"{a}={n}" for a, n in zip(AXES, self.degrees, strict=True) if n > 1]
        return " x ".join(used) or "one device"

    def explain(self) -> str:
        """Return the decisions as text, one a line, the same for the same inputs."""
        lines = [f"mesh: {self.degrees_text()} ({self.num_devices} devices)"]
        for axis in SPLITTABLE:
            if self.degree(axis) > 1:
                lines += [f"  {axis}: {t.collective} of {t.what}" for t in TRAFFIC[axis]]
        scan = self.layers_per_scan_step or "all"
        lines.append(f"batch rows split over {self.batch_degree} devices")
        lines.append(f"micro-batches: {self.num_microbatches}")
        lines.append(f"layers in one scan step: {scan}; remat: {self.remat}")
        lines.append(f"parameters on one device: {self.param_bytes:,} bytes in float32")
        return "\n".join([*lines, *self.notes])


def make_plan(cfg: RunConfig, num_devices: int, *, params: ParamTable) -> ParallelPlan:
    """Decide the layout of `cfg` on `num_devices`, or refuse it with the numbers.

    Args:
        cfg: what was asked.
        num_devices: devices of the job.
        params: the model's parameters, from `models.describe`.

    Raises:
        PlanError: the degrees, the batch or a dimension do not divide.
    """
    degrees = resolve_degrees(cfg, num_devices)
    rules, notes = choose_rules(cfg, degrees)
    check_rows(cfg, degrees)
    check_dims(params, degrees, rules=rules)
    step = cfg.parallel.layers_per_scan_step
    return ParallelPlan(
        degrees=tuple(degrees[a] for a in AXES),
        rules=rules,
        num_microbatches=cfg.parallel.num_microbatches,
        layers_per_scan_step=0 if step == "all" else step,
        remat=cfg.parallel.remat,
        param_bytes=sum(
            bytes_on_one_device(s, degrees, rules=rules) for s in params if s.kind == "param"
        ),
        notes=tuple(notes),
    )


def resolve_degrees(cfg: RunConfig, num_devices: int) -> dict[AxisName, int]:
    """Return the degree of every axis; `data: auto` takes the devices the others leave."""
    asked = cfg.parallel
    fixed = {a: getattr(asked, a) for a in AXES if a != "data"}
    for axis, degree in fixed.items():
        if degree > 1 and axis not in SPLITTABLE:
            raise PlanError(
                f"parallel.{axis}={degree}: this version splits over {', '.join(SPLITTABLE)} only. "
                f"Set parallel.{axis}=1"
            )
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
    """Return the rules for this model and the notes that explain departures from the table."""
    tensor, kv_heads = degrees["tensor"], cfg.model.gqa.num_kv_heads
    if cfg.model.mixer == "gqa" and kv_heads % tensor:
        note = (
            f"num_kv_heads={kv_heads} does not divide over tensor={tensor}: every tensor-parallel "
            "device holds and computes all keys and values"
        )
        return ShardingRules(unsplit=("kv_heads",)), [note]
    return TABLE_RULES, []


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
    """Yield every dim of a parameter that is split, its size, and the axis that splits it."""
    cuts = rules.param_axes(spec.dims)
    for dim, size, axes in zip(spec.dims, spec.shape, cuts, strict=True):
        for axis in axes:
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


def bytes_on_one_device(
    spec: ParamSpec, degrees: Mapping[AxisName, int], *, rules: ShardingRules
) -> int:
    """Return the float32 bytes of one parameter's shard."""
    return spec.size * 4 // math.prod(degrees[axis] for *_, axis in splits(spec, rules=rules))
