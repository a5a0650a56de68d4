"""A pipeline schedule over time, one row a rank: as lines of text, and as an SVG file."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxfound.cli.pages.markup import Markup, element
from jaxfound.cli.pages.scale import Number
from jaxfound.parallelism.pipeline.schedule import Action, Op, Schedule, Step
from jaxfound.parallelism.pipeline.simulate import Simulation, TimedStep, text

TEXT_WIDTH = 120
# Characters of a drawing however short its shortest step is; shorter steps lose their label.
MAX_CHARACTERS = 2400

# Fill of the first chunk's passes and of the last one's; those between are mixed.
FILLS: dict[Op, tuple[str, str]] = {
    "F": ("#86b4f5", "#d6e6fd"),
    "B": ("#74c99b", "#d0f0df"),
    "I": ("#f7b267", "#fde4c6"),
    "W": ("#c3a6ea", "#eadffa"),
}
WORDS: dict[Op, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
INK, MUTED, LINE, GROUND, IDLE = "#161a21", "#5a6472", "#ffffff", "#ffffff", "#eceff3"
ROW, GAP, LEFT, RIGHT, TOP = 30.0, 4.0, 64.0, 20.0, 84.0
# Pixels of the shortest step: room for two digits; and of the whole drawing at most.
SHORTEST, MAX_WIDTH, MIN_WIDTH = 20.0, 8000.0, 640.0
DIGIT = 6.6


def text_drawing(schedule: Schedule, simulation: Simulation) -> list[str]:
    """Return the lines of a drawing, folded to `TEXT_WIDTH` columns.

    A step is the letter of its pass and its micro-batch, then dashes until it ends. Letters are
    small in the chunks after a rank's first one. A rank that waits is blank.
    """
    label = len(str(schedule.num_microbatches - 1)) + 1
    scale = min(label / _shortest(simulation), MAX_CHARACTERS / simulation.makespan)
    rows = [_row(schedule, steps, scale) for steps in simulation.steps]
    head = len(f"rank {schedule.num_ranks - 1}  ")
    lines: list[str] = []
    ruler = _ruler(simulation.makespan, scale)
    for part in _folds(simulation, scale, room=TEXT_WIDTH - head):
        lines += ["time".ljust(head) + ruler[part]]
        lines += [f"rank {i}".ljust(head) + row[part] for i, row in enumerate(rows)] + [""]
    return [line.rstrip() for line in lines[:-1]]


def svg_drawing(schedule: Schedule, simulation: Simulation, *, title: str, note: str) -> Markup:
    """Return an SVG file: passes coloured by what they are, F above B where the two are paired.

    Args:
        schedule: what is drawn.
        simulation: when its steps run.
        title: the heading.
        note: a line below it.
    """
    wanted = SHORTEST / _shortest(simulation) * simulation.makespan
    width = max(min(wanted, MAX_WIDTH), MIN_WIDTH)
    scale = width / simulation.makespan
    bottom = TOP + len(simulation.steps) * (ROW + GAP)
    children = [
        element("title", title),
        element("rect", x=0, y=0, width="100%", height="100%", fill=GROUND),
        _words(title, 16, 26, size=17, weight=650),
        _words(note, 16, 46, size=12, fill=MUTED),
        *_legend(schedule),
        *_lanes(schedule, simulation, scale),
        *_axis(simulation.makespan, scale, bottom),
    ]
    size = (LEFT + width + RIGHT, bottom + 34)
    return element(
        "svg",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {size[0]:.0f} {size[1]:.0f}",
        width=f"{size[0]:.0f}",
        height=f"{size[1]:.0f}",
        font_family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif",
    )


def _row(schedule: Schedule, steps: tuple[TimedStep, ...], scale: Number) -> str:
    row = ""
    for step, start, end in steps:
        width = round(end * scale) - round(start * scale)
        label = "".join(_label(schedule, action) for action in step)
        if len(label) > width:
            label = _label(schedule, step[0])
        row = row.ljust(round(start * scale)) + label[:width].ljust(width, "-")
    return row


def _folds(simulation: Simulation, scale: Number, *, room: int) -> Iterator[slice]:
    """Yield the columns of each line: at most `room`, folded where the fewest steps are cut."""
    steps = [one for steps in simulation.steps for one in steps]
    bounds = [(round(one.start * scale), round(one.end * scale)) for one in steps]
    length, start = max(end for _, end in bounds), 0
    while length - start > room:
        columns = range(start + room, start + room * 3 // 4, -1)
        best = min(columns, key=lambda column: sum(a < column < b for a, b in bounds))
        yield slice(start, best)
        start = best
    yield slice(start, length)


def _label(schedule: Schedule, action: Action) -> str:
    chunk = schedule.place(action.microbatch, action.stage).chunk
    return f"{action.op.lower() if chunk else action.op}{action.microbatch}"


def _ruler(makespan: Number, scale: Number) -> str:
    ruler = ""
    for mark in _marks(makespan, room=8 / scale):
        ruler = ruler.ljust(round(mark * scale)) + f"{mark:g} "
    return ruler


def _marks(makespan: Number, *, room: Number) -> Iterator[Number]:
    """Yield round times from 0 on, at least `room` apart."""
    size = 10.0**-6
    while not any(size * step >= room for step in (1, 2, 5)):
        size *= 10
    apart = next(size * step for step in (1, 2, 5) if size * step >= room)
    yield from (round(i * apart, 9) for i in range(int(makespan / apart + 1e-9) + 1))


def _shortest(simulation: Simulation) -> Number:
    times = [one.end - one.start for steps in simulation.steps for one in steps]
    return min(time for time in times if time > 0)


class _Box(NamedTuple):
    x: Number
    y: Number
    width: Number
    height: Number


def _lanes(schedule: Schedule, simulation: Simulation, scale: Number) -> Iterator[Markup]:
    for rank, steps in enumerate(simulation.steps):
        top = TOP + rank * (ROW + GAP)
        yield _words(f"rank {rank}", LEFT - 10, top + ROW / 2 + 4, size=12, anchor="end")
        lane = _Box(LEFT, top, simulation.makespan * scale, ROW)
        yield _rect(lane, IDLE)
        for step, start, end in steps:
            box = _Box(LEFT + start * scale, top, (end - start) * scale, ROW)
            yield from _cell(schedule, step, box)


def _cell(schedule: Schedule, step: Step, box: _Box) -> Iterator[Markup]:
    height = box.height / len(step)
    for i, action in enumerate(step):
        part = _Box(box.x, box.y + i * height, box.width, height)
        yield _rect(part, _fill(schedule, action), text(action))
        number = str(action.microbatch)
        if len(number) * DIGIT + 3 <= box.width:
            middle = (part.x + part.width / 2, part.y + height / 2 + 4)
            yield _words(number, *middle, size=11, anchor="middle")


def _fill(schedule: Schedule, action: Action) -> str:
    chunk = schedule.place(action.microbatch, action.stage).chunk
    return _mixed(FILLS[action.op], chunk / max(schedule.num_chunks - 1, 1))


def _mixed(ends: tuple[str, str], part: Number) -> str:
    """Return the colour that lies `part` of the way from one to the other."""
    first, last = (tuple(bytes.fromhex(colour[1:])) for colour in ends)
    between = (round(a + (b - a) * part) for a, b in zip(first, last, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in between)


def _legend(schedule: Schedule) -> Iterator[Markup]:
    there = {action.op for order in schedule.orders for step in order for action in step}
    x = 16.0
    for op, word in WORDS.items():
        if op not in there:
            continue
        for chunk in range(schedule.num_chunks):
            part = chunk / max(schedule.num_chunks - 1, 1)
            yield _rect(_Box(x, 57, 14, 14), _mixed(FILLS[op], part))
            x += 16
        yield _words(f"{op} {word}", x + 4, 69, size=12, fill=MUTED)
        x += 24 + 6.4 * len(f"{op} {word}")
    if schedule.num_chunks > 1:
        yield _words("paler: a rank's later chunks", x, 69, size=12, fill=MUTED)


def _axis(makespan: Number, scale: Number, bottom: Number) -> Iterator[Markup]:
    for mark in _marks(makespan, room=60 / scale):
        x = LEFT + mark * scale
        yield element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, stroke=MUTED)
        yield _words(f"{mark:g}", x, bottom + 19, size=11, fill=MUTED, anchor="middle")


def _rect(box: _Box, fill: str, tip: str | None = None) -> Markup:
    return element(
        "rect",
        *([element("title", tip)] if tip else []),
        x=box.x,
        y=box.y,
        width=box.width,
        height=box.height,
        fill=fill,
        stroke=LINE,
    )


def _words(
    words: str,
    x: Number,
    y: Number,
    *,
    size: int,
    fill: str = INK,
    weight: int | None = None,
    anchor: str | None = None,
) -> Markup:
    return element(
        "text",
        words,
        x=x,
        y=y,
        fill=fill,
        font_size=size,
        font_weight=weight,
        text_anchor=anchor,
    )
