"""Which pipeline a run has: small enough to be compared, and all else follows from it."""

from dataclasses import dataclass
from functools import cache

from jaxfound.parallelism.pipeline.builders import make_schedule
from jaxfound.parallelism.pipeline.forward import ForwardTable, forward_table
from jaxfound.parallelism.pipeline.schedule import Schedule
from jaxfound.parallelism.pipeline.stages import StageLayers, stage_layers
from jaxfound.parallelism.pipeline.ticks import TickTable, tick_table


@dataclass(frozen=True)
class Pipelining:
    """A pipeline of a run.

    Attributes:
        schedule: a key of `SCHEDULES`.
        num_ranks: devices along the `pipeline` axis.
        num_microbatches: micro-batches of a step.
        num_chunks: chunks of layers on a rank.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    @classmethod
    def of(cls, schedule: Schedule) -> "Pipelining":
        """Return what names a schedule."""
        return cls(
            schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks
        )


@cache
def schedule_of(pipelining: Pipelining) -> Schedule:
    """Return the schedule; the same one every time."""
    return make_schedule(
        pipelining.schedule,
        num_ranks=pipelining.num_ranks,
        num_microbatches=pipelining.num_microbatches,
        num_chunks=pipelining.num_chunks,
    )


@cache
def table_of(pipelining: Pipelining) -> TickTable:
    """Return the table of the schedule's ticks; the same one every time."""
    return tick_table(schedule_of(pipelining))


@cache
def forward_table_of(pipelining: Pipelining) -> ForwardTable:
    """Return the table of the forward passes alone; the same one every time."""
    return forward_table(schedule_of(pipelining))


@cache
def layers_of(pipelining: Pipelining, num_layers: int) -> StageLayers:
    """Return which of the main stack's layers each chunk holds; the same object every time."""
    return stage_layers(num_layers, schedule_of(pipelining))
