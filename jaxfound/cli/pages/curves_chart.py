"""The picture of runs side by side: their losses, and how far each is from the first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfound.cli.pages.picture import open_pyplot, save

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Recorded steps whose mean is one point of a curve.
SMOOTHED = 20


def write_chart(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of `jaxfound curves` as a PNG.

    Args:
        record: from `curves.as_record`.
        path: of the PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = open_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.0, 4.4), layout="constrained")
    runs: Mapping[str, Any] = record["runs"]
    base = dict(runs[record["base"]]["losses"])
    for colour, (name, run) in zip(COLOURS * len(runs), runs.items(), strict=False):
        steps, losses = zip(*run["losses"], strict=True)
        left.plot(*smoothed(steps, losses), color=colour, label=name, linewidth=1.2)
        if name == record["base"]:
            continue
        common = [step for step in steps if step in base]
        apart = [100 * (loss / base[step] - 1) for step, loss in run["losses"] if step in base]
        right.plot(*smoothed(common, apart), color=colour, label=name, linewidth=1.2)
    left.set_ylabel("loss, nats a token")
    left.legend(frameon=False)
    right.axhline(0.0, color=COLOURS[0], linewidth=0.8)
    right.set_ylabel(f"% above {record['base']}")
    for axes in (left, right):
        axes.set_xlabel(f"step (means of {SMOOTHED} recorded ones)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    save(figure, path)


def smoothed(steps: Sequence[int], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return means of neighbouring points; points themselves where there are few."""
    width = SMOOTHED if len(steps) >= 2 * SMOOTHED else 1
    whole = len(steps) // width * width
    pairs = (np.asarray(x[:whole], float).reshape(-1, width).mean(axis=1) for x in (steps, values))
    left, right = pairs
    return left, right
