"""`jaxfound train`: say what will happen, train, show it, end with a sample."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.config.run import RunConfig
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
    start_log(cfg)
    use_compile_cache(Path(cfg.runs_dir) / ".cache" / "compiled")
    console = open_console()
    last = show(train(cfg), cfg=cfg, console=console)
    if last is None or last.kind != "finished":
        return
    there = run_directory(cfg)
    if last.values.get("again"):
        console.print(
            f"nothing to do: {there.path} has its {cfg.train.steps} steps. Raise train.steps to "
            "go on, or give a new run its own name=…"
        )
        return
    if prompt:
        show_sample(there.path, prompt=prompt, console=console)
    console.print(f"next: jaxfound report {there.path} · jaxfound generate {there.path} PROMPT")


def start_log(cfg: "RunConfig") -> None:
    """Write what this process says to a file of its own, its clock against process 0's first."""
    import os

    from jaxfound.resources.clock import log_offset
    from jaxfound.resources.collect import next_attempt
    from jaxfound.resources.control import ControlPlane
    from jaxfound.resources.logs import configure_logging
    from jaxfound.training.run import run_directory

    there, plane = run_directory(cfg), ControlPlane.of_job()
    told = os.environ.get("JAXFOUND_ATTEMPT")
    attempt = int(told) if told else next_attempt(there.path / "logs")
    path = there.logs(attempt) / f"process-{plane.process}.jsonl"
    configure_logging("WARNING", json_path=path, json_level="INFO")
    log_offset(plane)


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


LINES: Mapping[str, Callable[["Event"], str]] = {
    "plan": lambda e: str(e.values["text"]),
    "resume": lambda e: f"going on from step {e.step} of {e.values['steps']}",
    "train": lambda e: f"step {e.step}: {step_line(e.values)}",
    "eval": _eval_line,
    "checkpoint": _checkpoint_line,
    "non_finite": lambda e: f"step {e.step}: NOT FINITE, update skipped, batch {e.values['batch']}",
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
