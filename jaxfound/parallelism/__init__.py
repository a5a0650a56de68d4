"""Parallel layer: which mesh axis splits which dimension, checked before anything compiles."""

from jaxfound.parallelism.axes import ShardingRules
from jaxfound.parallelism.legal import PlanError
from jaxfound.parallelism.mesh import build_mesh
from jaxfound.parallelism.plan import ParallelPlan, make_plan

__all__ = ["ParallelPlan", "PlanError", "ShardingRules", "build_mesh", "make_plan"]
