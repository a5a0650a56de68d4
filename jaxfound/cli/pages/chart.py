"""A curve over steps as inline SVG: ticks, marks, values under the pointer, no script."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from jaxfound.cli.pages.markup import Markup, element, joined
from jaxfound.cli.pages.scale import (
    Number,
    Scale,
    is_drawable,
    number_text,
    step_scale,
    tick_text,
    value_scale,
)

# More points than this are less than two pixels apart.
MAX_POINTS = 240
# From this many points on, a noisy line is drawn faintly under its moving mean.
MIN_SMOOTHED = 80
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 26.0, 42.0


class Point(NamedTuple):
    """A value at a step; NaN and infinity are allowed and break the curve."""

    step: int
    value: Number


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: as the legend calls it.
        points: by rising step.
        look: `line`; `noisy`, a line drawn faintly under its moving mean where it is long; `dots`
            joined by a line, for values that are few and far between.
        colour: number of a colour in the page's style, from 1.
    """

    name: str
    points: Sequence[Point]
    look: Literal["line", "noisy", "dots"] = "line"
    colour: int = 1


class Mark(NamedTuple):
    """Something that happened at a step; `kind` is a class of the page's style."""

    step: int
    kind: Literal["resume", "stopped", "bad"]
    text: str


@dataclass(frozen=True)
class Chart:
    """One or more curves over the same steps.

    Attributes:
        title: what is drawn.
        unit: of the values.
        series: the curves; one without points is left out.
        marks: drawn as vertical lines.
        base: a value that the axis reaches although none may lie there, e.g. 0.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    base: Number | None = None


class Frame(NamedTuple):
    """Where the curves lie inside the drawing."""

    x: Scale
    y: Scale

    @property
    def left(self) -> Number:
        """Pixel of the left edge."""
        return self.x.start

    @property
    def right(self) -> Number:
        """Pixel of the right edge."""
        return self.x.stop

    @property
    def top(self) -> Number:
        """Pixel of the upper edge."""
        return self.y.stop

    @property
    def bottom(self) -> Number:
        """Pixel of the lower edge."""
        return self.y.start


def figure(chart: Chart, *, wide: bool = False) -> Markup:
    """Return the chart with its heading and legend; empty when there is nothing to draw.

    Args:
        chart: what to draw.
        wide: True also draws it in the page's full width; the style shows the one that fits.
    """
    if not any(is_drawable(p.value) for s in chart.series for p in s.points):
        return Markup("")
    drawings = [draw(chart, width=560, height=280, class_="narrow" if wide else "")]
    if wide:
        drawings.append(draw(chart, width=1140, height=360, class_="wide"))
    unit = element("span", f" {chart.unit}", class_="unit")
    caption = element("figcaption", element("h3", chart.title, unit), legend(chart, whole=wide))
    return element("figure", caption, *drawings, class_="card span" if wide else "card")


def legend(chart: Chart, *, whole: bool) -> Markup:
    """Return the curves' names and colours; if `whole`, also how to read the rest."""
    drawn = [s for s in chart.series if s.points]
    names = [(s.name, f"key c{s.colour} {s.look}") for s in drawn] if len(drawn) > 1 else []
    said = {"resume": "resumed", "stopped": "stopped", "bad": "not finite"}
    found = {m.kind for m in chart.marks if whole}
    names += [(text, f"key {kind}") for kind, text in said.items() if kind in found]
    items = [
        element("li", element("span", "", class_=classes, aria_hidden="true"), name)
        for name, classes in names
    ]
    for width in sorted({smoothing(s) for s in drawn if whole} - {1}):
        items.append(element("li", f"faint: as recorded; strong: mean of {width} records"))
    return element("ul", *items, class_="legend") if items else Markup("")


def draw(chart: Chart, *, width: Number, height: Number, class_: str = "") -> Markup:
    """Return the chart as one SVG element; at least one value has to be drawable."""
    series = [s for s in chart.series if s.points]
    thin = [replace(s, points=decimated(s.points)) for s in series]
    values = [p.value for s in series for p in s.points if is_drawable(p.value)]
    steps = [p.step for s in series for p in s.points] + [m.step for m in chart.marks]
    frame = Frame(
        step_scale(steps, start=LEFT, stop=width - RIGHT),
        value_scale(values, start=height - BOTTOM, stop=TOP, base=chart.base),
    )
    return element(
        "svg",
        element("desc", summary(chart)),
        axes(frame, width=width),
        *(mark_line(m, frame) for m in chart.marks),
        *(curve(s, frame, mean=moving_mean(s)) for s in series),
        *(missing(s, frame) for s in thin),
        readouts(thin, frame, unit=chart.unit),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{chart.title}. {summary(chart)}",
        class_=f"chart {class_}".strip(),
    )


def summary(chart: Chart) -> str:
    """Return the curves as a sentence for those who cannot see them."""
    told: list[str] = []
    for series in chart.series:
        found = [p for p in series.points if is_drawable(p.value)]
        if not found:
            continue
        first, last = found[0], found[-1]
        told.append(
            f"{series.name}: {number_text(first.value)} at step {first.step:,}, "
            f"{number_text(last.value)} at step {last.step:,}, lowest "
            f"{number_text(min(p.value for p in found))}, highest "
            f"{number_text(max(p.value for p in found))} {chart.unit}".rstrip()
        )
    return ". ".join(told) + "."


def axes(frame: Frame, *, width: Number) -> Markup:
    """Return grid lines, ticks and their labels."""
    largest = max(abs(frame.y.low), abs(frame.y.high))
    parts: list[Markup] = []
    for tick in frame.y.ticks(about=5):
        y = frame.y.at(tick)
        scale_of = tick if frame.y.kind == "log" else largest
        parts.append(element("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"))
        text = tick_text(tick, largest=scale_of)
        parts.append(element("text", text, x=frame.left - 8, y=y + 4, class_="y"))
    for tick in frame.x.ticks(about=5 if width < 800 else 10):
        if tick != int(tick):
            continue
        x, text = frame.x.at(tick), tick_text(tick, largest=frame.x.high)
        parts.append(
            element("line", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 5, class_="tick")
        )
        parts.append(element("text", text, x=x, y=frame.bottom + 19, class_="x"))
    bottom = element(
        "line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis"
    )
    middle = (frame.left + frame.right) / 2
    name = element("text", "step", x=middle, y=frame.bottom + 36, class_="x name")
    return element("g", *parts, bottom, name, aria_hidden="true")


def curve(series: Series, frame: Frame, *, mean: Sequence[Point]) -> Markup:
    """Return the curve, broken where a value is not finite, and its moving mean if it has one."""
    thin = decimated(series.points)
    parts = lines(thin, frame, class_="raw" if mean else None)
    parts += lines(decimated(mean), frame)
    if series.look == "dots" or len(series.points) == 1:
        parts += [
            element("circle", cx=frame.x.at(p.step), cy=frame.y.at(p.value), r=3.6)
            for p in thin
            if is_drawable(p.value)
        ]
    return element("g", *parts, class_=f"curve c{series.colour} {series.look}", aria_hidden="true")


def lines(points: Sequence[Point], frame: Frame, *, class_: str | None = None) -> list[Markup]:
    """Return a line through each unbroken run of drawable points; a short one for a lone point."""
    parts: list[Markup] = []
    for drawable, run in groupby(points, key=lambda p: is_drawable(p.value)):
        places = [(frame.x.at(p.step), frame.y.at(p.value)) for p in run] if drawable else []
        if len(places) == 1:
            x, y = places[0]
            places = [(x - 1, y), (x + 1, y)]
        if places:
            written = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(element("polyline", points=written, class_=class_))
    return parts


def smoothing(series: Series) -> int:
    """Return over how many records a curve's mean moves; 1 = it has none."""
    if series.look != "noisy" or len(series.points) < MIN_SMOOTHED:
        return 1
    return len(series.points) // 80 * 2 + 1


def moving_mean(series: Series) -> list[Point]:
    """Return the mean of the drawable values around each point; empty for a short curve.

    The window shrinks towards both ends, where a lopsided one would bend a steep curve.
    """
    half, points = smoothing(series) // 2, series.points
    if half == 0:
        return []
    shown = [is_drawable(p.value) for p in points]
    values = [p.value if ok else 0.0 for p, ok in zip(points, shown, strict=True)]
    sums, counts = [0.0, *accumulate(values)], [0, *accumulate(map(int, shown))]
    means: list[Point] = []
    for i, point in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        low, high = i - reach, i + reach + 1
        count = counts[high] - counts[low]
        means.append(Point(point.step, (sums[high] - sums[low]) / count if count else math.nan))
    return means


def missing(series: Series, frame: Frame) -> Markup:
    """Return a cross on the step axis for each value that is not finite."""
    y = frame.bottom
    parts: list[Markup] = []
    for point in series.points:
        if not is_drawable(point.value):
            x = frame.x.at(point.step)
            title = element("title", f"step {point.step:,}: {series.name} is not finite")
            cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
            parts.append(element("path", title, d=cross, class_="cross"))
    return joined(*parts)


def mark_line(mark: Mark, frame: Frame) -> Markup:
    """Return a vertical line at the mark's step, with its text for the pointer."""
    x = frame.x.at(mark.step)
    return element(
        "g",
        element("title", mark.text),
        element("line", x1=x, x2=x, y1=frame.top, y2=frame.bottom, class_="reach"),
        element("line", x1=x, x2=x, y1=frame.top, y2=frame.bottom),
        class_=f"mark {mark.kind}",
    )


def readouts(series: Sequence[Series], frame: Frame, *, unit: str) -> Markup:
    """Return a band for each step that shows its values when the pointer is over it."""
    at: dict[int, list[tuple[Series, float]]] = {}
    for one in series:
        for point in one.points:
            if is_drawable(point.value):
                at.setdefault(point.step, []).append((one, point.value))
    steps = sorted(at)
    # A band reaches half-way to its neighbours; the outer ones to the frame.
    centres = [frame.x.at(s) for s in steps]
    edges = [frame.left, *_halfway(centres), frame.right]
    bands: list[Markup] = []
    for i, step in enumerate(steps):
        values = "  ".join(f"{s.name} {number_text(v)}" for s, v in at[step])
        text = f"step {step:,}:  {values} {unit}".rstrip()
        dots = [
            element("circle", cx=centres[i], cy=frame.y.at(v), r=4, class_=f"c{s.colour}")
            for s, v in at[step]
        ]
        band = element(
            "rect",
            x=edges[i],
            y=frame.top,
            width=max(edges[i + 1] - edges[i], 0.1),
            height=frame.bottom - frame.top,
        )
        label = element("text", text, x=frame.right, y=frame.top - 9)
        bands.append(element("g", element("title", text), band, *dots, label, class_="band"))
    return joined(*bands)


def decimated(points: Sequence[Point], *, limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points (4 or more) that keep both ends and every extreme.

    Neighbours are put into buckets, and each keeps its lowest and its highest value; one that is
    not finite is kept before both.
    """
    if len(points) <= limit:
        return list(points)
    num_buckets = limit // 2 - 1
    kept = {0, len(points) - 1}
    for bucket in range(num_buckets):
        start = bucket * len(points) // num_buckets
        stop = (bucket + 1) * len(points) // num_buckets
        kept |= set(_extremes(points, range(start, stop)))
    return [points[i] for i in sorted(kept)]


def _extremes(points: Sequence[Point], places: Iterable[int]) -> tuple[int, int]:
    """Return the places of the lowest and the highest value; of one that is not finite first."""
    found = list(places)
    odd = [i for i in found if not is_drawable(points[i].value)]
    even = [i for i in found if is_drawable(points[i].value)] or odd
    low = min(even, key=lambda i: points[i].value)
    high = max(even, key=lambda i: points[i].value)
    return (odd[0], high) if odd else (low, high)


def _halfway(places: Sequence[Number]) -> list[float]:
    return [(a + b) / 2 for a, b in pairwise(places)]
