"""What to change when a plan does not fit: the changes of the config that would make it fit."""

from collections.abc import Mapping, Sequence

from jaxfound.config.parallel import AXES, AxisName, ScheduleName, ZeroStage
from jaxfound.config.params import ParamTable
from jaxfound.config.run import RunConfig, divisors
from jaxfound.parallelism.legal import STAGED_ZERO, PlanError, layout_of
from jaxfound.parallelism.memory import Ledger, Slots, ledger_of
from jaxfound.resources.topology import Topology

# The schedule whose ranks hold least: one copy of each stage, as few inputs as there are ranks.
LEAST_SCHEDULE: ScheduleName = "1f1b"
# Keys of `parallel` and their new values.
type Change = Mapping[str, int | str]


def remedies(
    cfg: RunConfig,
    degrees: Mapping[AxisName, int],
    params: ParamTable,
    *,
    slots: Slots,
    ledger: Ledger,
    topology: Topology,
) -> str:
    """Return a sentence with the changes that make `ledger` fit: one key's, else all together.

    Args:
        cfg: what was asked.
        degrees: of every axis.
        params: the model's parameters.
        slots: what the update rule keeps.
        ledger: that does not fit.
        topology: what it does not fit.
    """

    def after(change: Change) -> Ledger | None:
        try:
            return changed_ledger(
                cfg, degrees, params, change=change, slots=slots, topology=topology
            )
        except PlanError:
            return None

    singles = changes(cfg, degrees)
    fitting = [c for c in singles if (found := after(c)) is not None and found.fits]
    if fitting:
        return f"way out: {'; or '.join(change_text(c) for c in fitting)}"
    together = {key: value for change in singles for key, value in change.items()}
    least = after(together) if together else None
    if least is not None and least.fits:
        return f"way out: {change_text(together)}"
    if least is None or least.total_bytes >= ledger.total_bytes:
        return "way out: more devices, or a smaller model; no key of parallel makes this one fit"
    return (
        f"way out: more devices, or a smaller model; even with {change_text(together)} it is "
        f"{-least.spare_bytes / 1e9:,.1f} GB too much"
    )


def changes(cfg: RunConfig, degrees: Mapping[AxisName, int]) -> Sequence[Change]:
    """Return the changes that lower memory, each of one decision, the cheapest in time first."""
    parallel, found = cfg.parallel, []
    rows = cfg.train.batch_size // (degrees["data"] * degrees["fsdp"] * degrees["expert"])
    pieces = [n for n in divisors(max(rows, 1)) if n > parallel.num_microbatches]
    if pieces:
        found.append({"num_microbatches": pieces[-1]})
    staged = degrees["pipeline"] > 1
    most: ZeroStage = STAGED_ZERO if staged else 3
    # With stages 1 and 2 are the same: their gradients are whole.
    if parallel.zero_stage < (1 if staged else most) and degrees["fsdp"] > 1:
        found.append({"zero_stage": most})
    if degrees["data"] > 1:
        shared = degrees["fsdp"] * degrees["data"]
        found.append({"fsdp": shared, "data": 1, "zero_stage": most})
    if staged and parallel.schedule != LEAST_SCHEDULE:
        found.append({"schedule": LEAST_SCHEDULE})
    if degrees["tensor"] > 1 and parallel.activations == "replicated":
        found.append({"activations": "sequence"})
    if parallel.remat != "full":
        found.append({"remat": "full"})
    return found


def change_text(change: Change) -> str:
    """Return a change as overrides of the command line."""
    return " ".join(f"parallel.{key}={value}" for key, value in change.items())


def changed_ledger(
    cfg: RunConfig,
    degrees: Mapping[AxisName, int],
    params: ParamTable,
    *,
    change: Change,
    slots: Slots,
    topology: Topology,
) -> Ledger:
    """Return the ledger after a change.

    Raises:
        PlanError: if the changed layout is not legal.
    """
    new: dict[AxisName, int] = {axis: int(change.get(axis, degrees[axis])) for axis in AXES}
    parallel = cfg.parallel.model_copy(update={**new, **change})
    layout, _ = layout_of(cfg.model_copy(update={"parallel": parallel}), new, params)
    return ledger_of(layout, slots=slots, topology=topology)
