"""The picture of timed training: what each config reaches, and where its step's time goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfound.cli.pages.picture import open_pyplot, save
from jaxfound.training.step_profile import PARTS

OURS, PEER, CEILING = "#0072b2", "#e69f00", "#444444"
COLOURS: Mapping[str, str] = {
    "forward": "#0072b2",
    "recompute": "#cc79a7",
    "backward": "#56b4e9",
    "accumulation": "#f0e442",
    "update": "#009e73",
    "collectives": "#d55e00",
    "copies": "#e69f00",
    "idle": "#bbbbbb",
}


def write_chart(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of `bench train` as a PNG: speed beside peer and ceiling, and parts of a step.

    Args:
        record: from `train_record.as_record`.
        path: of the PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = open_pyplot()
    rows: Mapping[str, Any] = record["rows"]
    names = list(rows)
    height = 1.7 + 0.62 * len(names)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12.0, height), layout="constrained", sharey=True
    )
    _draw_speed(left, [rows[name] for name in names])
    _draw_parts(right, [rows[name] for name in names])
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    figure.suptitle(
        f"Training on {record['device']}", x=0.01, horizontalalignment="left", fontsize=11
    )
    save(figure, path)


def _draw_speed(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """TFLOP/s of each side, and a line where a bare product ended."""
    for side, colour, ink, shift, label in (
        ("ours", OURS, "white", -0.18, "jaxfound"),
        ("peer", PEER, "black", 0.18, "torch.compile"),
    ):
        shown = [(i, row) for i, row in enumerate(rows) if (row[side] or {}).get("flops_full")]
        if not shown:
            continue
        rates = [row[side]["flops_full"] / 1e12 for _, row in shown]
        bars = axes.barh([i + shift for i, _ in shown], rates, 0.34, color=colour, label=label)
        told = [_speed_text(row[side]) for _, row in shown]
        axes.bar_label(bars, told, label_type="center", fontsize=8, color=ink)
    ceilings = [(i, row["ceiling_flops"]["median"] / 1e12) for i, row in enumerate(rows)
                if row["ceiling_flops"]]  # fmt: skip
    if ceilings:
        axes.vlines(
            [rate for _, rate in ceilings],
            [i - 0.4 for i, _ in ceilings],
            [i + 0.4 for i, _ in ceilings],
            color=CEILING,
            label="a bare bf16 product",
        )
    axes.set(xlabel="model TFLOP/s a device, all pairs of tokens counted", title="Speed")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=3)


def _speed_text(side: Mapping[str, Any]) -> str:
    share = "" if side["mfu_full"] is None else f", MFU {side['mfu_full']:.1%}"
    return f"{side['tokens_per_s']:,.0f} tokens/s{share}"


def _draw_parts(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """The parts of each profiled step, as shares of it."""
    profiled = [(i, row["breakdown"]) for i, row in enumerate(rows) if row["breakdown"]]
    ends = dict.fromkeys((i for i, _ in profiled), 0.0)
    for part in PARTS:
        shares = {i: found["parts"][part] / found["step_s"] for i, found in profiled}
        if not any(share > 0 for share in shares.values()):
            continue
        axes.barh(
            list(shares),
            [100 * share for share in shares.values()],
            0.6,
            left=[100 * ends[i] for i in shares],
            color=COLOURS[part],
            label=part,
        )
        ends = {i: ends[i] + share for i, share in shares.items()}
    axes.set(xlabel="% of a profiled step", title="Where the time goes", xlim=(0, 100))
    if profiled:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=8)
