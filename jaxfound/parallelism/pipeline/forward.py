"""Forward passes alone, as evaluation runs a pipeline: the same stages, nothing kept for later."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfound.parallelism.pipeline.chunk import walk_forward
from jaxfound.parallelism.pipeline.runtime import Inputs, Stages, entering, handed_on
from jaxfound.parallelism.pipeline.schedule import Action, Schedule
from jaxfound.parallelism.pipeline.slots import Wait, assign_slots
from jaxfound.parallelism.pipeline.ticks import place_ticks
from jaxfound.parallelism.pipeline.trees import added, pick, put, zeros

COLUMNS = ("runs", "microbatch", "chunk", "first", "last", "slot")


@dataclass(frozen=True, eq=False)
class ForwardTable:
    """What every rank does in every tick of a pass without gradients.

    Attributes:
        num_ranks: devices along the axis.
        columns: int32 [ticks ranks]. `runs` is 1 where a rank runs a stage: `chunk` of
            `microbatch`, whose input waits in `slot`; `first` and `last` mark the end stages.
        hops: how far outputs travel, rank to rank; 0 stays.
        num_slots: for inputs that wait; the slot of this number takes what nobody reads.
    """

    num_ranks: int
    columns: Mapping[str, np.ndarray]
    hops: tuple[int, ...]
    num_slots: int


def forward_schedule(schedule: Schedule) -> Schedule:
    """Return the forward passes of a schedule's first direction, each as early as it can be."""
    places = schedule.places[0]
    orders = []
    for rank in range(schedule.num_ranks):
        stages = [stage for stage, place in enumerate(places) if place.rank == rank]
        runs = [(m, stage) for m in range(schedule.num_microbatches) for stage in stages]
        # A micro-batch reaches a stage after as many ticks as there are stages before it; of two
        # that could run, the one that is further on goes first.
        runs.sort(key=lambda run: (sum(run), -run[1]))
        orders.append(tuple((Action("F", m, stage),) for m, stage in runs))
    return replace(
        schedule,
        name=f"{schedule.name}, forward",
        places=(places,),
        directions=(0,) * schedule.num_microbatches,
        orders=tuple(orders),
    )


def forward_table(schedule: Schedule) -> ForwardTable:
    """Return what every rank does in every tick when the stages of a schedule only run forward."""
    schedule = forward_schedule(schedule)
    grid = place_ticks(schedule)
    ticks = {action: tick for tick, row in enumerate(grid) for step in row for action in step}
    slots = assign_slots(
        Wait((m, stage), schedule.place(m, stage).rank, ticks[Action("F", m, stage - 1)], tick)
        for (_, m, stage), tick in ticks.items()
        if stage > 0
    )
    shape, last = (len(grid), schedule.num_ranks), schedule.num_stages - 1
    columns = {name: np.zeros(shape, np.int32) for name in COLUMNS}
    columns["slot"][:] = slots.count
    arrives: dict[int, np.ndarray] = {}
    for (_, m, stage), tick in ticks.items():
        rank, chunk = schedule.place(m, stage)
        entry = (1, m, chunk, int(stage == 0), int(stage == last), slots.slot((m, stage)))
        for name, number in zip(COLUMNS, entry, strict=True):
            columns[name][tick, rank] = number
        if stage < last:
            receiver = schedule.place(m, stage + 1).rank
            hop = (receiver - rank) % schedule.num_ranks
            arrives.setdefault(hop, np.full(shape, slots.count, np.int32))
            arrives[hop][tick, receiver] = slots.slot((m, stage + 1))
    hops = tuple(sorted(arrives))
    columns |= {f"arrives_{hop}": arrives[hop] for hop in hops}
    return ForwardTable(schedule.num_ranks, columns, hops, slots.count)


def run_forward(table: ForwardTable, stages: Stages, inputs: Inputs, *, rows: Any) -> Any:
    """Return what the suffix reports, summed over this rank's micro-batches.

    Call it inside a shard_map that is manual over `pipeline`.

    Args:
        table: what each rank does in each tick.
        stages: what is computed.
        inputs: what this rank has.
        rows: this rank's columns of the table.
    """
    piece = pick(inputs.pieces, 0)
    like = jax.eval_shape(stages.prefix, inputs.shared, piece)
    nothing = jnp.zeros(like.shape, like.dtype)
    end = zeros(jax.eval_shape(stages.suffix, inputs.shared, like, piece)[1])

    def run(row: Any, waiting: jax.Array, end: Any) -> tuple[jax.Array, Any]:
        piece = pick(inputs.pieces, row["microbatch"])
        x = entering(stages, inputs.shared, piece, waiting, row["first"], row["slot"])
        y = walk_forward(stages.layers, inputs.chunk(row["chunk"]), x, piece)
        end = lax.cond(
            row["last"] > 0,
            lambda: added(end, stages.suffix(inputs.shared, y, piece)[1]),
            lambda: end,
        )
        return stages.pin(y), end

    def tick(carry: tuple[jax.Array, Any], row: Any) -> tuple[tuple[jax.Array, Any], None]:
        waiting, end = carry
        y, end = lax.cond(
            row["runs"] > 0, run, lambda *_: (stages.pin(nothing), end), row, waiting, end
        )
        for hop in table.hops:
            waiting = put(waiting, handed_on(y, hop, table.num_ranks), row[f"arrives_{hop}"])
        return (waiting, end), None

    waiting = jnp.zeros((table.num_slots + 1, *like.shape), like.dtype)
    (_, end), _ = lax.scan(tick, (waiting, end), rows)
    return end
