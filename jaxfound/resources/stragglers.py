"""Which hosts are slower than the rest, from what each spends outside of the devices.

A collective makes all hosts equally slow, so step times say nothing: the slow one is the one that
does not wait. A device that is slower than its neighbours shows on no host's clock and is not found
here.
"""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from jaxfound.resources.pulse import Phase

# The host's own work in a step; the rest is waiting for devices, or seldom.
OWN: tuple[Phase, ...] = ("data", "dispatch", "loop")
# A host stands out when it is this many median deviations above the median …
DEVIATIONS = 5.0
# … and by this share of a step at least: hosts that are all alike deviate by nothing.
LEAST_SHARE = 0.1


class Straggler(NamedTuple):
    """A host that holds up the others.

    Attributes:
        process: which.
        own_s: what it spends in a step on its own work.
        median_s: what the processes spend in the middle.
        phase: where most of the difference lies.
    """

    process: int
    own_s: float
    median_s: float
    phase: Phase


def find_stragglers(
    spent_s: Mapping[int, Mapping[Phase, float]], *, steps: int
) -> tuple[Straggler, ...]:
    """Return the processes whose own work is above median + 5 median absolute deviations.

    Args:
        spent_s: seconds in each phase, by process, over the same `steps` steps.
    """
    own = {p: sum(times[phase] for phase in OWN) / steps for p, times in spent_s.items()}
    if len(own) < 2:
        return ()
    median = statistics.median_low(own.values())
    deviation = statistics.median_low(abs(value - median) for value in own.values())
    step_s = statistics.median(sum(times.values()) / steps for times in spent_s.values())
    limit = median + max(DEVIATIONS * deviation, LEAST_SHARE * step_s)
    middle = {ph: statistics.median_low(t[ph] for t in spent_s.values()) for ph in OWN}
    return tuple(
        Straggler(p, value, median, max(OWN, key=lambda ph: spent_s[p][ph] - middle[ph]))
        for p, value in sorted(own.items())
        if value > limit
    )
