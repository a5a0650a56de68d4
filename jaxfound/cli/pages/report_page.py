"""The page about a run, put together from its history and its config's text."""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from jaxfound.cli.pages.chart import Chart, Point, Series, figure
from jaxfound.cli.pages.history import History, State, number, step_of
from jaxfound.cli.pages.markup import Markup, element
from jaxfound.cli.pages.scale import ABSENT, bytes_text, moment_text, number_text, seconds_text
from jaxfound.config.run import RunConfig
from jaxfound.resources.metrics import Record
from jaxfound.training.forecast import Beside, Checked

# More samples than this would bury the first page of a long run.
MAX_SAMPLES = 12
STATES: dict[State, str] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "not finite",
    "open": "running",
    "empty": "not started",
}


class Figure(NamedTuple):
    """One number at the head of the page: what, how much, what a reader should know of it."""

    name: str
    value: str
    note: str


def report_page(
    name: str,
    history: History,
    *,
    config_text: str = "",
    cfg: RunConfig | None = None,
    checked: Checked | None = None,
) -> str:
    """Return one HTML page that needs nothing else; the same for the same arguments.

    Args:
        name: of the run.
        history: what it recorded.
        config_text: its effective config as it is on disk.
        cfg: the same as values; None when this version cannot read it.
        checked: what the plan said beside the first steps; None when it was not written.
    """
    style = files("jaxfound.cli.pages").joinpath("report.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{name}: run report"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element(
            "main",
            heading(name, history, cfg=cfg),
            key_figures(history, cfg=cfg),
            curves(history),
            planned(checked),
            checkpoints(history),
            interruptions(history),
            samples(history),
            config(config_text),
        ),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def heading(name: str, history: History, *, cfg: RunConfig | None) -> Markup:
    """Return the run's name, how it ended, what it is, and when."""
    state = history.state
    moments = history.moments
    when = f"{moment_text(min(moments))} to {moment_text(max(moments))}" if moments else ""
    remarks: dict[State, str] = {
        "open": "No end is recorded: the run is under way, or was cut off.",
        "failed": "The last step recorded was not finite; its update was skipped.",
        "empty": "Nothing is recorded yet.",
    }
    told = [describe(cfg), when, remarks.get(state, "")]
    return element(
        "header",
        element("h1", name),
        element("span", STATES[state], class_=f"status {state}"),
        *(element("p", text) for text in told if text),
    )


def describe(cfg: RunConfig | None) -> str:
    """Return what is trained on what, in a line; nothing without a config."""
    if cfg is None:
        return ""
    model, data = cfg.model, cfg.data
    return (
        f"{model.mixer} + {model.ffn}, {model.num_layers} layers of {model.embed_dim} · "
        f"{data.source}, {data.tokenizer} tokens · compute in {cfg.precision.compute}"
    )


def key_figures(history: History, *, cfg: RunConfig | None) -> Markup:
    """Return the numbers that a reader asks for first."""
    if not history.records:
        return Markup("")
    found = [*loss_figures(history, cfg=cfg), *speed_figures(history), *disk_figures(history)]
    cards = [
        element(
            "div",
            element("dt", f.name),
            element("dd", element("div", f.value, class_="value"), class_="big"),
            element("dd", f.note, class_="note"),
            class_="card",
        )
        for f in found
    ]
    return element("dl", *cards, class_="figures")


def loss_figures(history: History, *, cfg: RunConfig | None) -> list[Figure]:
    """Return the losses and the tokens seen."""
    train, held = history.last("loss"), history.last("eval_loss", event="eval")
    best = min(
        (p for p in history.curve("eval_loss", event="eval") if math.isfinite(p.value)),
        key=lambda p: p.value,
        default=None,
    )
    lowest = f"; lowest {number_text(best.value)} at step {best.step:,}" if best else ""
    per_step, steps = history.tokens_per_step, f"{history.num_steps:,}"
    if cfg is not None:
        per_step = cfg.train.batch_size * cfg.train.seq_len
        steps = f"{history.num_steps:,} of {cfg.train.steps:,}"
    return [
        Figure("Train loss", number_text(train and train.value), loss_note(train)),
        Figure("Held-out loss", number_text(held and held.value), loss_note(held) + lowest),
        Figure(
            "Tokens",
            ABSENT if per_step is None else f"{history.num_steps * per_step:,}",
            f"{steps} steps" + ("" if per_step is None else f", {per_step:,} tokens each"),
        ),
    ]


def loss_note(point: Point | None) -> str:
    """Return the unit of a loss, and the loss in bits."""
    if point is None:
        return "not measured"
    if not math.isfinite(point.value):
        return f"at step {point.step:,}"
    return f"nats a token = {number_text(point.value / math.log(2))} bits"


def speed_figures(history: History) -> list[Figure]:
    """Return the medians of speed, and the time that no step accounts for."""
    idle = history.idle_share
    moments = history.moments
    took_s = max(moments) - min(moments) if moments else None
    return [
        Figure("Tokens a second", number_text(history.median("tokens_per_s")), "median"),
        Figure(
            "Step time",
            seconds_text(history.median("step_time_s")),
            "median, completion to completion",
        ),
        Figure(
            "Outside the step",
            ABSENT if idle is None else f"{idle:.2%}",
            "of step time, devices waiting for the host",
        ),
        Figure("Time", seconds_text(took_s), "first to last record, evaluation included"),
    ]


def disk_figures(history: History) -> list[Figure]:
    """Return what the checkpoints came to."""
    saves = history.of("checkpoint")
    waited = sum(number(r, "blocked_s") or 0.0 for r in saves)
    note = f"training waited {seconds_text(waited)} for them" if saves else "none was committed"
    return [Figure("Checkpoints", str(len(saves)), note)]


def curves(history: History) -> Markup:
    """Return the charts that have something to show."""
    ahead = [p for p in history.curve("ahead_loss") if p.value != 0]
    loads = history.curve("load_imbalance")
    is_routed = any(p.value != 1 for p in loads)
    marks = history.marks()
    series = (
        Series("train", history.curve("loss"), "noisy", colour=1),
        Series("tokens further ahead", ahead, "noisy", colour=3),
        Series("held-out", history.curve("eval_loss", event="eval"), "dots", colour=2),
    )
    drawn = [figure(Chart("Loss", "nats a token", series, marks), wide=True)]
    for title, unit, one, base in (
        ("Speed", "tokens/s", Series("", history.curve("tokens_per_s"), "noisy"), 0),
        ("Learning rate", "", Series("", history.curve("learning_rate")), 0),
        ("Gradient norm", "before clipping", Series("", history.curve("grad_norm"), "noisy"), None),
        (
            "Expert load",
            "busiest over mean, worst layer",
            Series("", loads if is_routed else [], "noisy"),
            1,
        ),
    ):
        drawn.append(figure(Chart(title, unit, (one,), marks, base=base)))
    if not any(drawn):
        return Markup("")
    return section("Curves", element("div", *drawn, class_="charts"))


def planned(checked: Checked | None) -> Markup:
    """Return what the plan said of memory and time, beside what was measured."""
    if checked is None:
        return Markup("")
    ledger = [[kind, bytes_text(n), "", ""] for kind, n in checked.forecast.ledger.items() if n]
    rows = [
        *ledger,
        *(beside_row(row, bytes_text) for row in checked.bytes_beside),
        *(beside_row(row, seconds_text) for row in checked.seconds_beside),
    ]
    note = (
        f"{checked.forecast.refused}; {seconds_text(checked.step_s)} were measured."
        if checked.forecast.refused
        else f"Seconds are of a step, the median of {checked.steps}; bytes are of one device."
    )
    titles = ["of one device", "planned", "measured", "plan is off by"]
    shown = table(titles, rows, label="Planned and measured", texts=(0,))
    return section("Planned and measured", shown, element("p", note, class_="said"))


def beside_row(row: Beside, text: Callable[[float], str]) -> list[str]:
    """Return what was planned and what was measured as cells."""
    if row.measured is None or row.error is None:
        return [row.what, text(row.planned), "", ""]
    return [row.what, text(row.planned), text(row.measured), f"{row.error:+.1%}"]


def checkpoints(history: History) -> Markup:
    """Return what each save cost."""
    rows = [
        [
            f"{step_of(r):,}",
            bytes_text(number(r, "num_bytes")),
            seconds_text(number(r, "blocked_s")),
            seconds_text(number(r, "total_s")),
            moment_text(number(r, "time_s")),
        ]
        for r in history.of("checkpoint")
    ]
    if not rows:
        return Markup("")
    titles = ["step", "size", "training waited", "until committed", "recorded"]
    return section("Checkpoints", table(titles, rows, label="Checkpoints"))


def interruptions(history: History) -> Markup:
    """Return every stop, resume and step that was not finite."""
    told = sorted(
        [(r, what) for r, what in _interrupted(history)],
        key=lambda pair: number(pair[0], "time_s") or 0.0,
    )
    if not told:
        return Markup("")
    rows = [[f"{step_of(r):,}", what, moment_text(number(r, "time_s"))] for r, what in told]
    parts = [table(["step", "what happened", "when"], rows, label="Interruptions", texts=(1,))]
    if history.num_superseded:
        note = f"{history.num_superseded:,} records of steps that were run again are not drawn."
        parts.append(element("p", note, class_="said"))
    return section("Interruptions", *parts)


def _interrupted(history: History) -> Iterable[tuple[Record, str]]:
    for record in history.stops:
        yield record, f"stopped by {record.get('signal') or 'request'}, state saved"
    for record in history.resumes:
        yield record, "resumed from this step"
    for record in history.non_finite:
        yield (
            record,
            f"not finite: update skipped, batch kept in {record.get('batch') or 'no file'}",
        )
    for record in history.demoted:
        patterns = record.get("patterns")
        named = ", ".join(map(str, patterns)) if isinstance(patterns, list) else "layers"
        yield record, f"left fp8: {named}"


def samples(history: History) -> Markup:
    """Return what the model wrote, the newest first."""
    found = list(reversed(history.of("sample")))[:MAX_SAMPLES]
    cards = []
    for record in found:
        prompt, text = str(record.get("prompt") or ""), str(record.get("text") or "")
        written = element("pre", element("b", prompt), text.removeprefix(prompt))
        at = element("p", f"step {step_of(record):,}")
        cards.append(element("article", at, written, class_="card sample"))
    return section("Samples", *cards) if cards else Markup("")


def config(text: str) -> Markup:
    """Return the effective config, folded."""
    if not text.strip():
        return Markup("")
    summary = element("summary", f"config.yaml, {len(text.splitlines())} lines")
    shown = element("details", summary, element("pre", text), class_="card")
    return section("Effective config", shown)


def section(title: str, *children: str) -> Markup:
    """Return a part of the page under its own heading."""
    return element("section", element("h2", title), *children)


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, texts: Sequence[int] = ()
) -> Markup:
    """Return a table that scrolls sideways where the window is narrow.

    Args:
        titles: of the columns.
        rows: cells as text.
        label: what a screen reader calls it.
        texts: columns that hold words; the others are numbers.
    """
    classes = ["text fold" if i in texts else None for i in range(len(titles))]
    head = [element("th", t, scope="col", class_=c) for t, c in zip(titles, classes, strict=True)]
    body = [
        element("tr", *(element("td", v, class_=c) for v, c in zip(row, classes, strict=True)))
        for row in rows
    ]
    whole = element(
        "table", element("thead", element("tr", *head)), element("tbody", *body), aria_label=label
    )
    return element(
        "div", whole, class_="card scroll", tabindex="0", role="region", aria_label=label
    )
