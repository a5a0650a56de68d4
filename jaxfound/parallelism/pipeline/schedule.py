"""A pipeline schedule as data: what each rank does, in order.

A model's layers are cut into stages. A rank holds one chunk of layers, or several, and a chunk is a
stage of one direction. For every micro-batch each stage does F, its forward pass, and B, its
backward pass; B may be cut into I, the gradient of the stage's input, which the stage before waits
for, and W, the gradient of its weights, which nobody waits for (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A schedule that cannot be built or cannot run: which numbers, which rule, the way out."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    op: Op
    microbatch: int
    stage: int


# What a rank does in one go: one action, or a forward pass of one micro-batch beside a backward
# pass (B or I) of another.
type Step = tuple[Action, ...]


def results(step: Step) -> list[Action]:
    """Return what a step leaves: a stage's output as its F, its input's gradient as its B."""
    return [a if a.op == "F" else a._replace(op="B") for a in step if a.op != "W"]


class Place(NamedTuple):
    """Where a stage of a direction lives."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order; when follows from what waits for what.

    Attributes:
        name: its key in `SCHEDULES`.
        num_ranks: devices along the `pipeline` axis.
        num_chunks: chunks of layers that a rank holds.
        num_microbatches: micro-batches of a step.
        places: where each stage lives, for each direction: [direction][stage].
        directions: the direction in which each micro-batch goes.
        orders: the steps of each rank, in order.
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    places: tuple[tuple[Place, ...], ...]
    directions: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages that every micro-batch passes."""
        return len(self.places[0])

    @property
    def num_copies(self) -> int:
        """Copies of each stage's parameters: one for each direction."""
        return len(self.places)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes are cut into I and W."""
        return any(a.op == "W" for order in self.orders for step in order for a in step)

    def place(self, microbatch: int, stage: int) -> Place:
        """Return where a micro-batch meets a stage."""
        return self.places[self.directions[microbatch]][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stage that each chunk of a rank is."""
        found = {
            place.chunk: stage
            for stages in self.places
            for stage, place in enumerate(stages)
            if place.rank == rank
        }
        return tuple(found[chunk] for chunk in range(self.num_chunks))

    def waits_for(self, step: Step) -> list[Action]:
        """Return the results that must be there before a step starts.

        A backward pass beside the forward pass of the same micro-batch, as the last stage may run
        them, follows it within the step and does not wait for it.
        """
        needed: list[Action] = []
        for op, microbatch, stage in step:
            if op == "F" and stage > 0:
                needed.append(Action("F", microbatch, stage - 1))
            if op in ("B", "I"):
                needed.append(Action("F", microbatch, stage))
                if stage + 1 < self.num_stages:
                    needed.append(Action("B", microbatch, stage + 1))
            if op == "W":
                needed.append(Action("B", microbatch, stage))
        made = results(step)
        return [result for result in needed if result not in made]
