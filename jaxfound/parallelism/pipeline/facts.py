"""What a plan counts of a pipeline: layers, ticks, slots and waiting, worked out once for each."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxfound.parallelism.pipeline.pipelining import (
    Pipelining,
    layers_of,
    schedule_of,
    table_of,
)
from jaxfound.parallelism.pipeline.schedule import Schedule
from jaxfound.parallelism.pipeline.simulate import Costs, simulate
from jaxfound.parallelism.pipeline.stages import StageLayers
from jaxfound.parallelism.pipeline.ticks import lockstep, place_ticks

# What schedules are published with: F, I and W take as long as each other.
PUBLISHED = Costs()
# A stage keeps its input alone, so that B runs its forward pass again.
RECOMPUTED = Costs(forward=1, input_grad=2, weight_grad=1)
# Forward passes' worth of work in each pass of a stage, and of what its backward pass alone runs.
AGAIN = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
RUN_ONCE = {"F": 0.0, "B": 3.0, "I": 2.0, "W": 1.0}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A schedule for the layers of a model, and what follows from it.

    Attributes:
        schedule: what each rank does, in order.
        stages: which layers each chunk holds.
        work: forward passes' worth of what each rank does in each tick, [ticks ranks 3]: of its
            layers, of what the first stage has besides and of what the last has.
        num_input_slots: stage inputs that a rank holds at one time, at most.
        num_grad_slots: gradients of stage outputs that it holds.
        num_kept_slots: micro-batches of which it holds what W needs.
        num_sends: arrays that it hands to other ranks in each tick.
        peaks: most micro-batches that each rank has in flight.
        bubble: the part of all ranks' time that is waiting when a rank runs as soon as it can, at
            the published costs, 0 to 1.
        efficiency: the part that is work when ranks step together, recomputation being work.
    """

    schedule: Schedule
    stages: StageLayers
    work: np.ndarray
    num_input_slots: int
    num_grad_slots: int
    num_kept_slots: int
    num_sends: int
    peaks: tuple[int, ...]
    bubble: float
    efficiency: float

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return self.work.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers of the stack that is cut."""
        return max(self.stages.places) + 1

    @property
    def layers_held(self) -> int:
        """Places for layers on a rank: of all its chunks, masked ones too."""
        return self.stages.layers_a_chunk * self.schedule.num_chunks

    @property
    def layers_run(self) -> int:
        """Places that a rank runs for one micro-batch, which meets one copy of each stage."""
        return self.layers_held // self.schedule.num_copies

    @property
    def num_places(self) -> int:
        """Places of all ranks: the length of a stored stack."""
        return len(self.stages.places)

    def as_data(self) -> dict[str, object]:
        """Return the numbers as plain data for JSON."""
        return {
            "ranks": self.schedule.num_ranks,
            "stages": self.schedule.num_stages,
            "chunks": self.schedule.num_chunks,
            "copies": self.schedule.num_copies,
            "layers_a_chunk": self.stages.layers_a_chunk,
            "masked_places": self.stages.num_masked,
            "ticks": self.num_ticks,
            "bubble": self.bubble,
            "lockstep_efficiency": self.efficiency,
            "in_flight": list(self.peaks),
            "input_slots": self.num_input_slots,
            "grad_slots": self.num_grad_slots,
            "kept_slots": self.num_kept_slots,
        }


@cache
def pipeline_of(pipelining: Pipelining, *, num_layers: int) -> Pipeline:
    """Return a pipeline with what a plan counts of it.

    Args:
        pipelining: which schedule, for how many ranks, micro-batches and chunks.
        num_layers: layers of the stack that is cut.

    Raises:
        ScheduleError: if the schedule cannot take these numbers.
    """
    schedule, table = schedule_of(pipelining), table_of(pipelining)
    run = simulate(schedule, PUBLISHED)
    return Pipeline(
        schedule=schedule,
        stages=layers_of(pipelining, num_layers),
        work=work_of(schedule),
        num_input_slots=table.num_input_slots,
        num_grad_slots=table.num_grad_slots,
        num_kept_slots=table.num_kept_slots,
        num_sends=sum(send.hop != 0 for send in table.sends),
        peaks=run.peaks,
        bubble=run.bubble_share,
        efficiency=lockstep(schedule, RECOMPUTED).efficiency,
    )


def work_of(schedule: Schedule) -> np.ndarray:
    """Return forward passes' worth of what each rank does in each tick, [ticks ranks 3].

    Of its layers, of what the first stage has besides, run again by its B as layers are, and of
    what the last has besides, run by its B alone, as is all of the last stage's F.
    """
    grid, end = place_ticks(schedule), schedule.num_stages - 1
    work = np.zeros((len(grid), schedule.num_ranks, 3))
    for tick, row in enumerate(grid):
        for rank, step in enumerate(row):
            for op, _, stage in step:
                layers = 0.0 if op == "F" and stage == end else AGAIN[op]
                last = RUN_ONCE[op] if stage == end else 0.0
                work[tick, rank] += layers, layers * (stage == 0), last
    return work


def lockstep_work(pipeline: Pipeline, *, layer: float, first: float, last: float) -> float:
    """Return the work of the busiest rank, added up over ticks: what a rank waits for or does.

    Every place of a chunk counts, masked or not.

    Args:
        pipeline: what runs.
        layer: a forward pass through one layer.
        first: one through what the first stage has besides its layers.
        last: one through what the last stage has besides its layers.
    """
    chunk = pipeline.stages.layers_a_chunk * layer
    return float((pipeline.work @ (chunk, first, last)).max(axis=1).sum())
