"""`jaxfound bench checkpoints`: what saves cost a step."""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, commit_of
from jaxfound.cli.console import open_console

if TYPE_CHECKING:
    from rich.table import Table

    from jaxfound.training.checkpoint_record import Saves, Steps

GIB = 2**30
ROUNDS = {"saves": 5, "steps": 3}

STATE_HELP = "State that is saved; by platform and measurement when 0."
STEP_HELP = "What a step takes at the least, milliseconds; by platform when 0."
ROUNDS_HELP = "Rounds of a measurement; 5 of saves and 3 of steps when 0."


def checkpoints_command(
    only: Annotated[
        Literal["saves", "steps"] | None, typer.Option(help="One of the two measurements.")
    ] = None,
    state_gib: Annotated[float, typer.Option(help=STATE_HELP, min=0)] = 0,
    step_ms: Annotated[float, typer.Option(help=STEP_HELP, min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Steps of each kind in a round.", min=2)] = 200,
    every: Annotated[int, typer.Option(help="Steps from one save to the next.", min=2)] = 100,
    rounds: Annotated[int, typer.Option(help=ROUNDS_HELP, min=0)] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where to save; deleted again.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write or to renew.")] = None,
    note: Annotated[str, typer.Option(help="What else goes on on this machine.")] = "",
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
) -> None:
    """Measure how long saves block beside plain Orbax, and steps beside saves to a slow disk.

    Saves: a state that changes between them, saved by ours and by Orbax in turns. Steps: without
    saves, with a local tier whose uploader brings them to a slow shared one, and with direct saves
    into it. Exits with 1 when a limit is not kept.
    """
    from jaxfound.resources.platform import leave_a_core
    from jaxfound.training.checkpoint_record import Saves, check_device
    from jaxfound.training.measure_checkpoints import measure_saves, measure_steps

    leave_a_core()
    check_device(read(out))
    console, num_bytes = open_console(), int(state_gib * GIB)
    found: dict[str, Saves | Steps] = {}
    for name in ("saves", "steps") if only is None else (only,):
        times = rounds or ROUNDS[name]
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as there:
            if name == "saves":
                one = measure_saves(Path(there), num_bytes=num_bytes, rounds=times)
            else:
                one = measure_steps(
                    Path(there),
                    num_bytes=num_bytes,
                    step_s=step_ms / 1e3,
                    num_steps=steps,
                    every=every,
                    rounds=times,
                )
        console.print(saves_table(one) if isinstance(one, Saves) else steps_table(one))
        console.print(verdict(one), markup=False)
        found[name] = one
        if out is not None:
            write(out, found, note=note, commit=commit)
    if out is not None:
        console.print(f"written to {out}", markup=False)
    if not all(one.is_kept for one in found.values()):
        raise typer.Exit(1)


def read(out: Path | None) -> dict[str, object]:
    """Return what was written there before, nothing when that is nothing."""
    return json.loads(out.read_text("utf-8")) if out is not None and out.exists() else {}


def write(out: Path, found: "dict[str, Saves | Steps]", *, note: str, commit: str) -> None:
    """Write the JSON file; what it holds of the other measurement stays."""
    from jaxfound.training.checkpoint_record import as_record

    record = as_record(
        read(out),
        found=found,
        commit=commit_of(commit),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def saves_table(found: "Saves") -> "Table":
    """Return the savers with what their saves take."""
    from rich.table import Table

    from jaxfound.training.spread import Spread

    title = f"saves of {size_text(found.state.num_bytes)}; a step alone {1e3 * found.step_s:.1f} ms"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("saver", "saves", "blocked ms", "low-high", "until on disk ms"):
        table.add_column(column, justify="left" if column == "saver" else "right")
    for name, times in found.savers.items():
        blocked, total = Spread.of(times.blocked_s), Spread.of(times.total_s)
        table.add_row(
            name,
            str(len(times.blocked_s)),
            f"{1e3 * blocked.median:.1f}",
            f"{1e3 * blocked.low:.1f}-{1e3 * blocked.high:.1f}",
            f"{1e3 * total.median:.0f}",
        )
    return table


def steps_table(found: "Steps") -> "Table":
    """Return the steps of each round."""
    from rich.table import Table

    title = (
        f"steps with a state of {size_text(found.state.num_bytes)}, a save every {found.every}, a "
        f"shared tier of {found.rate_bps / 1e6:.1f} MB/s"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("checkpoints", "round", "median ms", "p99 ms", "mean ms", "longest ms"):
        table.add_column(column, justify="left" if column == "checkpoints" else "right")
    rounds = {"none": found.none, "tiers": found.tiers, "direct": (found.direct,)}
    rows = [(kind, *row) for kind, times in rounds.items() for row in enumerate(times, start=1)]
    for kind, number, one in rows:
        table.add_row(kind, str(number), *(f"{1e3 * seconds:.1f}" for seconds in one))
    return table


def verdict(found: "Saves | Steps") -> str:
    """Return in one line whether the limit was kept."""
    from jaxfound.training.checkpoint_record import SAVE_LIMIT, Saves

    word = "kept" if found.is_kept else "NOT KEPT"
    if isinstance(found, Saves):
        return f"blocked {found.share:.1%} of a plain save; the limit is {SAVE_LIMIT:.0%}: {word}"
    return (
        f"beside tiers the median step is {found.median_ratio - 1:+.1%}, p99 "
        f"{found.p99_ratio - 1:+.1%} (limit {found.limit - 1:+.0%}: {word}); direct saves: mean "
        f"{found.direct_ratio - 1:+.0%}; uploading {found.uploading:.0%} of the time, "
        f"{found.skipped} saves skipped"
    )


def size_text(num_bytes: int) -> str:
    """Return bytes as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
