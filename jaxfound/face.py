"""What a notebook user calls: the rooms' functions, composed so that one argument is enough."""

from pathlib import Path

from jaxfound.config.load import load
from jaxfound.config.run import RunConfig
from jaxfound.models import Decoder, describe, execution_of
from jaxfound.models import build as build_model
from jaxfound.parallelism import ParallelPlan, build_mesh
from jaxfound.parallelism import make_plan as plan_for
from jaxfound.resources.topology import Topology
from jaxfound.serving import Engine, Generator, load_generator
from jaxfound.training import train
from jaxfound.training.optimizer import optimizer_slots


def make_plan(cfg: RunConfig, topology: Topology | None = None) -> ParallelPlan:
    """Return the layout of `cfg` on a topology, this machine's by default, or refuse it.

    Args:
        cfg: what was asked.
        topology: what there is, e.g. `Topology.parse("3x8:h200:ib400")`.

    Raises:
        PlanError: a degree, the batch or a dimension does not divide.
    """
    table = describe(cfg.model)
    return plan_for(
        cfg,
        topology or Topology.discover(),
        params=table,
        optimizer_slots=optimizer_slots(cfg.optimizer, table),
    )


def build(cfg: RunConfig, plan: ParallelPlan | None = None) -> Decoder:
    """Return the model of `cfg` with fresh weights, each array born where the plan keeps it."""
    plan = plan or make_plan(cfg)
    return build_model(
        cfg.model,
        execution=execution_of(plan, cfg.precision),
        seed=cfg.seed,
        mesh=build_mesh(plan),
    )


def generator(run: Path | str) -> Generator:
    """Return a generator of the newest weights in a run's directory."""
    return load_generator(Path(run))


__all__ = [
    "Engine",
    "RunConfig",
    "Topology",
    "build",
    "generator",
    "load",
    "make_plan",
    "train",
]
