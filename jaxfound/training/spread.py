"""What repeated measurements come to in a record."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A median and what lies around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of `values`."""
        return cls(statistics.median(values), min(values), max(values))
