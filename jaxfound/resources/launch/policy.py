"""What an agent does when its processes have ended: pure."""

from typing import NamedTuple

from jaxfound.resources.launch.exits import Exit, meaning_of

# Before the second restart in a row that brought nothing; doubled for each one after it.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


class Move(NamedTuple):
    """What comes next.

    Attributes:
        restarts: whether the processes are started again.
        fruitless: restarts in a row without a new committed step, this one included.
        wait_s: before that.
        why: for people.
    """

    restarts: bool
    fruitless: int
    wait_s: float
    why: str


def next_move(
    code: int, *, is_stopping: bool, progressed: bool, fruitless: int, max_restarts: int
) -> Move:
    """Return what to do after processes that ended with `code`.

    Args:
        code: of the process that is the reason.
        is_stopping: whether the agent itself was asked to stop.
        progressed: whether a step was committed that was not there when they were started.
        fruitless: restarts in a row before this one that committed nothing.
        max_restarts: how many of those there may be.
    """
    meaning = meaning_of(code)
    if code == Exit.DONE or is_stopping or not meaning.restarts:
        return Move(False, fruitless, 0.0, meaning.text)
    if not meaning.counts:
        return Move(True, fruitless, 0.0, f"{meaning.text}: a restart that costs nothing")
    now = 1 if progressed else fruitless + 1
    if now > max_restarts:
        return Move(
            False,
            fruitless,
            0.0,
            f"{meaning.text}; {fruitless} restarts in a row committed no step, "
            f"--max-restarts={max_restarts}",
        )
    wait_s = 0.0 if now == 1 else min(FIRST_WAIT_S * 2 ** (now - 2), LONGEST_WAIT_S)
    return Move(True, now, wait_s, f"{meaning.text}; restart {now} of {max_restarts} in a row")
