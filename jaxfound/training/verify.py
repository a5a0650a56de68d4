"""Does a layout compute what one device computes, and is each of its axes real?

A small model of the same structure takes one step on one device and on virtual devices in the
layout that was asked for. Equality alone proves little: a program that gathers everything on every
device is equal too. So the compiled program is read as well.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxfound.communication import Collective
from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.params import LAYER_DIMS, ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.parallelism import ParallelPlan, make_plan
from jaxfound.resources.topology import Device, Topology
from jaxfound.training.aot import compile_step
from jaxfound.training.optimizer import optimizer_slots
from jaxfound.training.shrink import Degrees
from jaxfound.training.trial import Outcome, Parallel, Trial, degree_of
from pallas_kernels import deviceless


class Limits(NamedTuple):
    """How far a layout may be from one device.

    Attributes:
        sums: of loss and gradient norm, as shares.
        gradient: ‖a − b‖₂ / ‖b‖₂ of each.
        moved: share of choices that may go to another expert, as far as numbers of tokens tell.
    """

    sums: float
    gradient: float
    moved: float = 0.0


# float32 sums in another order: 2^-24 a rounding, some thousand of them in a row.
EXACT = Limits(1e-5, 1e-5)
# Operands of 8 bits of a fraction or fewer: sums in another order move a choice of the router here
# and there, and an expert's gradients with it. By 6 % where 0.3 % of the choices moved, in
# configs/tiny-mla-moe.yaml in bfloat16 cut over tensor, or context, on a CPU.
ROUNDED = Limits(1e-3, 0.1, 0.01)
# From identical gradients only the optimizer's own arithmetic is left.
UPDATE_LIMIT = 1e-6


type Leaves = Mapping[str, np.ndarray]
type Crossings = Sequence[tuple[Collective, tuple[AxisName, ...]]]


class Finding(NamedTuple):
    """One question and its answer.

    Attributes:
        question: what was checked.
        holds: the answer.
        detail: figures, or what is wrong.
    """

    question: str
    holds: bool
    detail: str


def limits_of(cfg: RunConfig) -> Limits:
    """Return the limits of a run's formats."""
    precision = cfg.precision
    is_exact = precision.compute == "float32" and not precision.rules
    return EXACT if is_exact else ROUNDED


def verify(
    cfg: RunConfig,
    degrees: Degrees,
    *,
    devices: Sequence[Device] | None = None,
    whole: bool = False,
) -> Iterator[Finding]:
    """Yield what holds of a layout, each finding when it is known.

    The compiler for CPUs has no reduce_scatter for a partitioned program. Where that for GPUs is
    installed (extra `aot`), ZeRO and a residual stream that is cut are looked for in the program
    for H200s as well.

    Args:
        cfg: the run; its model is made small.
        degrees: of all six axes.
        devices: as many as the degrees multiply to, or more; all there are by default.
        whole: take the run's own sizes and formats instead; one device must hold it too.
    Raises:
        PlanError: if the layout is not legal for the small model either.
    """
    devices = jax.devices() if devices is None else devices
    trial = Trial(cfg, degrees, whole=whole)
    yield from findings(trial, {**degrees}, devices, one=trial.run({}, devices))
    axes = scattering(trial.cfg, degrees)
    if axes and devices[0].platform == "cpu" and not whole and deviceless.missing() is None:
        yield from scatters_on_gpu(trial, axes)


def scattering(cfg: RunConfig, degrees: Degrees) -> list[AxisName]:
    """Return the axes over which a step is to reduce and scatter: gradients, activations."""
    asked: dict[AxisName, bool] = {
        "fsdp": cfg.parallel.zero_stage > 0,
        "tensor": cfg.parallel.activations == "sequence",
    }
    return [axis for axis, scatters in asked.items() if scatters and degrees[axis] > 1]


def scatters_on_gpu(trial: Trial, axes: Sequence[AxisName]) -> Iterator[Finding]:
    """Yield for each axis whether the step, compiled for H200s, reduces and scatters over it."""
    cfg = trial.cfg
    num_devices = math.prod(getattr(cfg.parallel, axis) for axis in AXES)
    plan = make_plan(
        cfg,
        Topology.parse(f"1x{num_devices}:h200"),
        params=trial.table,
        optimizer_slots=optimizer_slots(cfg.optimizer, trial.table),
    )
    sent = compile_step(cfg, plan).sent
    for axis in axes:
        kinds = {e.collective for e in sent if axis in e.axes}
        said = f"{', '.join(sorted(kinds)) or 'nothing'} cross {axis}"
        yield Finding(f"reduce_scatter over {axis} on H200s", "reduce_scatter" in kinds, said)


def findings(
    trial: Trial, parallel: Parallel, devices: Sequence[Device], *, one: Outcome
) -> Iterator[Finding]:
    """Yield what holds of a layout of a trial, given what one device computed."""
    many = trial.run(parallel, devices)
    limits = limits_of(trial.cfg)
    differing = differing_leaves(many.grads, one.grads, limits=limits)
    yield from equality(many, one, differing, limits=limits)
    if differing:
        yield from blame(trial, parallel, devices, one=one)
    yield updates(trial, parallel, devices, one=one)
    for axis in AXES:
        if degree_of(parallel, axis) > 1:
            yield axis_is_real(
                axis,
                many.found,
                degree=degree_of(parallel, axis),
                zero_stage=many.plan.rules.zero_stage,
                lengths=token_lengths(trial.cfg, many.plan),
                matrix_sizes=matrix_sizes(trial.table),
            )
    if many.plan.rules.cuts_stream:
        yield stream_is_cut(trial, many)
    yield state_is_cut(many, one)
    told = f": {many.warnings[0].strip()[:200]}" if many.warnings else ""
    detail = f"{len(many.warnings)} arrays went through one device{told}"
    yield Finding("no involuntary rematerialization", not many.warnings, detail)


def equality(
    many: Outcome, one: Outcome, differing: Sequence[str], *, limits: Limits
) -> Iterator[Finding]:
    """Yield whether loss, norm, gradients and routing are those of one device."""
    for name in ("loss", "norm"):
        a, b = getattr(many, name), getattr(one, name)
        error = abs(a - b) / max(abs(b), 1e-30)
        what = "loss" if name == "loss" else "gradient norm"
        yield Finding(what, error <= limits.sums, f"{a:.6f} and {b:.6f}")
    errors = {path: relative_error(g, one.grads[path]) for path, g in many.grads.items()}
    path, worst = worst_of(errors)
    detail = f"worst of {len(errors)}: {path} {worst:.1e}"
    if differing:
        detail = f"first of {len(differing)} that differ: {differing[0]} {errors[differing[0]]:.1e}"
    yield Finding("every gradient", not differing, detail)
    if one.expert_counts:
        moved = max(moved_share(c, one.expert_counts[p]) for p, c in many.expert_counts.items())
        said = f"{moved:.2%} went elsewhere" if moved else "equal"
        yield Finding("tokens of every expert", moved <= limits.moved, said)


def updates(
    trial: Trial, parallel: Parallel, devices: Sequence[Device], *, one: Outcome
) -> Finding:
    """Return whether an update with one device's gradients gives one device's parameters."""
    ours = trial.move(parallel, devices, grads=one.grads)
    expected = trial.move({}, devices, grads=one.grads)
    path, worst = worst_of({p: relative_error(a, expected[p]) for p, a in ours.items()})
    before = trial.arrays.params
    still = [p for p, a in ours.items() if one.grads[p].any() and np.array_equal(a, before[p])]
    said = f"{path} {worst:.1e}" if not still else f"{still[0]} did not move"
    holds = worst <= UPDATE_LIMIT and not still
    return Finding("updated parameters, from equal gradients", holds, said)


def blame(
    trial: Trial, parallel: Parallel, devices: Sequence[Device], *, one: Outcome
) -> Iterator[Finding]:
    """Yield for each axis alone whether its gradients differ, so that a fault has a name."""
    split = [axis for axis in AXES if degree_of(parallel, axis) > 1]
    for axis in split if len(split) > 1 else ():
        others: Parallel = {key: n for key, n in parallel.items() if key not in split}
        alone = trial.run({**others, axis: parallel[axis]}, devices)
        wrong = differing_leaves(alone.grads, one.grads, limits=limits_of(trial.cfg))
        detail = f"differs: {wrong[0]}" if wrong else "equal to one device"
        yield Finding(f"{axis}={parallel[axis]} alone", not wrong, detail)


def differing_leaves(grads: Leaves, expected: Leaves, *, limits: Limits = EXACT) -> list[str]:
    """Return the paths of the gradients that are not the expected ones; NaN never is."""
    return [
        path
        for path, grad in grads.items()
        if not relative_error(grad, expected[path]) <= limits.gradient
    ]


def moved_share(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the least share of choices that went to another expert, by the numbers alone."""
    return float(np.abs(counts - expected).sum() / 2 / max(expected.sum(), 1))


# Collectives without which an axis splits nothing: one of each group must cross it.
SIGNS: Mapping[AxisName, tuple[tuple[str, ...], ...]] = {
    "pipeline": (("permute",),),
    "data": (("all_reduce", "reduce_scatter"),),
    "fsdp": (("all_reduce", "reduce_scatter"),),
    "expert": (("all_to_all", "ragged_all_to_all"),),
    "context": (("all_gather",), ("reduce_scatter",)),
    "tensor": (("all_reduce", "reduce_scatter"),),
}


def axis_is_real(
    axis: AxisName,
    found: Crossings,
    *,
    degree: int,
    zero_stage: int,
    matrix_sizes: set[int],
    lengths: Collection[int] = (),
) -> Finding:
    """Return whether a program has the collectives of an axis, and none that undoes it.

    Args:
        found: its collectives, with the axes that each crosses.
        matrix_sizes: elements of each matrix of a layer: tensor must not gather what it cut.
        lengths: of rows [rows tokens channels] that tensor may gather, of any width: weights that
            it does not cut multiply a part of the tokens on each device; nothing by default.
    """
    crossing = [c for c, axes in found if axis in axes]
    kinds = {c.kind for c in crossing}
    missing = [" or ".join(group) for group in SIGNS[axis] if not kinds & set(group)]
    if axis == "fsdp" and zero_stage >= 3 and "all_gather" not in kinds:
        missing.append("all_gather")
    undone: list[Collective] = []
    if axis == "tensor":
        undone = [c for c in crossing if c.kind == "all_gather" and elements(c) in matrix_sizes]
        undone = [c for c in undone if len(dims_of(c)) < 3 or dims_of(c)[-2] not in lengths]
    if axis in ("data", "expert"):
        # Neither tokens nor experts.
        undone = [c for c, axes in found if axes == (axis,) and c.kind == "all_gather"]
    said = f"{', '.join(sorted(kinds)) or 'nothing'} cross it"
    said += f"; missing: {', '.join(missing)}" if missing else ""
    said += f"; gathered again: {undone[0].shape}" if undone else ""
    return Finding(f"{axis}={degree} is real", not missing and not undone, said)


def token_lengths(cfg: RunConfig, plan: ParallelPlan) -> set[int]:
    """Return the lengths of rows whose tokens tensor gathers: of blocks, of a chunk of the loss.

    Nothing where the residual stream is not cut.
    """
    degree = plan.degree("context")
    row, chunk = cfg.train.seq_len // degree, cfg.train.loss_chunk
    return {row, chunk // degree, min(chunk, row)} if plan.rules.cuts_stream else set()


def stream_is_cut(trial: Trial, many: Outcome) -> Finding:
    """Return whether blocks gather their tokens over tensor, so that each device has a part."""
    width = trial.cfg.model.embed_dim
    whole = {(length, width) for length in token_lengths(trial.cfg, many.plan)}
    found = [
        c
        for c, axes in many.found
        if axes == ("tensor",) and c.kind == "all_gather" and dims_of(c)[-2:] in whole
    ]
    detail = f"tokens are gathered over tensor in {len(found)} places"
    return Finding("activations cut along the sequence", bool(found), detail)


def state_is_cut(many: Outcome, one: Outcome) -> Finding:
    """Return whether a device holds just the state that the plan says."""
    ledger = many.plan.ledger
    planned = ledger.of("parameters") + ledger.of("optimizer")
    detail = (
        f"{many.state_bytes:,} bytes on a device, {planned:,} planned, "
        f"{one.state_bytes:,} on one device"
    )
    return Finding("state of a device", many.state_bytes == planned, detail)


def matrix_sizes(table: ParamTable) -> set[int]:
    """Return the number of elements of each matrix, of one layer where they are stacked."""
    return {
        math.prod(s.shape[1:] if s.dims and s.dims[0] in LAYER_DIMS else s.shape)
        for s in table
        if s.is_matrix
    }


def elements(collective: Collective) -> int:
    """Return the number of elements of a collective's first result."""
    return math.prod(dims_of(collective))


def dims_of(collective: Collective) -> tuple[int, ...]:
    """Return the sizes of a collective's first result."""
    numbers = collective.shape.partition("[")[2].partition("]")[0]
    return tuple(int(n) for n in numbers.split(",") if n)


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return ‖a − b‖₂ / ‖b‖₂; for b of zeros 0 if a is zeros too, else infinity."""
    size = np.linalg.norm(np.asarray(b, np.float64))
    error = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return float(error / size)


def worst_of(errors: Mapping[str, float]) -> tuple[str, float]:
    """Return the entry with the largest error; NaN counts as the largest."""
    path = max(errors, key=lambda p: math.inf if math.isnan(errors[p]) else errors[p])
    return path, errors[path]
