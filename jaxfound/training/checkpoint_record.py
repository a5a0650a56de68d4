"""What saves cost a step, as plain data: figures, their sums, the limits they are held to."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from jaxfound.resources.platform import package_versions
from jaxfound.training.events import TrainingError
from jaxfound.training.spread import Spread

FORMAT_VERSION = 1
# Blocked seconds of ours over those of a plain save.
SAVE_LIMIT = 0.10
# Median and p99 of steps beside saves over those without: on processors, writing and computing
# share cores and memory.
STEP_LIMITS: Mapping[str, float] = {"cpu": 1.10}
STEP_LIMIT = 1.02
# The saver of this package, and those that it is compared with.
OURS, PLAIN, UNCOMPRESSED = "jaxfound", "orbax", "orbax_uncompressed"
EXPLAINED: Mapping[str, str] = {
    "saves": "savers in turns, each on a state that a step has just changed; the first ones of all "
    "are dropped, and host memory is warmed before",
    "call_s": "the call of save: from its return on, the state may be donated",
    "blocked_s": "the call and the next step, less a step alone: work that the call queued on the "
    "devices counts",
    "total_s": "from the call until the save is committed on disk",
    OURS: "CheckpointManager.save into one folder",
    PLAIN: "orbax.checkpoint.Checkpointer of a PyTreeCheckpointHandler, with its defaults",
    UNCOMPRESSED: "the same in the form that CheckpointManager writes: zarr3, uncompressed",
    "share": "median blocked_s of jaxfound over the smaller median of the others",
    "steps": "products of matrices, and an update of the whole state, which is donated; a round is "
    "`steps` steps without saves and as many with tiers, the order turned each round. A save is "
    "part of the step that it delays",
    "none": "no checkpoints",
    "tiers": "a local save every `every` steps, brought to the shared tier by the uploader at "
    "rate_bps; a first save, before the rounds, is dropped",
    "direct": "`every` steps, one of them with a blocking save into the shared tier that takes as "
    "long as the state's bytes at rate_bps",
    "rate_bps": "what the shared tier takes: a direct save every `every` steps stretches the mean "
    "step from 20 to 41 units",
    "uploading": "share of the time of the steps with tiers in which files were being uploaded",
    "median_ratio": "tiers over none: the median over rounds of the ratio of medians; p99_ratio "
    "alike",
}


class SaverTimes(NamedTuple):
    """Seconds of each save of one saver, in order; see EXPLAINED."""

    call_s: tuple[float, ...]
    blocked_s: tuple[float, ...]
    total_s: tuple[float, ...]


@dataclass(frozen=True)
class Shape:
    """What a state consists of: `num_leaves` arrays of float32.

    Attributes:
        num_leaves: how many.
        leaf: shape of each.
    """

    num_leaves: int
    leaf: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all leaves."""
        return 4 * self.num_leaves * self.leaf[0] * self.leaf[1]

    def as_data(self) -> dict[str, object]:
        """Return the shape as plain data for JSON."""
        return {
            "bytes": self.num_bytes,
            "leaves": self.num_leaves,
            "leaf": list(self.leaf),
            "dtype": "float32",
        }


@dataclass(frozen=True)
class Saves:
    """How long saves block.

    Attributes:
        state: what was saved.
        step_s: median of a step alone.
        savers: seconds of each, by name.
    """

    state: Shape
    step_s: float
    savers: Mapping[str, SaverTimes]

    @property
    def share(self) -> float:
        """What our saves block, as a share of what the fastest of the others does."""
        blocked = {name: statistics.median(t.blocked_s) for name, t in self.savers.items()}
        return blocked.pop(OURS) / min(blocked.values())

    @property
    def is_kept(self) -> bool:
        """True when the share is below the limit."""
        return self.share < SAVE_LIMIT

    def as_data(self) -> dict[str, object]:
        """Return the figures as plain data for JSON."""
        return {
            "state": self.state.as_data(),
            "step_s": self.step_s,
            "savers": {
                name: {
                    **{key: Spread.of(values)._asdict() for key, values in times._asdict().items()},
                    "rounds": {key: list(values) for key, values in times._asdict().items()},
                }
                for name, times in self.savers.items()
            },
            "share": self.share,
            "limit": SAVE_LIMIT,
            "is_kept": self.is_kept,
        }


class StepTimes(NamedTuple):
    """What the seconds of a row of steps sum to."""

    median_s: float
    p99_s: float
    mean_s: float
    longest_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "StepTimes":
        """Return the sums of `seconds`."""
        return cls(
            statistics.median(seconds),
            float(np.percentile(seconds, 99)),
            statistics.fmean(seconds),
            max(seconds),
        )


@dataclass(frozen=True)
class Steps:
    """Steps without saves, with tiers, and with direct saves.

    Attributes:
        state: what was trained and saved.
        steps: of each kind in a round.
        every: steps from one save to the next.
        rate_bps: bytes/s that the shared tier takes.
        none, tiers: a round each.
        direct: with blocking saves into the shared tier.
        uploading: share of the time of `tiers` in which files were being uploaded.
        skipped: saves that were due and not taken.
    """

    state: Shape
    steps: int
    every: int
    rate_bps: float
    none: tuple[StepTimes, ...]
    tiers: tuple[StepTimes, ...]
    direct: StepTimes
    uploading: float
    skipped: int

    @property
    def limit(self) -> float:
        """The most that a ratio may be on this platform."""
        return STEP_LIMITS.get(jax.default_backend(), STEP_LIMIT)

    @property
    def median_ratio(self) -> float:
        """Median step with tiers over that without."""
        pairs = zip(self.tiers, self.none, strict=True)
        return statistics.median(a.median_s / b.median_s for a, b in pairs)

    @property
    def p99_ratio(self) -> float:
        """The 99th percentile with tiers over that without."""
        pairs = zip(self.tiers, self.none, strict=True)
        return statistics.median(a.p99_s / b.p99_s for a, b in pairs)

    @property
    def direct_ratio(self) -> float:
        """Mean step with direct saves over the mean without."""
        return self.direct.mean_s / statistics.median(times.mean_s for times in self.none)

    @property
    def is_kept(self) -> bool:
        """True when both ratios are within the limit and no save was left out."""
        return max(self.median_ratio, self.p99_ratio) <= self.limit and not self.skipped

    def as_data(self) -> dict[str, object]:
        """Return the figures as plain data for JSON."""
        return {
            "state": self.state.as_data(),
            "steps": self.steps,
            "every": self.every,
            "rate_bps": self.rate_bps,
            "none": [times._asdict() for times in self.none],
            "tiers": [times._asdict() for times in self.tiers],
            "direct": self.direct._asdict(),
            "uploading": self.uploading,
            "skipped": self.skipped,
            "median_ratio": self.median_ratio,
            "p99_ratio": self.p99_ratio,
            "direct_ratio": self.direct_ratio,
            "limit": self.limit,
            "is_kept": self.is_kept,
        }


def check_device(before: Mapping[str, object]) -> None:
    """Refuse to add to a record of another device.

    Raises:
        TrainingError: names both.
    """
    device = jax.devices()[0].device_kind
    if before.get("device", device) != device:
        raise TrainingError(
            f"the record is of {before['device']}, this is {device}: write to another file"
        )


def as_record(
    before: Mapping[str, object],
    *,
    found: Mapping[str, Saves | Steps],
    commit: str,
    date: str,
    note: str,
) -> dict[str, object]:
    """Return measurements as plain data for JSON, each with its commit.

    Args:
        before: an earlier record, whose measurements stay if they were not made again.
        found: `saves` and `steps`, or one of them.
        commit: of the source; empty where it is not known.
        date: of the measurement, ISO 8601.
        note: what else was going on.
    Raises:
        TrainingError: if the earlier record is of another device.
    """
    check_device(before)
    around = {
        "commit": commit,
        "date": date,
        "versions": package_versions(),
        # Of all programs on this machine, over the last minute.
        "load": round(os.getloadavg()[0], 1),
        "note": note,
    }
    kept = {name: before[name] for name in ("saves", "steps") if name in before}
    return {
        "format_version": FORMAT_VERSION,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "explained": dict(EXPLAINED),
        **kept,
        **{name: around | one.as_data() for name, one in found.items()},
    }
