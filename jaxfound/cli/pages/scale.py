"""Axes: where a value lies, which values get a tick, and how numbers and times are written."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

# Beyond this a value is drawn as not finite: its span would overflow.
LARGEST = 1e30
# Values closer than this are one value: their span would underflow.
TINIEST = 1e-30
# What stands where a number would.
ABSENT = "\u2014"
NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


# Steps are whole and values are not; type checks at run time tell them apart.
type Number = int | float


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels.

    Attributes:
        low, high: values at the two ends.
        start, stop: their pixels.
        kind: `log` spaces by ratio; both ends are positive then.
    """

    low: Number
    high: Number
    start: Number
    stop: Number
    kind: Literal["linear", "log"] = "linear"

    def at(self, value: Number) -> float:
        """Return the pixel of a value."""
        low, high, here = (self._spaced(v) for v in (self.low, self.high, value))
        return self.start + (here - low) / (high - low) * (self.stop - self.start)

    def ticks(self, *, about: int) -> list[float]:
        """Return round values inside the scale, `about` as many as asked."""
        if self.kind == "log":
            return _log_ticks(self.low, self.high)
        step = nice_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def _spaced(self, value: Number) -> float:
        return math.log10(value) if self.kind == "log" else float(value)


def is_drawable(value: Number) -> bool:
    """Say whether a value has a place on a scale."""
    return math.isfinite(value) and abs(value) <= LARGEST


def value_scale(
    values: Iterable[Number], *, start: Number, stop: Number, base: Number | None = None
) -> Scale:
    """Return a scale for drawable values, its ends on round numbers.

    Args:
        values: at least one.
        start, stop: pixels of the lower and the upper end.
        base: a value the scale reaches although none may lie there, e.g. 0.
    """
    found = list(values)
    low, high = min(found), max(found)
    if base is None and low > 0 and high / low > 100:
        return Scale(low / 1.2, high * 1.2, start, stop, "log")
    if base is not None:
        low, high = min(low, base), max(high, base)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), TINIEST):
        room = abs(high) * 0.1 if abs(high) > 1e3 * TINIEST else 1.0
        low, high = low - (0.0 if low == base else room), high + room
    step = nice_step((high - low) / 6)
    return Scale(math.floor(low / step) * step, math.ceil(high / step) * step, start, stop)


def step_scale(steps: Iterable[int], *, start: Number, stop: Number) -> Scale:
    """Return a scale over steps; it begins at 0 unless the steps are far from it."""
    found = list(steps)
    low, high = min(found), max(found)
    if low < 0.2 * high or low == high:
        low = 0
    return Scale(low, max(high, low + 1), start, stop)


def nice_step(rough: Number) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in NICE if n * power >= rough * (1 - 1e-9))


def tick_text(value: Number, *, largest: Number) -> str:
    """Return a tick's label; `largest` is the axis' largest magnitude, so that all agree."""
    if value == 0:
        return "0"
    if largest < 1e-3 or largest >= 1e12:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for bound, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if largest >= bound:
            size = 1e3 if suffix == "k" else bound
            return f"{value / size:.6g}{suffix}"
    return f"{value:,.6g}" if abs(value) < 1e4 else f"{value:,.0f}"


def number_text(value: Number | None, *, digits: int = 4) -> str:
    """Return a number to `digits` significant digits; words for what is none."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -3 <= size < 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def bytes_text(value: Number | None) -> str:
    """Return bytes in the largest unit that keeps a digit before the point."""
    for bound, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value is not None and value >= bound:
            return f"{value / bound:.1f} {unit}"
    return ABSENT if value is None else f"{value:.0f} bytes"


def seconds_text(value: Number | None) -> str:
    """Return a duration in the units a person would use."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value < 1:
        return f"{value * 1e3:.3g} ms" if value else "0 s"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def moment_text(unix_s: Number | None) -> str:
    """Return a Unix time as UTC."""
    if unix_s is None or not 0 <= unix_s < 1e11:
        return ABSENT
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _log_ticks(low: Number, high: Number) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = max(1, len(powers) // 5)
    between = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [n * 10.0**p for p in powers if p % apart == 0 for n in between]
    return [tick for tick in ticks if low <= tick <= high]
