"""What the engine asks of a runner: take the rows of a step now, say later what they drew."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxfound.serving.request import ScheduledBatch, TokenLogprobs


@dataclass(frozen=True)
class RowResult:
    """What one row of a step gave.

    Attributes:
        tokens: ids that it drew, in order; none from a chunk before the prompt's last. Several
            where drafts were accepted.
        logprobs: one of each drawn id, with as many likely ids as the runner keeps; empty where
            the request did not ask.
        prompt_logprobs: of the ids `start + 1` to `start + count` of the prompt, as far as there
            are any, where the request asked.
        error: why the row has no usable token, such as logits that are not finite.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@runtime_checkable
class PendingStep(Protocol):
    """A step that the device may still be working on."""

    def read(self) -> list[RowResult]:
        """Wait for the step; one result a row, those of `prefill` and then those of `decode`.

        Raises:
            RuntimeError: the device failed.
        """
        ...


@runtime_checkable
class StepRunner(Protocol):
    """Model and pages on the device. Steps run in the order in which they are dispatched."""

    def dispatch(self, batch: ScheduledBatch) -> PendingStep:
        """Begin a step; does not wait for the device.

        Raises:
            RuntimeError: the device failed, now or in an earlier step.
        """
        ...

    def reset(self) -> None:
        """Forget all rows and pages, so that steps can run again after one that failed.

        Raises:
            RuntimeError: the device does not work any more.
        """
        ...
