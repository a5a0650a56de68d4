"""`jaxfound bench train`: how fast a config trains here, beside the card, a peer and the plan."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, TABLE_WIDTH, commit_of
from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from rich.table import Table

    from jaxfound.config.run import RunConfig
    from jaxfound.training.measure import Asked, Measured
    from jaxfound.training.step_profile import Breakdown
    from jaxfound.training.torch_peer import PeerTimes
    from jaxfound.training.train_record import TrainRow
    from jaxfound.training.turns import SideError

HEADER = (
    *("", "step ms", "low-high", "tokens/s", "MFU full", "MFU causal", "of ceiling"),
    *("compile s", "cached", "peak GB", "loss"),
)
LOOP_HELP = "Rounds that time the loop too, a save at the end of each; as many as rounds when -1."
PEER_HELP = "Time the same model in PyTorch beside it, in turns."
TURNS_HELP = "Times that each side is started anew, the order turned."

Peer = Annotated[Literal["torch"] | None, typer.Option(help=PEER_HELP)]
Limit = Annotated[float, typer.Option(help="That the peer may take in a turn, seconds.", min=1)]
Out = Annotated[Path | None, typer.Option(help="JSON file; rows of other names in it stay.")]
Commit = Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")]


def train_command(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Steps of each kind in one round.", min=3)] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are over them.", min=1)] = 5,
    loop_rounds: Annotated[int, typer.Option(help=LOOP_HELP, min=-1)] = -1,
    profiled: Annotated[int, typer.Option(help="Steps to take apart; 0 = none.", min=0)] = 0,
    ceiling: Annotated[bool, typer.Option("--ceiling", help="Time a bare product too.")] = False,
    peer: Peer = None,
    turns: Annotated[int, typer.Option(help=TURNS_HELP, min=1)] = 1,
    peer_limit_s: Limit = 420.0,
    out: Out = None,
    png: Annotated[Path | None, typer.Option(help="PNG file of all that --out holds.")] = None,
    note: Annotated[str, typer.Option(help="What else goes on on this machine.")] = "",
    commit: Commit = "",
) -> None:
    """Time the step of CONFIG, and say what it reaches and where its time goes.

    Each round times the bare step and then the loop around it. Ids are random and the rate is too
    small to learn by; where documents lie in their rows is as in the data. With --peer or --turns,
    and on a GPU, each side runs in a process of its own. `name=…` names the row of --out.
    """
    from jaxfound.config.load import load
    from jaxfound.training.measure import Asked
    from jaxfound.training.train_record import check_device

    cfg, console = load(config, overrides or ()), open_console()
    if png is not None and out is None:
        raise typer.BadParameter("--png draws what --out holds; give both")
    asked = Asked(steps, rounds, rounds if loop_rounds < 0 else loop_rounds, profiled, ceiling)
    before = read(out)
    if turns > 1 or peer is not None or is_on_accelerator():
        row = in_processes(
            cfg, asked, turns=turns, with_peer=peer is not None, limit_s=peer_limit_s
        )
    else:
        row = in_this_process(cfg, asked)
    check_device(before, row.ours[0].device)
    print_row(row)
    if out is not None:
        record = record_of(before, row, note=note, commit=commit)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        console.print(f"written to {out}", markup=False)
        if png is not None:
            from jaxfound.cli.pages.train_chart import write_chart

            write_chart(record, png)
            console.print(f"drawn to {png}", markup=False)


def is_on_accelerator() -> bool:
    """Return whether JAX would start on one: a process of its own can take all of its memory."""
    from jaxfound.resources.platform import sees_accelerator

    return os.environ.get("JAX_PLATFORMS") != "cpu" and sees_accelerator()


def in_this_process(cfg: "RunConfig", asked: "Asked") -> "TrainRow":
    """Return the row of a config timed by this process."""
    from jaxfound.training.measure import measure_training

    return row_of(cfg, [measure_training(cfg, asked)])


def in_processes(
    cfg: "RunConfig", asked: "Asked", *, turns: int, with_peer: bool, limit_s: float
) -> "TrainRow":
    """Return the row of a config timed by other processes, saying what each found."""
    from jaxfound.training.turns import in_turns, peer_model

    console = open_console()
    peer = peer_model(cfg, asked) if with_peer else None
    found = []
    for one in in_turns(cfg, asked, turns=turns, peer=peer, limit_s=limit_s):
        console.print(progress(one), markup=False)
        found.append(one)
    return row_of(cfg, found)


def row_of(cfg: "RunConfig", found: "list[Measured | PeerTimes | SideError]") -> "TrainRow":
    """Return the row of what each side found."""
    from jaxfound.training.measure import Measured
    from jaxfound.training.torch_peer import PeerTimes
    from jaxfound.training.train_record import TrainRow
    from jaxfound.training.turns import SideError

    return TrainRow(
        cfg=cfg,
        ours=tuple(one for one in found if isinstance(one, Measured)),
        peer=tuple(one for one in found if isinstance(one, PeerTimes)),
        why_no_peer="; ".join(str(one) for one in found if isinstance(one, SideError)),
    )


def progress(one: "Measured | PeerTimes | SideError") -> str:
    """Return one line about a side that is done."""
    from jaxfound.training.measure import Measured
    from jaxfound.training.spread import Spread
    from jaxfound.training.turns import SideError

    if isinstance(one, SideError):
        return f"no peer: {one}"
    if isinstance(one, Measured):
        return f"jaxfound: {1e3 * one.step_s:.1f} ms a step"
    return f"torch: {1e3 * Spread.of(one.step_s).median:.1f} ms a step"


def read(out: Path | None) -> dict[str, Any]:
    """Return what was written there before, nothing when that is nothing."""
    return json.loads(out.read_text("utf-8")) if out is not None and out.exists() else {}


def record_of(before: dict[str, Any], row: "TrainRow", *, note: str, commit: str) -> dict[str, Any]:
    """Return the record with this row in it."""
    from jaxfound.training.train_record import as_record

    return as_record(
        before,
        row,
        commit=commit_of(commit) or row.ours[0].commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
    )


def print_row(row: "TrainRow") -> None:
    """Print what a row holds: sides, formula, loop, parts, plan, verdicts."""
    from jaxfound.training.forecast import report_lines

    console, first = open_console(), row.ours[0]
    wide = open_console(wraps=True)
    if not wide.is_terminal:
        wide.width = TABLE_WIDTH
    console.print(f"{row.cfg.name} on {first.num_devices} x {first.device}", markup=False)
    wide.print(sides_table(row))
    for line in (*facts(row), *report_lines((row.profiled or first).checked)):
        console.print(line, markup=False)
    if row.profiled is not None and row.profiled.breakdown is not None:
        wide.print(*breakdown_tables(row.profiled.breakdown))
    for verdict in row.verdicts:
        console.print(verdict, markup=False)


def facts(row: "TrainRow") -> Iterator[str]:
    """Yield how the figures are made, and what came of the loop, a line each."""
    from jaxfound.training.train_record import formula

    yield f"FLOPs of a step: {formula(row.flops, row.tokens_per_step)}"
    if row.peak_flops is None:
        yield f"no peak is published for {row.ours[0].device}, so no MFU is said"
    else:
        yield f"MFU is against {row.peak_flops / 1e12:,.1f} TFLOP/s, dense bfloat16 as published"
    if row.ceiling_flops is not None:
        ceiling = row.ceiling_flops.median / 1e12
        yield f"ceiling: a bare bfloat16 product ran at {ceiling:,.3g} TFLOP/s"
    if row.ratio is not None:
        yield f"{row.ratio:.3f} times the tokens/s of the peer"
    elif row.why_no_peer:
        yield f"no figures of the peer: {row.why_no_peer}"
    outside = row.ours[0].outside_share
    if outside is not None:
        yield f"outside the compiled step: {outside:.2%} of a step of the loop"
    if row.closure is not None:
        yield f"a profiled step is {row.closure:+.1%} off the bare one"


def sides_table(row: "TrainRow") -> "Table":
    """Return a line for each side."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADER:
        table.add_column(name, justify="right" if name else "left")
    colds = [one.compiles.cold_s for one in row.ours if one.compiles.cold_s is not None]
    cached = [one.compiles.cached_s for one in row.ours if one.compiles.cached_s is not None]
    peak_bytes = max(one.checked.peak_bytes for one in row.ours)
    table.add_row(
        "jaxfound",
        *speed_cells(row.speed(row.step_s)),
        f"{colds[0]:.1f}" if colds else "",
        f"{min(cached):.1f}" if cached else "",
        f"{peak_bytes / 1e9:.1f}" if peak_bytes else "",
        f"{row.ours[0].loss:.3f}",
    )
    if row.peer_step_s is not None:
        times, peak_bytes = row.peer[0], max(one.peak_bytes for one in row.peer)
        table.add_row(
            f"torch {times.torch}",
            *speed_cells(row.speed(row.peer_step_s)),
            f"{times.compile_s:.1f}",
            "",
            f"{peak_bytes / 1e9:.1f}" if peak_bytes else "",
            f"{times.loss:.3f}",
        )
    return table


def speed_cells(speed: dict[str, Any]) -> list[str]:
    """Return a side's figures as text."""
    step_s = speed["step_s"]
    shares = (speed[name] for name in ("mfu_full", "mfu_causal", "of_ceiling"))
    return [
        f"{1e3 * step_s['median']:.2f}",
        f"{1e3 * step_s['low']:.2f}-{1e3 * step_s['high']:.2f}",
        f"{speed['tokens_per_s']:,.0f}",
        *("" if share is None else f"{share:.1%}" for share in shares),
    ]


def breakdown_tables(found: "Breakdown") -> "tuple[Table, Table]":
    """Return the parts of a step with their time, and its costliest operations."""
    from rich.table import Table

    from jaxfound.training.step_profile import KINDS_OF_WORK, PARTS

    title = f"a profiled step: {1e3 * found.step_s:.2f} ms"
    parts = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("part", "ms", "share", "what it is"):
        parts.add_column(column, justify="right" if column in ("ms", "share") else "left")
    for part, seconds in found.parts.items():
        parts.add_row(part, f"{1e3 * seconds:.2f}", f"{seconds / found.step_s:.1%}", PARTS[part])
    parts.add_row("of all this:", "", "", "")
    for kind, seconds in found.kinds.items():
        cells = (f"{1e3 * seconds:.2f}", f"{seconds / found.step_s:.1%}", KINDS_OF_WORK[kind])
        parts.add_row(kind, *cells)
    operations = Table(title="costliest operations", title_justify="left", box=None, pad_edge=False)
    for column in ("operation", "part", "calls", "ms", "source"):
        operations.add_column(column, justify="right" if column in ("calls", "ms") else "left")
    for row in found.operations:
        times = (f"{row.calls:g}", f"{1e3 * row.seconds:.2f}")
        operations.add_row(row.operation, row.part, *times, row.source)
    return parts, operations
