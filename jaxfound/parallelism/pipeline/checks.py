"""What makes a schedule right: every pass once, in an order in which it can run."""

from collections import Counter
from typing import NoReturn

from jaxfound.parallelism.pipeline.schedule import Action, Schedule, ScheduleError, Step
from jaxfound.parallelism.pipeline.simulate import Costs, simulate, text

# The shapes of a step, as the ops of its actions.
SHAPES = {("F",), ("B",), ("I",), ("W",), ("F", "B"), ("F", "I")}


def check(schedule: Schedule) -> None:
    """Refuse a schedule that is not right.

    Every micro-batch passes every stage forward once and backward once, as a B or as an I and a W;
    each pass is on the rank that holds the stage; F comes before B or I, and I before W; a step is
    one action, or F beside B or I; and the ranks, each in its order, come to the end.

    Raises:
        ScheduleError: which action breaks which of these rules.
    """
    if len(schedule.orders) != schedule.num_ranks:
        _refuse(schedule, f"has orders for {len(schedule.orders)} of {schedule.num_ranks} ranks")
    for rank, order in enumerate(schedule.orders):
        for step in order:
            _check_step(schedule, rank, step)
    _check_counts(schedule)
    for rank, order in enumerate(schedule.orders):
        _check_order(schedule, rank, order)
    simulate(schedule, Costs())


def _check_step(schedule: Schedule, rank: int, step: Step) -> None:
    if tuple(action.op for action in step) not in SHAPES:
        shown = " + ".join(text(action) for action in step) or "nothing"
        _refuse(
            schedule,
            f"has a step of {shown} on rank {rank}: a step is one of F, B, I, W, or F beside B or "
            "I, the F first. Make steps of the others",
        )
    for action in step:
        _, microbatch, stage = action
        there = microbatch in range(schedule.num_microbatches)
        if not there or stage not in range(schedule.num_stages):
            _refuse(
                schedule,
                f"has {text(action)} on rank {rank}, but there are {schedule.num_microbatches} "
                f"micro-batches and {schedule.num_stages} stages, both counted from 0",
            )
        holder = schedule.place(microbatch, stage).rank
        if holder != rank:
            _refuse(
                schedule,
                f"has {text(action)} on rank {rank}, but rank {holder} holds that stage: move it "
                "there, or change `places`",
            )


def _check_order(schedule: Schedule, rank: int, order: tuple[Step, ...]) -> None:
    """Refuse a rank that runs a pass before the one it builds on, which is on the same rank."""
    actions = [action for step in order for action in step]
    to_come = Counter(actions)
    for action in actions:
        to_come[action] -= 1
        earlier = _builds_on(action)
        if earlier is not None and to_come[earlier] > 0:
            _refuse(
                schedule,
                f"has {text(action)} before {earlier.op} on rank {rank}: "
                f"{action.op} needs what {earlier.op} leaves, so swap them",
            )


def _builds_on(action: Action) -> Action | None:
    if action.op == "F":
        return None
    return action._replace(op="I" if action.op == "W" else "F")


def _check_counts(schedule: Schedule) -> None:
    counts = Counter(action for order in schedule.orders for step in order for action in step)
    for microbatch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            found = {op: counts[Action(op, microbatch, stage)] for op in ("F", "B", "I", "W")}
            reason = _wrong_counts(found)
            if reason is not None:
                _refuse(schedule, f"{reason} of micro-batch {microbatch} at stage {stage}")


def _wrong_counts(found: dict[str, int]) -> str | None:
    twice = next((op for op, count in found.items() if count > 1), None)
    if twice is not None:
        return f"has {found[twice]} times {twice} (each pass runs once; remove the others)"
    if not found["F"]:
        return "has no F (every micro-batch passes every stage; add it)"
    if found["B"] and (found["I"] or found["W"]):
        return "has B and its halves I or W (the gradient would count twice; keep one form)"
    if found["B"] or (found["I"] and found["W"]):
        return None
    missing = "W after I" if found["I"] else "I before W" if found["W"] else "B (or I and W)"
    return f"has no {missing} (every gradient is needed; add it)"


def _refuse(schedule: Schedule, reason: str) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name} {reason}")
