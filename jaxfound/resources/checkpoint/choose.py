"""Which checkpoint to restore, and which to delete: from lists alone, no disk, no clock.

Every process computes both from the same lists, so that all of a job do the same.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from jaxfound.resources.checkpoint.manifest import Key

type TierName = Literal["local", "shared", "remote"]

# Nearest first: of one step, the tier that costs least to read.
TIERS: tuple[TierName, ...] = ("local", "shared", "remote")


class Candidate(NamedTuple):
    """A save that could be restored, and where it would be read."""

    key: Key
    tier: TierName

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"step {self.key.step} ({self.tier})"


def order(
    *,
    local: Sequence[Collection[Key]],
    shared: Collection[Key],
    remote: Collection[Key] = (),
) -> tuple[Candidate, ...]:
    """Return what can be restored, the first to be tried first: newest, then nearest.

    Args:
        local: for every process, the saves whose part on its own disk has all that it needs.
        shared: the whole checkpoints of the shared tier, as one process sees them.
        remote: the whole checkpoints of the object store, as one process sees them.
    """
    common = frozenset(local[0]).intersection(*local[1:]) if local else frozenset[Key]()
    # What is on a nearer tier as a whole need not be fetched from a farther one.
    tiers = {
        "local": common,
        "shared": frozenset(shared),
        "remote": frozenset(remote) - set(shared),
    }
    found = [Candidate(key, tier) for tier in TIERS for key in tiers[tier]]
    return tuple(sorted(found, key=lambda c: (-c.key.step, TIERS.index(c.tier), c.key.attempt)))


def doomed(committed: Collection[int], *, keep: int, damaged: Collection[int] = ()) -> list[int]:
    """Return the steps to delete so that the `keep` newest intact ones stay; 0 keeps all.

    The newest step always stays, and so does the newest that is not known to be damaged.
    """
    if keep < 0:
        raise ValueError(f"keep={keep} is negative: use 0 to keep every checkpoint, or 1, 2 …")
    if not keep or not committed:
        return []
    intact = sorted(step for step in committed if step not in damaged)
    kept = {*intact[-keep:], max(committed)}
    return sorted(step for step in committed if step not in kept)


def next_upload(
    parts: Collection[Key], *, committed: Collection[Key], begun: Collection[Key]
) -> Key | None:
    """Return the save whose parts on this disk are to be brought to the shared tier next.

    Hosts choose without a word to each other and come to the same save: one that another host has
    begun goes first, the newest of them; else the newest. What is older than the newest committed
    step is not needed any more: when disks are faster than the shared tier, steps are left out
    there, and training never waits.

    Args:
        parts: saves of which this disk has a part that is not on the shared tier yet.
        committed: saves that are whole on the shared tier.
        begun: saves of which some part is on the shared tier.
    """
    newest = max((key.step for key in committed), default=-1)
    open_ = [key for key in parts if key.step >= newest and key not in committed]
    joined = [key for key in open_ if key in begun]
    return max(joined or open_, default=None)
