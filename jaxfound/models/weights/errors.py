"""The error of this room: what is wrong with a published checkpoint, where, and the way out."""

from collections.abc import Sequence

# Names in one message; a wrong file may differ in thousands.
MAX_NAMED = 8


class WeightsError(ValueError):
    """Published weights that cannot be read or written as this model's; names keys and tensors."""


def listed(items: Sequence[str]) -> str:
    """Return the first of `items`, and how many more there are."""
    rest = f" … and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return "; ".join(items[:MAX_NAMED]) + rest
