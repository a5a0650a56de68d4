"""The pipeline schedules, one builder each, and the table that names them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jaxfound.parallelism.pipeline.dualpipe import dualpipe, dualpipev
from jaxfound.parallelism.pipeline.schedule import Action, Op, Place, Schedule, ScheduleError, Step

type Builder = Callable[[int, int, int], Schedule]
type Rule = Callable[[int, int], str | None]


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule that runs every forward pass, then every backward pass.

    Source: Huang et al., "GPipe", 2018.
    """
    orders = [
        _each("F", range(num_microbatches), rank) + _each("B", range(num_microbatches), rank)
        for rank in range(num_ranks)
    ]
    return _in_line("gpipe", num_microbatches, orders)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule that alternates F and B once a rank has P - 1 - rank outputs ahead.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2020.
    """
    orders = _in_turn(num_ranks, num_microbatches, lambda rank, done: _each("B", [done], rank))
    return _in_line("1f1b", num_microbatches, orders)


def paired_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule whose step at tick t is F of t - rank beside B of t - (2(P-1) - rank).

    On the last rank the two are of the same micro-batch, one after the other.
    """
    orders: list[list[Step]] = []
    for rank in range(num_ranks):
        ahead = 2 * (num_ranks - 1 - rank)
        lonely = min(ahead, num_microbatches)
        order = _each("F", range(lonely), rank)
        for backward in range(num_microbatches):
            forward = backward + ahead
            step = _step("B", backward, rank)
            order.append(_step("F", forward, rank) + step if forward < num_microbatches else step)
        orders.append(order)
    return _in_line("paired_1f1b", num_microbatches, orders)


def zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return ZB-H1: 1F1B with B cut, where rank r runs each W r micro-batches after its I.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, the schedule with 1F1B's memory.
    """
    count = num_microbatches

    def back(rank: int, done: int) -> list[Step]:
        owed = [done - rank] if done >= rank else []
        return _each("I", [done], rank) + _each("W", owed, rank)

    orders = _in_turn(num_ranks, count, back)
    for rank, order in enumerate(orders):
        order += _each("W", range(max(count - rank, 0), count), rank)
    return _in_line("zero_bubble", count, orders)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return 1F1B over P x chunks stages dealt out in turn: rank r holds stages r, r + P, ...

    Micro-batches go in groups of P: a rank takes a group through one chunk, then the next.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.
    """
    num_stages = num_ranks * num_chunks
    total = num_microbatches * num_chunks

    def nth(op: Op, rank: int, count: int) -> Step:
        group, place = divmod(count, num_stages)
        chunk, member = divmod(place, num_ranks)
        held = chunk if op == "F" else num_chunks - 1 - chunk
        return _step(op, group * num_ranks + member, held * num_ranks + rank)

    orders: list[list[Step]] = []
    for rank in range(num_ranks):
        ahead = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, total)
        order = [nth("F", rank, count) for count in range(ahead)]
        for done in range(total):
            if ahead + done < total:
                order.append(nth("F", rank, ahead + done))
            order.append(nth("B", rank, done))
        orders.append(order)
    places = tuple(Place(stage % num_ranks, stage // num_ranks) for stage in range(num_stages))
    return Schedule(
        name="interleaved",
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        places=(places,),
        directions=(0,) * num_microbatches,
        orders=tuple(tuple(order) for order in orders),
    )


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule by name: what it is, what it needs, how it is built.

    Attributes:
        name: its key in `SCHEDULES`.
        sentence: what it does and what that costs.
        build: from ranks, micro-batches and chunks; call `make_schedule`, which checks them first.
        rule: why it cannot take these ranks and micro-batches, or None.
        needs: the rule in words; empty when it takes any.
        num_chunks: chunks of layers on a rank; None where the caller chooses.
        num_copies: copies of the parameters.
        splits_backward: whether some backward passes are cut into I and W.
    """

    name: str
    sentence: str
    build: Builder
    rule: Rule | None = None
    needs: str = ""
    num_chunks: int | None = 1
    num_copies: int = 1
    splits_backward: bool = False

    def chunks(self, num_chunks: int = 2) -> int:
        """Return the chunks of a rank when the caller asks for `num_chunks`."""
        return num_chunks if self.num_chunks is None else self.num_chunks

    def num_stages(self, num_ranks: int, num_chunks: int = 2) -> int:
        """Return the stages that a micro-batch passes."""
        return num_ranks * self.chunks(num_chunks) // self.num_copies

    def refuses(self, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> str | None:
        """Return why this schedule cannot be built and the way out; None if it can be."""
        given = {
            "num_ranks": num_ranks,
            "num_microbatches": num_microbatches,
            "num_chunks": self.chunks(num_chunks),
        }
        for name, count in given.items():
            if count < 1:
                return f"{name}={count}: a pipeline needs at least one; use 1 or more"
        return self.rule(num_ranks, num_microbatches) if self.rule else None


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int = 2
) -> Schedule:
    """Return a schedule by name.

    Args:
        name: a key of `SCHEDULES`.
        num_ranks: devices along the `pipeline` axis.
        num_microbatches: micro-batches of a step.
        num_chunks: chunks of layers on a rank, where the schedule leaves the choice.

    Raises:
        ScheduleError: for a name that is not there, or numbers that the schedule cannot take.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        raise ScheduleError(f"no schedule is called {name!r}; use one of {', '.join(SCHEDULES)}")
    reason = kind.refuses(num_ranks, num_microbatches, num_chunks)
    if reason is not None:
        raise ScheduleError(f"{name}: {reason}")
    return kind.build(num_ranks, num_microbatches, kind.chunks(num_chunks))


def _groups_of_ranks(num_ranks: int, num_microbatches: int) -> str | None:
    if num_microbatches % num_ranks == 0:
        return None
    below = num_microbatches // num_ranks * num_ranks
    options = " or ".join(str(n) for n in (below, below + num_ranks) if n)
    return (
        f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks}: "
        f"micro-batches go in groups of one a rank. Use {options} micro-batches, or paired_1f1b"
    )


def _two_a_rank(num_ranks: int, num_microbatches: int) -> str | None:
    if num_microbatches >= 2 * num_ranks:
        return None
    return (
        f"num_microbatches={num_microbatches} is fewer than 2 x num_ranks={2 * num_ranks}, which "
        f"fill the pipeline. Use {2 * num_ranks} micro-batches or more, or paired_1f1b"
    )


def _two_directions(num_ranks: int, num_microbatches: int) -> str | None:
    if num_ranks % 2:
        return (
            f"num_ranks={num_ranks} is odd: the rank in the middle would meet both directions in "
            f"the same stage. Use {num_ranks + 1} ranks, dualpipev or paired_1f1b"
        )
    if num_microbatches % 2:
        return (
            f"num_microbatches={num_microbatches} is odd: half of them go in each direction. "
            f"Use {max(num_microbatches + 1, 2 * num_ranks)} micro-batches, or paired_1f1b"
        )
    return _two_a_rank(num_ranks, num_microbatches)


def _step(op: Op, microbatch: int, stage: int) -> Step:
    return (Action(op, microbatch, stage),)


def _in_turn(
    num_ranks: int, num_microbatches: int, back: Callable[[int, int], list[Step]]
) -> list[list[Step]]:
    """Return 1F1B's orders: P - 1 - rank outputs ahead, then one F before each backward pass.

    Args:
        num_ranks: P.
        num_microbatches: of a step.
        back: the steps of a rank for the backward pass of a micro-batch.
    """
    orders: list[list[Step]] = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        order = _each("F", range(ahead), rank)
        for done in range(num_microbatches):
            if ahead + done < num_microbatches:
                order += _each("F", [ahead + done], rank)
            order += back(rank, done)
        orders.append(order)
    return orders


def _each(op: Op, microbatches: Iterable[int], stage: int) -> list[Step]:
    return [_step(op, microbatch, stage) for microbatch in microbatches]


def _in_line(name: str, num_microbatches: int, orders: list[list[Step]]) -> Schedule:
    """Return a schedule whose stage s is the only chunk of rank s."""
    return Schedule(
        name=name,
        num_ranks=len(orders),
        num_chunks=1,
        num_microbatches=num_microbatches,
        places=(tuple(Place(rank, 0) for rank in range(len(orders))),),
        directions=(0,) * num_microbatches,
        orders=tuple(tuple(order) for order in orders),
    )


_KINDS = (
    ScheduleKind("gpipe", "All forward passes, then all backward passes: the plainest.", gpipe),
    ScheduleKind(
        "1f1b", "One forward, one backward in turn: gpipe's bubble, P inputs kept.", one_f_one_b
    ),
    ScheduleKind(
        "paired_1f1b",
        "F of one micro-batch beside B of another in one step: 1F1B for ranks in lockstep.",
        paired_1f1b,
    ),
    ScheduleKind(
        "interleaved",
        "1F1B over several chunks a rank: a bubble as many times smaller, more inputs kept.",
        interleaved,
        rule=_groups_of_ranks,
        needs="micro-batches in multiples of the ranks",
        num_chunks=None,
    ),
    ScheduleKind(
        "zero_bubble",
        "ZB-H1: 1F1B with the weight gradients moved into the bubble, in the same memory.",
        zero_bubble,
        splits_backward=True,
    ),
    ScheduleKind(
        "dualpipe",
        "Micro-batches enter at both ends, F beside B: the smallest bubble, parameters twice.",
        dualpipe,
        rule=_two_directions,
        needs="an even number of ranks, an even number of micro-batches, at least 2 a rank",
        num_chunks=2,
        num_copies=2,
        splits_backward=True,
    ),
    ScheduleKind(
        "dualpipev",
        "DualPipe folded into a V, two chunks a rank: its bubble with parameters once.",
        dualpipev,
        rule=_two_a_rank,
        needs="at least 2 micro-batches a rank",
        num_chunks=2,
        splits_backward=True,
    ),
)
SCHEDULES: Mapping[str, ScheduleKind] = {kind.name: kind for kind in _KINDS}
