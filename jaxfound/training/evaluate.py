"""Held-out loss: the next token only, every token weighing the same."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models.build import Frame
from jaxfound.parallelism.mesh import jit_on_mesh
from jaxfound.training.batches import arranged_for_context, to_devices
from jaxfound.training.loss import cross_entropy
from jaxfound.training.pipelined import pipelined_nats
from jaxfound.training.state import TrainState
from jaxfound.training.step import batch_sharding


class EvalSums(NamedTuple):
    """Sums of one held-out batch: nats over counted targets, and how many there are."""

    nats: jax.Array
    num_targets: jax.Array


class EvalResult(NamedTuple):
    """A held-out loss in nats a token over `num_targets` tokens."""

    loss: float
    num_targets: int


type Evaluate = Callable[[TrainState, Iterable[Batch]], EvalResult]


def make_evaluate(cfg: RunConfig, frame: Frame, *, mesh: Mesh) -> Evaluate:
    """Return the evaluation of a state over held-out batches; one program for all of them."""

    def sums(params: dict, buffers: dict, batch: Batch) -> EvalSums:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            pipelining, counted = frame.execution.pipelining, batch.loss_mask.sum()
            if pipelining is not None:
                nats = pipelined_nats(
                    params, buffers, batch, frame=frame, cfg=cfg, pipelining=pipelining
                )
                return EvalSums(nats, counted)
            model = frame.bind(params, buffers)
            batch, places = arranged_for_context(batch)
            row = model.row(batch.tokens, batch.positions, batch.segment_ids, places=places)
            found = cross_entropy(
                model.hidden(batch.tokens, row).final,
                model.head.matrix(model.embedding),
                targets=batch.targets,
                counted=batch.loss_mask,
                head=model.head,
                chunk=cfg.train.loss_chunk,
            )
            return EvalSums(found.nats, counted)

    placed, run = batch_sharding(frame, mesh), jit_on_mesh(sums, mesh)

    def evaluate(state: TrainState, batches: Iterable[Batch]) -> EvalResult:
        nats, num_targets = 0.0, 0
        for batch in batches:
            there = to_devices(batch, placed, batch_size=cfg.train.batch_size)
            found = run(state.params, state.buffers, there)
            nats, num_targets = nats + float(found.nats), num_targets + int(found.num_targets)
        return EvalResult(nats / num_targets if num_targets else float("nan"), num_targets)

    return evaluate
