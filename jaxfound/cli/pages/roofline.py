"""The roofline picture: what kernels reach, under what the machine does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfound.cli.pages.picture import open_pyplot, save
from jaxfound.config.schema import ConfigError
from pallas_kernels.bench.results import Results
from pallas_kernels.bench.summary import Line, summary

COLOURS: dict[str, str] = {
    "fp8_matmul": "#0072b2",
    "fp8_odd": "#56b4e9",
    "grouped_matmul": "#d55e00",
    "grouped_masked": "#e69f00",
    "mla_decode": "#009e73",
    "flash_attention": "#cc79a7",
    "widened_matmul": "#000000",
}
# (ceiling, name, colour, line)
ROOFS = (
    ("float8_flops", "fp8 product", "#444444", "-"),
    ("bfloat16_flops", "bf16 product", "#888888", "--"),
)


def write_roofline(results: Results, path: Path) -> None:
    """Draw TFLOP/s over FLOP/byte, our fastest kernels filled and peers hollow, and write a PNG.

    Raises:
        ConfigError: if matplotlib is missing or nothing in `results` has FLOPs.
    """
    pyplot = open_pyplot()
    lines = [x for x in summary(results) if x.key.op in COLOURS]
    lines = [x for x in lines if x.record.flops and x.record.bytes_moved]
    if not lines:
        raise ConfigError("nothing that was measured has FLOPs, so there is nothing to draw")
    figure, axes = pyplot.subplots(figsize=(9.6, 5.2), layout="constrained")
    _draw_points(axes, lines)
    _draw_roofs(axes, results, lines)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte moved, each byte counted once",
        ylabel="TFLOP/s",
    )
    device = results.calls[-1].versions.get("device", "")
    axes.set_title(f"Kernels on {device}: filled ours, hollow peers", loc="left", fontsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", linewidth=0.3, alpha=0.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    save(figure, path)


def _draw_points(axes: Any, lines: Sequence[Line]) -> None:
    """Our fastest kernel for each problem, and every peer."""
    fastest = {_problem(x): x for x in sorted(lines, key=lambda x: x.tflops) if x.is_ours}
    peers = [x for x in lines if not x.is_ours]
    for op, colour in COLOURS.items():
        for points, look in (
            (peers, {"s": 16, "facecolors": "none", "edgecolors": colour, "linewidths": 0.7}),
            (fastest.values(), {"s": 42, "color": colour, "edgecolors": "white", "label": op}),
        ):
            shown = [x for x in points if x.key.op == op]
            if shown:
                xs = [x.record.flops / x.record.bytes_moved for x in shown]
                axes.scatter(xs, [x.tflops for x in shown], zorder=2 + ("label" in look), **look)


def _problem(line: Line) -> tuple[object, ...]:
    """What makes two kernels of ours comparable: the same size, and as many bytes."""
    return (line.key, line.record.flops, line.record.bytes_moved)


def _draw_roofs(axes: Any, results: Results, lines: Sequence[Line]) -> None:
    """The newest call's ceilings: a slope for the memory, a flat line for each matrix format."""
    ceilings = results.calls[-1].ceilings
    reach = [x.record.flops / x.record.bytes_moved for x in lines]
    left, right = min(reach) / 1.6, max(reach) * 1.6
    copy = ceilings["copy_bps"]
    for name, title, colour, style in ROOFS:
        peak = ceilings[name]
        knee = peak / copy
        xs = [x for x in (left, knee, right) if left <= x <= right]
        ys = [min(x * copy, peak) / 1e12 for x in xs]
        text = f"{title}, {peak / 1e12:.0f} TFLOP/s"
        axes.plot(xs, ys, style, color=colour, linewidth=1.3, label=text, zorder=1)
    axes.set_xlim(left, right)
    axes.set_ylim(min(x.tflops for x in lines) / 1.5, 1.5 * ceilings["float8_flops"] / 1e12)
    middle = (left * ceilings["bfloat16_flops"] / copy) ** 0.5
    axes.annotate(
        f"copy, {copy / 1e12:.2f} TB/s",
        (middle, middle * copy / 1e12),
        xytext=(-8, 6),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
        color="#444444",
    )
