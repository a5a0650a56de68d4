"""`jaxfound train`: say what will happen, train, show it, end with a sample."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.config.run import RunConfig
    from jaxfound.resources.launch.place import Place
    from jaxfound.training.events import Event

SAMPLE_TOKENS = 200


def train_command(
    config: ConfigPath,
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="Sampled from at the end; empty = no sample.")] = (
        "The "
    ),
) -> None:
    """Train as CONFIG says, going on from the run's newest checkpoint if there is one.

    Ctrl-C or SIGTERM ends the step, saves and leaves; the same command goes on from there.
    """
    from jaxfound.config.load import load
    from jaxfound.resources.platform import use_compile_cache
    from jaxfound.training.run import run_directory, train

    cfg = load(config, overrides or ())
    place = join_job()
    start_log(cfg, place)
    use_compile_cache(Path(cfg.runs_dir) / ".cache" / "compiled")
    if place is not None and place.process:
        # All processes see the same; the first one tells it.
        leave_job(last=deque(train(cfg, place=place), maxlen=1).pop())
        return
    console = open_console()
    last = show(train(cfg, place=place), cfg=cfg, console=console)
    if place is not None:
        leave_job(last=last)
    if last is None or last.kind != "finished":
        return
    there = run_directory(cfg)
    if last.values.get("again"):
        console.print(
            f"nothing to do: {there.path} has its {cfg.train.steps} steps. Raise train.steps to "
            "go on, or give a new run its own name=…"
        )
        return
    if prompt and (place is None or place.num_processes == 1):
        show_sample(there.path, prompt=prompt, console=console)
    console.print(f"next: jaxfound report {there.path} · jaxfound generate {there.path} PROMPT")


def join_job() -> "Place | None":
    """Join the job that an agent started this process for; None when nobody did."""
    from jaxfound.resources.launch.place import Place

    place = Place.from_env()
    if place is None:
        return None
    from jaxfound.resources.launch.join import end_at_once_on_errors, join

    end_at_once_on_errors()
    return join(place)


def start_log(cfg: "RunConfig", place: "Place | None") -> None:
    """Write what this process says to a file of its own, its clock against process 0's first."""
    from jaxfound.resources.clock import log_offset
    from jaxfound.resources.collect import next_attempt
    from jaxfound.resources.control import ControlPlane
    from jaxfound.resources.logs import configure_logging
    from jaxfound.training.run import run_directory

    there, plane = run_directory(cfg), ControlPlane.of_job()
    attempt = next_attempt(there.path / "logs") if place is None else place.attempt
    path = there.logs(attempt) / f"process-{plane.process}.jsonl"
    configure_logging("WARNING", json_path=path, json_level="INFO")
    log_offset(plane)


def leave_job(*, last: "Event | None") -> None:
    """Leave the job in order; after a stop, with the code that says so."""
    from jaxfound.resources.launch.exits import Exit
    from jaxfound.resources.launch.join import leave, leave_now

    leave()
    if last is not None and last.kind == "stopped":
        leave_now(Exit.PREEMPTED)


def show(events: Iterator["Event"], *, cfg: "RunConfig", console: Console) -> "Event | None":
    """Draw the events as they come; return the last one."""
    event = None
    started_s = time.monotonic()
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=cfg.train.steps, now="compiling")
        for event in events:
            if event.kind == "step":
                progress.update(task, completed=event.step, now=step_line(event.values))
            elif event.kind != "train" or not console.is_terminal:
                progress.console.print(LINES[event.kind](event))
    if event is not None and event.kind == "finished" and not event.values.get("again"):
        console.print(f"{time.monotonic() - started_s:.0f} s in all")
    return event


def step_line(values: Mapping[str, object]) -> str:
    """Return a step's numbers as one short line."""
    number = {k: cast(float, v) for k, v in values.items() if isinstance(v, float)}
    eta = f"  eta {number['eta_s']:.0f} s" if "eta_s" in number else ""
    skipped = "  SKIPPED" if values["skipped"] else ""
    return (
        f"loss {number['loss']:.4f}  lr {number['learning_rate']:.2e}  "
        f"{number['tokens_per_s']:,.0f} tokens/s  {number['step_time_s'] * 1e3:.0f} ms"
        f"{eta}{skipped}"
    )


def _eval_line(event: "Event") -> str:
    values = event.values
    return (
        f"step {event.step}: held-out loss {values['eval_loss']:.4f} nats a token "
        f"over {values['num_targets']:,} tokens"
    )


def _checkpoint_line(event: "Event") -> str:
    values = event.values
    return (
        f"step {event.step}: saved {cast(int, values['num_bytes']) / 1e6:.1f} MB in "
        f"{values['total_s']:.2f} s (training waited {values['blocked_s']:.3f} s)"
    )


def _planned_lines(event: "Event") -> str:
    from jaxfound.training.forecast import Checked, report_lines

    return "\n".join(report_lines(Checked.from_data(event.values)))


LINES: Mapping[str, Callable[["Event"], str]] = {
    "plan": lambda e: str(e.values["text"]),
    "planned": _planned_lines,
    "resume": lambda e: f"going on from step {e.step} of {e.values['steps']}",
    "train": lambda e: f"step {e.step}: {step_line(e.values)}",
    "eval": _eval_line,
    "checkpoint": _checkpoint_line,
    "save_skipped": lambda e: f"step {e.step}: NOT SAVED, the save before is still being written",
    "uploaded": lambda e: f"step {e.step}: whole in the run's folder",
    "stored": lambda e: f"step {e.step}: in the object store",
    "upload_failed": lambda e: f"step {e.step}: UPLOAD FAILED, {e.values['error']}",
    "demoted": lambda e: f"step {e.step}: {e.values['patterns']} left fp8: {e.values['reason']}",
    "non_finite": lambda e: f"step {e.step}: NOT FINITE, update skipped, batch {e.values['batch']}",
    "straggler": lambda e: (
        f"step {e.step}: process {e.values['process']} is slow: {e.values['own_s']:.3f} s a step "
        f"of its own work ({e.values['phase']}), the others {e.values['median_s']:.3f} s"
    ),
    "stopped": lambda e: f"{e.values['signal']}: saved step {e.step} of {e.values['steps']}",
    "finished": lambda e: f"finished at step {e.step}",
}


def show_sample(run: Path, *, prompt: str, console: Console) -> None:
    """Print a continuation of `prompt` and add it to the run's record."""
    from jaxfound.resources.metrics import MetricsWriter
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.serving import load_generator

    generator = load_generator(run)
    limit = generator.frame.cfg.max_positions // 2
    text = generator.text(prompt, max_tokens=min(SAMPLE_TOKENS, limit))
    with MetricsWriter(RunDirectory(run).metrics) as metrics:
        metrics.write("sample", step=generator.step, prompt=prompt, text=text)
    console.print("sample:", style="bold")
    console.print(f"{prompt}{text}", markup=False)
