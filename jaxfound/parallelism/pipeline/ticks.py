"""A schedule in lockstep: every rank runs one step a tick, and results arrive one tick later.

This is how one program that scans over ticks runs it. `tick_table` spells out, for each tick and
rank, what to run, where its inputs wait, and where what arrives is to be kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxfound.parallelism.pipeline.schedule import Action, Schedule, ScheduleError, Step, results
from jaxfound.parallelism.pipeline.simulate import (
    Costs,
    Number,
    Simulation,
    TimedStep,
    deadlock,
    summarize,
)
from jaxfound.parallelism.pipeline.slots import Slots, Wait, assign_slots

type Payload = Literal["forward", "backward"]
# The steps of each rank in each tick, [tick][rank]; a rank that waits has the empty step.
type Grid = tuple[tuple[Step, ...], ...]

KINDS = ("idle", "F", "B", "I", "W", "F+B", "F+I")


@dataclass(frozen=True, eq=False)
class Send:
    """Messages of one kind, to the rank `hop` further on.

    Attributes:
        payload: `forward` for outputs of stages, `backward` for gradients of their inputs.
        hop: the receiver is (rank + hop) % num_ranks; 0 stays.
        slots: where the receiver keeps what arrives at the end of a tick, int32 [ticks ranks]; the
            trash slot when nothing does.
    """

    payload: Payload
    hop: int
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class TickTable:
    """What every rank does in every tick.

    The last stage's forward pass is not in the table: its B or I runs it. The slot whose number is
    the number of slots is the trash slot.

    Attributes:
        schedule: what it was made from.
        kinds: the words for `columns["kind"]`: `idle`, then those of `KINDS` that occur.
        columns: int32 [ticks ranks]. `kind`; of a step's F `f_microbatch f_chunk f_first f_slot`;
            of its B, I or W `b_microbatch b_chunk b_first b_last b_slot b_grad_slot b_kept_slot`.
            `first` and `last` are 1 at the first and the last stage; `slot` is where the stage's
            input waits, `grad_slot` the gradient of its output, `kept_slot` what I leaves for W.
            What a step does not use is 0, or the trash slot.
        sends: what travels at the end of each tick.
        num_input_slots: for stage inputs, from their arrival until B or I; stage 0 needs none.
        num_grad_slots: for gradients of stage outputs, until B or I; the last stage needs none.
        num_kept_slots: for what waits from I until W.
    """

    schedule: Schedule
    kinds: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    sends: tuple[Send, ...]
    num_input_slots: int
    num_grad_slots: int
    num_kept_slots: int

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return self.columns["kind"].shape[0]

    @property
    def num_ranks(self) -> int:
        """Devices along the `pipeline` axis."""
        return self.columns["kind"].shape[1]


def place_ticks(schedule: Schedule) -> Grid:
    """Return the steps of each tick: each as early as its order and what it waits for allow.

    Raises:
        ScheduleError: if the ranks end up waiting for each other.
    """
    finished: dict[Action, Number] = {}
    waits = [[schedule.waits_for(step) for step in order] for order in schedule.orders]
    positions = [0] * schedule.num_ranks
    grid: list[tuple[Step, ...]] = []
    while any(at < len(order) for at, order in zip(positions, schedule.orders, strict=True)):
        row: list[Step] = []
        for rank, order in enumerate(schedule.orders):
            at = positions[rank]
            runs = at < len(order) and all(needed in finished for needed in waits[rank][at])
            row.append(order[at] if runs else ())
        if not any(row):
            raise ScheduleError(deadlock(schedule, positions, finished))
        for rank, step in enumerate(row):
            positions[rank] += bool(step)
            finished.update((result, len(grid)) for result in results(step))
        grid.append(tuple(row))
    return tuple(grid)


def lockstep(schedule: Schedule, costs: Costs) -> Simulation:
    """Return a schedule as it runs in lockstep: the slowest rank of a tick sets its length.

    The last stage's forward passes count as the schedule has them, as in `simulate`.
    """
    timed: list[list[TimedStep]] = [[] for _ in schedule.orders]
    now: Number = 0
    for row in place_ticks(schedule):
        for rank, step in enumerate(row):
            if step:
                timed[rank].append(TimedStep(step, now, now + costs.duration(step)))
        now += max(costs.duration(step) for step in row)
    return summarize(schedule, timed, makespan=now)


def tick_table(schedule: Schedule) -> TickTable:
    """Return what every rank does in every tick, with the slots that values wait in.

    Raises:
        ScheduleError: if the ranks end up waiting for each other.
    """
    last = schedule.num_stages - 1
    grid = tuple(
        tuple(tuple(a for a in step if a.op != "F" or a.stage < last) for step in row)
        for row in place_ticks(schedule)
    )
    ticks = {action: tick for tick, row in enumerate(grid) for step in row for action in step}
    writer = _Writer(schedule, grid, ticks)
    for tick, row in enumerate(grid):
        for rank, step in enumerate(row):
            writer.write(tick, rank, step)
    return TickTable(
        schedule=schedule,
        kinds=writer.kinds,
        columns=writer.columns,
        sends=tuple(
            Send(payload, hop, slots) for (payload, hop), slots in sorted(writer.sends.items())
        ),
        num_input_slots=writer.inputs.count,
        num_grad_slots=writer.grads.count,
        num_kept_slots=writer.kept.count,
    )


class _Writer:
    """Fills the columns of a table.

    Args:
        schedule: what it is made from.
        grid: the steps that are run.
        ticks: the tick of each action in it.
    """

    def __init__(self, schedule: Schedule, grid: Grid, ticks: dict[Action, int]) -> None:
        self.schedule = schedule
        self.shape = (len(grid), schedule.num_ranks)
        self.inputs, self.grads, self.kept = _buffers(schedule, ticks)
        found = {_kind(step) for row in grid for step in row}
        self.kinds = ("idle", *(kind for kind in KINDS[1:] if kind in found))
        trash = {
            "f_slot": self.inputs.count,
            "b_slot": self.inputs.count,
            "b_grad_slot": self.grads.count,
            "b_kept_slot": self.kept.count,
        }
        numbers = ("microbatch", "chunk", "first")
        names = ["kind", *(f"f_{n}" for n in numbers), *(f"b_{n}" for n in (*numbers, "last"))]
        self.columns = {name: self._full(trash.get(name, 0)) for name in (*names, *trash)}
        self.sends: dict[tuple[Payload, int], np.ndarray] = {}

    def write(self, tick: int, rank: int, step: Step) -> None:
        """Write what a rank does in a tick, and where its results go."""
        self.columns["kind"][tick, rank] = self.kinds.index(_kind(step))
        for action in step:
            op, microbatch, stage = action
            self._set(tick, rank, self._entries(action))
            if op == "F":
                self._send("forward", (tick, rank), (microbatch, stage + 1), self.inputs)
            if op in ("B", "I") and stage > 0:
                self._send("backward", (tick, rank), (microbatch, stage - 1), self.grads)

    def _entries(self, action: Action) -> dict[str, int]:
        op, microbatch, stage = action
        value = (microbatch, stage)
        side = "f" if op == "F" else "b"
        entries = {
            f"{side}_microbatch": microbatch,
            f"{side}_chunk": self.schedule.place(microbatch, stage).chunk,
            f"{side}_first": int(stage == 0),
        }
        if op != "W":
            entries[f"{side}_slot"] = self.inputs.slot(value)
        if op != "F":
            entries["b_last"] = int(stage == self.schedule.num_stages - 1)
            entries["b_kept_slot"] = self.kept.slot(value)
        if op in ("B", "I"):
            entries["b_grad_slot"] = self.grads.slot(value)
        return entries

    def _set(self, tick: int, rank: int, entries: dict[str, int]) -> None:
        for name, number in entries.items():
            self.columns[name][tick, rank] = number

    def _send(
        self, payload: Payload, sender: tuple[int, int], value: tuple[int, int], slots: Slots
    ) -> None:
        tick, rank = sender
        receiver = self.schedule.place(*value).rank
        way = (payload, (receiver - rank) % self.schedule.num_ranks)
        if way not in self.sends:
            self.sends[way] = self._full(slots.count)
        self.sends[way][tick, receiver] = slots.slot(value)

    def _full(self, number: int) -> np.ndarray:
        return np.full(self.shape, number, np.int32)


def _kind(step: Step) -> str:
    return "+".join(action.op for action in step) or "idle"


def _buffers(schedule: Schedule, ticks: dict[Action, int]) -> tuple[Slots, Slots, Slots]:
    """Return the slots for stage inputs, for gradients of stage outputs, and for what I leaves."""
    inputs: list[Wait] = []
    grads: list[Wait] = []
    kept: list[Wait] = []
    for (op, microbatch, stage), tick in ticks.items():
        if op in ("F", "W"):
            continue
        value, rank = (microbatch, stage), schedule.place(microbatch, stage).rank
        if stage > 0:
            inputs.append(Wait(value, rank, ticks[Action("F", microbatch, stage - 1)], tick))
            receiver = schedule.place(microbatch, stage - 1).rank
            before = (microbatch, stage - 1)
            read = _backward_tick(ticks, *before)
            grads.append(Wait(before, receiver, tick, read))
        if op == "I":
            kept.append(Wait(value, rank, tick, ticks[Action("W", microbatch, stage)]))
    return assign_slots(inputs), assign_slots(grads), assign_slots(kept)


def _backward_tick(ticks: dict[Action, int], microbatch: int, stage: int) -> int:
    whole = ticks.get(Action("B", microbatch, stage))
    return ticks[Action("I", microbatch, stage)] if whole is None else whole
