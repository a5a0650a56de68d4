"""The page about a plan and the step that was compiled for it."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate

from jaxfound.cli.pages.markup import Markup, element, joined
from jaxfound.cli.pages.report_page import Figure, section, table
from jaxfound.cli.pages.scale import ABSENT, bytes_text, seconds_text
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.training.compiled_step import CompiledStep, Sent

# Collectives that the folded table lists, the most bytes first.
MAX_SENT = 200
VERDICTS = {True: ("fits", "finished"), False: ("does not fit", "failed"), None: ("", "")}
BAR_WIDTH, BAR_HEIGHT, BAR_GAP, NAME_WIDTH = 1000.0, 26.0, 34.0, 92.0
NUM_COLOURS = 3
# Parts narrower than this have no room for their name; it is under the pointer.
MIN_NAMED = 90.0

type Part = tuple[str, int]


def plan_page(name: str, plan: ParallelPlan, step: CompiledStep) -> str:
    """Return one HTML page that needs nothing else; the same for the same arguments.

    Args:
        name: of the run.
        plan: its layout.
        step: what the compiler made of it.
    """
    style = files("jaxfound.cli.pages").joinpath("report.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{name}: compiled plan"),
        element("style", Markup(style)),
    )
    body = element(
        "main",
        heading(name, plan, step),
        figures(step),
        memory(plan, step),
        buffers(step),
        traffic(step),
        every_collective(step),
        plan_text(plan),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


def heading(name: str, plan: ParallelPlan, step: CompiledStep) -> Markup:
    """Return the run's name, the verdict, and what it was compiled for."""
    text, class_ = VERDICTS[step.fits]
    status = [element("span", text, class_=f"status {class_}")] if text else []
    told = [f"{plan.degrees_text()} · compiled for {step.target}", step.stand_in, *step.notes]
    lines = (element("p", line) for line in told if line)
    return element("header", element("h1", name), *status, *lines)


def figures(step: CompiledStep) -> Markup:
    """Return the numbers that a reader asks for first."""
    total = step.planned[-1]
    room = f"of {bytes_text(step.capacity_bytes)}" if step.capacity_bytes else "capacity not known"
    waits = ABSENT
    if step.work_s is not None and step.waited_s is not None:
        waits = f"{step.waited_s / max(step.work_s + step.waited_s, 1e-30):.0%}"
    found = [
        Figure("A device needs", bytes_text(step.memory.total), f"{room}, by the compiler"),
        Figure("The plan said", bytes_text(total.planned), f"{total.deviation:+.1%}"),
        Figure(
            "Waiting for wires",
            waits,
            f"of a step: {seconds_text(step.waited_s)} beside {seconds_text(step.work_s)} of work, "
            "at the published peaks",
        ),
        Figure(
            "Compiled in",
            seconds_text(step.took.compile_s),
            f"{seconds_text(step.took.cpu_s)} of CPU time, tracing included",
        ),
    ]
    cards = (
        element(
            "div",
            element("dt", f.name),
            element("dd", element("div", f.value, class_="value"), class_="big"),
            element("dd", f.note, class_="note"),
            class_="card",
        )
        for f in found
    )
    return element("dl", *cards, class_="figures")


def memory(plan: ParallelPlan, step: CompiledStep) -> Markup:
    """Return the plan's bytes beside the compiler's, drawn and in numbers."""
    rows = [
        [row.what, f"{row.planned:,}", f"{row.compiled:,}", f"{row.deviation:+.1%}"]
        for row in step.planned
    ]
    titles = ["bytes of one device", "plan", "compiler", "plan is off by"]
    return section(
        "Memory",
        element("figure", bars(plan, step), class_="card"),
        table(titles, rows, label="Memory", texts=(0,)),
    )


def bars(plan: ParallelPlan, step: CompiledStep) -> Markup:
    """Return two bars of bytes on one scale, and a line where the memory ends."""
    beside = step.memory.outputs - step.memory.aliased
    drawn: list[tuple[str, Sequence[Part]]] = [
        ("plan", [(e.kind, e.num_bytes) for e in plan.ledger.entries]),
        (
            "compiler",
            [
                ("arguments", step.memory.arguments),
                ("temporaries", step.memory.temporaries),
                ("outputs beside them", beside),
                ("workspace", step.workspace_bytes),
                ("margin", step.margin_bytes),
            ],
        ),
    ]
    most = max(step.capacity_bytes, *(sum(n for _, n in parts) for _, parts in drawn), 1)
    scale = (BAR_WIDTH - NAME_WIDTH) / most
    height = BAR_GAP * len(drawn) + 18
    shown = [joined(*bar(name, parts, i, scale)) for i, (name, parts) in enumerate(drawn)]
    if step.capacity_bytes:
        shown.append(limit(NAME_WIDTH + step.capacity_bytes * scale, height, step.capacity_bytes))
    return element(
        "svg",
        *shown,
        viewBox=f"0 0 {BAR_WIDTH:g} {height:g}",
        role="img",
        aria_label="Bytes of one device by the plan and by the compiler",
        class_="chart",
    )


def bar(name: str, parts: Sequence[Part], row: int, scale: float) -> Iterator[Markup]:
    """Yield a bar's name and its parts, each with its bytes under the pointer."""
    top = row * BAR_GAP
    yield element("text", name, x=NAME_WIDTH - 10, y=top + 18, class_="y")
    begins = accumulate((n for _, n in parts), initial=0)
    for i, ((kind, num_bytes), begin) in enumerate(zip(parts, begins, strict=False)):
        width = num_bytes * scale
        if width < 0.1:
            continue
        left = NAME_WIDTH + begin * scale
        box = element(
            "rect",
            element("title", f"{kind}: {num_bytes:,} bytes"),
            x=left,
            y=top,
            width=width,
            height=BAR_HEIGHT,
            fill="none" if kind == "margin" else "currentColor",
            stroke="currentColor",
            fill_opacity="0.55" if i // NUM_COLOURS % 2 else "0.85",
        )
        yield element("g", box, class_=f"c{i % NUM_COLOURS + 1}")
        if width >= MIN_NAMED:
            yield element("text", kind, x=left + 6, y=top + 18, style="fill: var(--ground)")


def limit(x: float, height: float, capacity_bytes: int) -> Markup:
    """Return a line where the memory of a device ends."""
    title = element("title", f"memory of the device: {capacity_bytes:,} bytes")
    line = element("line", title, x1=x, x2=x, y1=0, y2=height - 14, class_="cross")
    name = element("text", bytes_text(capacity_bytes), x=x - 4, y=height - 2, class_="y")
    return joined(line, name)


def buffers(step: CompiledStep) -> Markup:
    """Return what lives inside the step, by the line that makes it."""
    if not step.buffers:
        return Markup("")
    rows = [
        [b.source, b.type.partition("{")[0], str(b.count), bytes_text(b.num_bytes)]
        for b in step.buffers
    ]
    titles = ["made at", "largest", "arrays", "bytes"]
    return section("Inside the step", table(titles, rows, label="Buffers", texts=(0, 1)))


def traffic(step: CompiledStep) -> Markup:
    """Return what a device sends in a step, by axes and kind."""
    rows = [
        [
            " x ".join(row.axes),
            row.collective,
            row.link,
            f"{row.calls:,}",
            f"{row.in_background} of {row.places}",
            bytes_text(row.num_bytes),
            seconds_text(row.seconds),
            ABSENT if row.covered is None else f"{row.covered:.0%}",
        ]
        for row in step.traffic
    ]
    if not rows:
        return section("Collectives", element("p", "None leaves a device.", class_="said"))
    titles = ["axes", "collective", "link", "calls", "in background", "bytes", "time", "covered"]
    return section("Collectives", table(titles, rows, label="Collectives", texts=(0, 1, 2)))


def every_collective(step: CompiledStep) -> Markup:
    """Return each collective of the program, folded."""
    found = sorted(step.sent, key=lambda s: -s.step_bytes)[:MAX_SENT]
    if not found:
        return Markup("")
    titles = ["line", "collective", "axes", "calls", "bytes a call", "time", "beside it", "waited"]
    rows = [sent_row(one) for one in found]
    listed = table(titles, rows, label="Each collective", texts=(0, 1, 2))
    summary = element("summary", f"Each of {len(step.sent)}, the most bytes first; times of a call")
    return element("details", summary, listed, class_="card")


def sent_row(one: Sent) -> list[str]:
    """Return a collective as the cells of a row."""
    kind = one.collective if one.is_async else f"{one.collective}, in the foreground"
    return [
        one.source or ABSENT,
        f"{kind}, in a branch" if one.in_branch else kind,
        " x ".join(one.axes) or ABSENT,
        f"{one.calls:,}",
        bytes_text(one.num_bytes),
        seconds_text(one.seconds),
        seconds_text(one.beside_s),
        seconds_text(one.waited_s),
    ]


def plan_text(plan: ParallelPlan) -> Markup:
    """Return the plan's own words, folded."""
    text = plan.explain()
    summary = element("summary", f"The plan, {len(text.splitlines())} lines")
    return section("Plan", element("details", summary, element("pre", text), class_="card"))
