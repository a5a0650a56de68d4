"""Loss curves of runs that read the same batches, compared step against step.

Runs that differ in a format or a layout alone see the same tokens at every step, so that the
difference of their losses at a step is free of what the step's text is like.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from jaxfound.config.load import load
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.resources.metrics import read_metrics
from jaxfound.resources.run_directory import RunDirectory

FORMAT_VERSION = 1
# Keys that say which tokens a step reads, and those that say nothing of the numbers of a run.
READ_KEYS = ("seed", "train.batch_size", "train.seq_len", "data.order", "data.packing")
APART = ("name", "runs_dir", "checkpoint", "watch", "data.prepared_dir", "train.eval", "train.log")
# Losses of neighbouring steps move together, so whole runs of steps are drawn again.
NUM_DRAWS, BLOCK_STEPS = 2000, 10
TAIL = (2.5, 97.5)


@dataclass(frozen=True)
class Curve:
    """What a run recorded of its losses.

    Attributes:
        cfg: its config.
        losses: nats a token, by step.
        starts: of every start of the run: device, versions, commit, and the key of its bins.
        tokens_per_s: median over the recorded steps.
    """

    name: str
    cfg: RunConfig
    losses: Mapping[int, float]
    starts: tuple[Mapping[str, object], ...]
    tokens_per_s: float

    @property
    def data(self) -> str:
        """The key of the bins that it read; empty where it is not recorded."""
        keys = {str(start.get("data", "")) for start in self.starts}
        return keys.pop() if len(keys) == 1 else ""


class Paired(NamedTuple):
    """The end of a curve against the end of the first one.

    Attributes:
        steps: how many steps both recorded there.
        base: mean loss of the first one.
        loss: mean loss of this one.
        relative: (loss - base) / base.
        low, high: its 95 % interval, by a bootstrap over runs of 10 recorded steps.
    """

    name: str
    steps: int
    base: float
    loss: float
    relative: float
    low: float
    high: float


def read_curve(path: Path) -> Curve:
    """Return what is recorded in a run's folder.

    Raises:
        ConfigError: it is no run's folder, its record is damaged, or holds no losses.
    """
    there = RunDirectory(path)
    if not there.config.exists() or not there.metrics.exists():
        raise ConfigError(f"{path} holds no {there.config.name} and {there.metrics.name}")
    try:
        records = [r for r in read_metrics(there.metrics) if r["event"] == "train"]
        starts = tuple(read_metrics(there.starts)) if there.starts.exists() else ()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    losses = {cast(int, r["step"]): float(cast(float, r["loss"])) for r in records}
    if not losses:
        raise ConfigError(f"{there.metrics} holds no losses yet: train.log_every steps are needed")
    rates = [float(cast(float, r["tokens_per_s"])) for r in records]
    return Curve(path.name, load(there.config), losses, starts, statistics.median(rates))


def check_alike(curves: Sequence[Curve]) -> None:
    """Raise ConfigError unless all runs read the same tokens at the same steps."""
    first, *others = curves
    for other in others:
        ours, theirs = flat(first.cfg), flat(other.cfg)
        unlike = [f"{k}={theirs[k]} for {ours[k]}" for k in READ_KEYS if ours[k] != theirs[k]]
        if first.data and other.data and first.data != other.data:
            unlike.append(f"bins {other.data} for {first.data}")
        if unlike:
            raise ConfigError(
                f"{other.name} read other batches than {first.name}: {', '.join(unlike)}. Losses "
                "of a step can be compared where both read the same tokens"
            )


def paired(curves: Sequence[Curve], *, last: int) -> list[Paired]:
    """Return each curve's last steps against the first curve's.

    Args:
        curves: of runs that read the same batches, the base first.
        last: how many steps before the last one that all have count.

    Raises:
        ConfigError: they have too few steps there in common, or losses that are not finite.
    """
    base, *others = curves
    end = min(max(curve.losses) for curve in curves)
    return [_paired(base, other, range(end - last + 1, end + 1)) for other in others]


def _paired(base: Curve, other: Curve, span: range) -> Paired:
    steps = sorted(step for step in base.losses.keys() & other.losses.keys() if step in span)
    if len(steps) < 2 * BLOCK_STEPS:
        raise ConfigError(
            f"{base.name} and {other.name} both recorded {len(steps)} of the steps {span[0]} to "
            f"{span[-1]}; {2 * BLOCK_STEPS} are needed. Train with train.log_every=1"
        )
    ours, theirs = (np.array([c.losses[s] for s in steps]) for c in (base, other))
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise ConfigError(f"{base.name} or {other.name} has losses that are not finite")
    apart, mean = theirs - ours, float(ours.mean())
    low, high = np.percentile(_draws(apart), TAIL) / mean
    relative = float(apart.mean()) / mean
    loss = float(theirs.mean())
    return Paired(other.name, len(steps), mean, loss, relative, float(low), float(high))


def _draws(apart: np.ndarray) -> np.ndarray:
    """Return means of differences that are drawn again in whole blocks."""
    random = np.random.default_rng(0)
    num_blocks = math.ceil(len(apart) / BLOCK_STEPS)
    firsts = random.integers(0, len(apart) - BLOCK_STEPS + 1, (NUM_DRAWS, num_blocks))
    places = (firsts[..., None] + np.arange(BLOCK_STEPS)).reshape(NUM_DRAWS, -1)
    return apart[places[:, : len(apart)]].mean(axis=1)


def as_record(curves: Sequence[Curve], found: Sequence[Paired], *, last: int) -> dict[str, object]:
    """Return everything as plain data for JSON."""
    base = curves[0]
    return {
        "format_version": FORMAT_VERSION,
        "explained": {
            "last": "recorded steps before the last common one that are compared",
            "relative": "(mean loss - the base's) / the base's",
            "low, high": "95 %, bootstrap over runs of 10 recorded steps of the differences",
        },
        "last": last,
        "base": base.name,
        "paired": [one._asdict() for one in found],
        "runs": {
            curve.name: {
                "differs": dict(differences(base.cfg, curve.cfg)),
                "tokens_per_step": curve.cfg.train.batch_size * curve.cfg.train.seq_len,
                "tokens_per_s": curve.tokens_per_s,
                "starts": [dict(start) for start in curve.starts],
                "losses": sorted(curve.losses.items()),
            }
            for curve in curves
        },
    }


def differences(base: RunConfig, other: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the keys in which a run differs from the base, with its values."""
    ours, theirs = flat(base), flat(other)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key) and not key.startswith(APART):
            yield key, theirs.get(key)


def flat(cfg: RunConfig) -> dict[str, object]:
    """Return a config by its dotted keys; lists are values."""

    def walk(value: object, path: str) -> Iterator[tuple[str, object]]:
        if not isinstance(value, dict):
            yield path, value
            return
        for name, inner in cast(dict[str, object], value).items():
            yield from walk(inner, f"{path}.{name}" if path else name)

    return dict(walk(json.loads(cfg.model_dump_json()), ""))
