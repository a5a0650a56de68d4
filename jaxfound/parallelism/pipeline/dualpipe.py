"""DualPipe and DualPipeV: two streams of micro-batches meet on every rank.

A rank has a near stream, whose stage is the earlier one, and a far stream, whose stage is the later
one. DualPipe runs two copies of the model in opposite directions, and a rank of the second half is
the mirror of one of the first. DualPipeV folds one model of 2P stages into a V, so that its ranks
act as the first half of 2P.

Source: DeepSeek-V3 technical report, section 3.2.1, and the phases that DualPipe's authors
published with it.
"""

from collections import deque
from collections.abc import Iterator

from jaxfound.parallelism.pipeline.schedule import Action, Op, Place, Schedule, Step

NEAR, FAR = 0, 1


class _Rank:
    """Writes the steps of one rank; each stream hands out its micro-batches in order.

    Args:
        stages: the stage that the near and the far stream meet here.
        microbatches: the micro-batches of each.
    """

    def __init__(self, stages: tuple[int, int], microbatches: tuple[range, range]) -> None:
        self.steps: list[Step] = []
        self._stages = stages
        self._forward = tuple(iter(those) for those in microbatches)
        self._backward = tuple(iter(those) for those in microbatches)
        self._owed: deque[Action] = deque()

    def forward(self, stream: int) -> None:
        """Run F of the stream's next micro-batch."""
        self.steps.append((self._next("F", stream, self._forward),))

    def backward(self, stream: int) -> None:
        """Run a whole B."""
        self.steps.append((self._next("B", stream, self._backward),))

    def input_grad(self, stream: int) -> None:
        """Run I and owe its W."""
        action = self._next("I", stream, self._backward)
        self._owed.append(action._replace(op="W"))
        self.steps.append((action,))

    def weight_grad(self) -> None:
        """Run the W that has been owed for the longest."""
        self.steps.append((self._owed.popleft(),))

    def pair(self, forward: int, backward: int) -> None:
        """Run F of one stream beside B of the other."""
        ahead = self._next("F", forward, self._forward)
        self.steps.append((ahead, self._next("B", backward, self._backward)))

    def _next(self, op: Op, stream: int, turns: tuple[Iterator[int], ...]) -> Action:
        return Action(op, next(turns[stream]), self._stages[stream])


def _phases(rank: _Rank, *, place: int, half: int, num_microbatches: int) -> tuple[Step, ...]:
    """Run the eight phases.

    Args:
        rank: what writes the steps down.
        place: distance to the end where the near stream enters, 0 to half - 1.
        half: ranks on the way from there to the middle.
        num_microbatches: micro-batches of each stream.
    """
    to_middle = half - place - 1
    _fill(rank, place, to_middle)
    for turn in range(num_microbatches - 2 * half + place + 1):
        if turn == 0 and to_middle == 0:
            # In the middle the first B waits for the F before it.
            rank.forward(NEAR)
            rank.backward(FAR)
        else:
            rank.pair(NEAR, FAR)
        rank.pair(FAR, NEAR)
    _drain(rank, place, to_middle)
    return tuple(rank.steps)


def _fill(rank: _Rank, place: int, to_middle: int) -> None:
    """Run phases 1 to 3, before the steady state."""
    for _ in range(2 * to_middle):
        rank.forward(NEAR)
    for _ in range(place + 1):
        rank.forward(NEAR)
        rank.forward(FAR)
    # Nothing may run beside these gradients, which others wait for, so W comes after.
    for _ in range(to_middle):
        rank.input_grad(FAR)
        rank.weight_grad()
        rank.forward(FAR)


def _drain(rank: _Rank, place: int, to_middle: int) -> None:
    """Run phases 5 to 8, after the steady state: the near stream has no forward pass left."""
    for _ in range(to_middle):
        rank.backward(FAR)
        rank.pair(FAR, NEAR)
    # Backward passes alone, the second half of them cut.
    for turn in range(2 * (place + 1)):
        stream = NEAR if turn % 2 else FAR
        if turn <= place:
            rank.backward(stream)
        else:
            rank.input_grad(stream)
    # The weight gradients owed fill the wait for the last gradients, then the end.
    for _ in range(to_middle):
        rank.weight_grad()
        rank.input_grad(NEAR)
    for _ in range(place + 1):
        rank.weight_grad()


def dualpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Return DualPipe: half of the micro-batches enter at rank 0, half at the last rank.

    Rank r holds stage r as chunk 0 and stage P - 1 - r, of the other copy, as chunk 1.
    """
    last, half = num_ranks - 1, num_microbatches // 2
    first, second = range(half), range(half, num_microbatches)
    orders: list[tuple[Step, ...]] = []
    for rank in range(num_ranks):
        place = min(rank, last - rank)
        streams = (first, second) if rank == place else (second, first)
        writer = _Rank((place, last - place), streams)
        orders.append(_phases(writer, place=place, half=num_ranks // 2, num_microbatches=half))
    return Schedule(
        name="dualpipe",
        num_ranks=num_ranks,
        num_chunks=2,
        num_microbatches=num_microbatches,
        places=(
            tuple(Place(stage, 0) for stage in range(num_ranks)),
            tuple(Place(last - stage, 1) for stage in range(num_ranks)),
        ),
        directions=(0,) * half + (1,) * half,
        orders=tuple(orders),
    )


def dualpipev(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Return DualPipeV: stages go down the ranks as chunk 0 and back up them as chunk 1."""
    everything = range(num_microbatches)
    last = 2 * num_ranks - 1
    orders = [
        _phases(
            _Rank((rank, last - rank), (everything, everything)),
            place=rank,
            half=num_ranks,
            num_microbatches=num_microbatches,
        )
        for rank in range(num_ranks)
    ]
    down = [Place(rank, 0) for rank in range(num_ranks)]
    back = [Place(rank, 1) for rank in reversed(range(num_ranks))]
    return Schedule(
        name="dualpipev",
        num_ranks=num_ranks,
        num_chunks=2,
        num_microbatches=num_microbatches,
        places=((*down, *back),),
        directions=(0,) * num_microbatches,
        orders=tuple(orders),
    )
