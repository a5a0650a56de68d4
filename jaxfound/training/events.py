"""What a run tells: records that the command line draws and metrics.jsonl keeps."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal[
    "plan", "planned", "resume", "step", "train", "eval", "checkpoint", "save_skipped", "uploaded",
    "stored", "upload_failed", "non_finite", "demoted", "straggler", "stopped", "finished",
]  # fmt: skip
# One a step would drown the file: steps are for progress bars, `train` is their sample. What was
# planned has a file of its own.
UNRECORDED: frozenset[Kind] = frozenset({"plan", "planned", "step"})


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        kind: what.
        step: optimizer steps done when it happened.
        values: plain numbers and words; losses in nats a token, `_s` seconds, `_bytes` bytes.
    """

    kind: Kind
    step: int
    values: Mapping[str, object] = {}


class TrainingError(RuntimeError):
    """A run that cannot go on; says what was saved and what to do."""


class NonFiniteError(TrainingError):
    """A step gave NaN or infinity; the state before it and its batch are saved.

    Args:
        message: what happened.
        step: number of the step.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step
