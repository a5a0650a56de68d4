"""Layers that leave fp8 in the middle of a run, because it made a step not finite.

The cause is found by trial: on the batch of the bad step layers are put into fp8 one after another,
and the one with which the step stops being finite is left out. A step that is not finite without
fp8 has another cause, and nothing is demoted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.config.layer_formats import (
    MOST_SEGMENTS,
    StackOfLayers,
    numbers_text,
    segments_alike,
    stacks_of,
)
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.parallelism.mesh import jit_on_mesh
from jaxfound.training.batches import to_devices
from jaxfound.training.loop import Demote, Parts
from jaxfound.training.objective import objective_of, terms_of, token_counts
from jaxfound.training.rule_list import runs_of
from jaxfound.training.state import TrainState
from jaxfound.training.step import batch_sharding
from jaxfound.training.tried_kernels import Chosen, replaced

log = logging.getLogger(__name__)

# Number of a layer in the model.
type Layer = int
# Whether each layer's product is in fp8, by path of the operation [layers of the stack].
type Choice = dict[str, jax.Array]
# Whether the step of a batch is finite with only these layers in fp8.
type IsFinite = Callable[[frozenset[Layer]], bool]


class Cause(NamedTuple):
    """What made a step not finite.

    Attributes:
        layers: whose fp8 did, in order; none where the step is finite now.
        is_fp8: False where the step is not finite without any fp8.
    """

    layers: tuple[Layer, ...]
    is_fp8: bool


def make_demote(
    frame: Frame,
    parts: Parts,
    *,
    cfg: RunConfig,
    mesh: Mesh,
    rebuilt: Callable[[Sequence[str]], Parts],
) -> Demote | None:
    """Return what the loop asks after a step that was not finite.

    Args:
        frame: the model as it is trained.
        parts: what the loop drives now.
        cfg: the run, with the rules that hold now.
        mesh: what it runs on.
        rebuilt: the parts of a run in which these patterns have left fp8.

    Returns:
        None where train.non_finite does not ask for it, or no layer is in fp8.
    """
    stacks = stacks_of(describe(frame.cfg))
    in_fp8 = layers_in_fp8(cfg.precision, stacks)
    if cfg.train.non_finite != "demote" or not in_fp8:
        return None

    def demote(state: TrainState, step: int) -> Parts | None:
        rows, size = batch_sharding(frame, mesh), cfg.train.batch_size
        batch = to_devices(parts.host_batch(step - 1), rows, batch_size=size)
        arrays = Arrays(state.params, state.buffers)
        cause = cause_of(in_fp8, make_is_finite(frame, arrays, batch, cfg=cfg, mesh=mesh))
        if not cause.is_fp8:
            return None
        if not cause.layers:
            return parts
        patterns = demoted_patterns(cfg.precision, cause.layers, stacks)
        log.warning(
            "precision.demoted",
            extra={"step": step, "layers": list(cause.layers), "patterns": list(patterns)},
        )
        return rebuilt(patterns)

    return demote


def cause_of(in_fp8: Sequence[Layer], is_finite: IsFinite) -> Cause:
    """Return the layers whose fp8 makes a step not finite.

    Args:
        in_fp8: layers that have an operation in fp8, in order.
        is_finite: of the bad step.
    """
    if is_finite(frozenset(in_fp8)):
        return Cause((), is_fp8=True)
    if not is_finite(frozenset()):
        return Cause((), is_fp8=False)
    sound, guilty = list[Layer](), list[Layer]()
    for n in in_fp8:
        (sound if is_finite(frozenset([*sound, n])) else guilty).append(n)
    return Cause(tuple(guilty), is_fp8=True)


def layers_in_fp8(precision: PrecisionConfig, stacks: Sequence[StackOfLayers]) -> list[Layer]:
    """Return the layers that have an operation in fp8, in order."""
    return [
        n
        for stack in stacks
        for n in stack.layers
        if any(precision.format_of(path, n) == "fp8" for path in stack.operations)
    ]


def make_is_finite(
    frame: Frame, arrays: Arrays, batch: Batch, *, cfg: RunConfig, mesh: Mesh
) -> IsFinite:
    """Return the test of one step, compiled once: which layers are in fp8 is an argument of it.

    Dropout is left out. Norms of the gradients of micro-batches are added up, not gradients, so
    that it holds no more than a step does.

    Args:
        frame: the model as it is trained.
        arrays: its weights now.
        batch: of the bad step, on the devices.
        cfg: the run.
        mesh: what it runs on.
    """
    precision = frame.execution.precision
    plain = Frame(frame.cfg, execution=replace(frame.execution, precision=without_fp8(precision)))
    operations = [(path, s.layers) for s in stacks_of(describe(frame.cfg)) for path in s.operations]
    paths, everywhere = [path for path, _ in operations], NamedSharding(mesh, PartitionSpec())

    def loss(params: dict, buffers: dict, choice: Choice, batch: Batch, whole: Batch) -> jax.Array:
        counts = token_counts(whole, num_depths=cfg.model.mtp_depth)
        kernels = replaced(params, paths, lambda path, k: Chosen(k, choice[path]))
        terms = terms_of(plain.bind(kernels, buffers), batch, cfg=cfg)
        return objective_of(terms, counts, cfg=cfg)

    def test(params: dict, buffers: dict, choice: Choice, batch: Batch) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            pieces = cfg.parallel.num_microbatches
            cut = jax.tree.map(
                lambda a: jnp.moveaxis(a.reshape(-1, pieces, *a.shape[1:]), 1, 0), batch
            )

            def one(piece: Batch) -> jax.Array:
                value, grads = jax.value_and_grad(loss)(params, buffers, choice, piece, batch)
                return value + sum(jnp.square(g).sum() for g in grads.values())

            return jnp.isfinite(jax.lax.map(one, cut)).all()

    compiled = jit_on_mesh(test, mesh, out_shardings=everywhere)

    def is_finite(layers: frozenset[Layer]) -> bool:
        choice = {
            path: np.array([n in layers and precision.format_of(path, n) == "fp8" for n in own])
            for path, own in operations
        }
        placed = jax.device_put(choice, everywhere)
        return bool(compiled(arrays.params, arrays.buffers, placed, batch))

    return is_finite


def without_fp8(precision: PrecisionConfig) -> PrecisionConfig:
    """Return the same rules with the compute format in place of fp8."""
    rules = tuple(
        rule.model_copy(update={"format": precision.compute}) if rule.format == "fp8" else rule
        for rule in precision.rules
    )
    return precision.model_copy(update={"rules": rules})


def demoted_patterns(
    precision: PrecisionConfig, layers: Sequence[Layer], stacks: Sequence[StackOfLayers]
) -> tuple[str, ...]:
    """Return patterns that take these layers out of fp8 and leave few enough segments.

    Where the layers alone would leave too many, all from the first to the last of them leave fp8,
    and where that does too, the whole stack does.
    """
    found = list[str]()
    for stack in stacks:
        own = [n for n in layers if n in stack.layers]
        if not own:
            continue
        for wider in (own, range(own[0], own[-1] + 1), stack.layers):
            patterns = patterns_of(precision, wider, stack)
            changed = with_demoted(precision, patterns)
            if len(segments_alike(changed, stack.operations, stack.layers)) <= MOST_SEGMENTS:
                found += patterns
                break
    return tuple(found)


def patterns_of(
    precision: PrecisionConfig, layers: Sequence[Layer], stack: StackOfLayers
) -> list[str]:
    """Return patterns of the operations of some layers of a stack that are in fp8, no others."""
    in_fp8 = {
        path: [n for n in layers if precision.format_of(path, n) == "fp8"]
        for path in stack.operations
    }
    first, *others = in_fp8.values()
    if all(found == first for found in others):
        return [f"{stack.name}.{numbers_text(run)}.*" for run in runs_of(first)]
    return [
        f"{stack.name}.{numbers_text(run)}.{path.partition('.')[2]}"
        for path, found in in_fp8.items()
        for run in runs_of(found)
    ]


def with_demoted(precision: PrecisionConfig, patterns: Sequence[str]) -> PrecisionConfig:
    """Return rules that have these patterns in the compute format, before all others."""
    first = tuple(PrecisionRule(pattern=p, format=precision.compute) for p in patterns)
    others = tuple(rule for rule in precision.rules if rule not in first)
    return precision.model_copy(update={"rules": (*first, *others)})
