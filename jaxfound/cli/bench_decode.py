"""`jaxfound bench decode`: time per token while many long rows decode, beside reading memory."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, commit_of
from jaxfound.cli.console import Overrides, open_console
from jaxfound.cli.evaluate import write_json

if TYPE_CHECKING:
    from rich.table import Table

    from jaxfound.config.run import RunConfig
    from jaxfound.serving.decode_point import Load, Point

FORMAT_VERSION = 1
HEADER = ("cache", "rows", "ms/token", "tokens/s", "floor, ms", "share", "read, GB", "peak, GB")
PEER = "jaxfound.serving.transformers_peer"

Rows = Annotated[str, typer.Option(help="Numbers of rows, each a measurement.", metavar="N,…")]
HeadRows = Annotated[
    str, typer.Option(help="The same with keys and values of every head cached.", metavar="N,…")
]
PeerRows = Annotated[
    str, typer.Option(help="The same by Hugging Face transformers, bfloat16.", metavar="N,…")
]


def decode_command(
    model: Annotated[Path, typer.Argument(help="A preset, a YAML file, or a run's folder.")],
    overrides: Overrides = None,
    rows: Rows = "16,64",
    head_rows: HeadRows = "",
    peer_rows: PeerRows = "",
    context: Annotated[int, typer.Option(help="Tokens of each row.", min=2)] = 16384,
    steps: Annotated[int, typer.Option(help="Steps of a round.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Of each measurement.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file; a call is added to it.")] = None,
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
) -> None:
    """Measure how long a token takes by the programs that serve, with weights and pages of noise.

    The floor is the time to read the weights that a step touches (experts chosen evenly) and the
    cache of all rows, at the bandwidth that streaming gets.
    """
    from jaxfound.serving.decode_point import facts
    from jaxfound.serving.measure_decode import measure_pages
    from jaxfound.serving.measure_heads import measure_heads
    from jaxfound.serving.open_model import planned_config

    cfg = planned_config(model, overrides or ())
    loads = {
        name: load_of(given, context=context, steps=steps, rounds=rounds)
        for name, given in (("pages", rows), ("heads", head_rows), ("peer", peer_rows))
    }
    # The peer first: a process of its own, while this one holds nothing of the device.
    peers = [] if loads["peer"] is None else list(measure_peer(cfg, loads["peer"]))
    known = facts(cfg, name=model.stem)
    found: list[Point] = []
    check_record(out, device=str(known["device"]))
    for measure, load in ((measure_pages, loads["pages"]), (measure_heads, loads["heads"])):
        for point in () if load is None else measure(cfg, load):
            found.append(point)
            open_console().print(line_of(point), markup=False)
    open_console().print(table_of(found, peers, title=f"{model.stem}: {context:,} tokens a row"))
    if out is not None:
        call = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of(commit),
            **known,
            "points": [point.as_dict() for point in found],
            "transformers": peers,
        }
        add_call(out, call)
        open_console().print(f"written to {out}", markup=False)


def load_of(given: str, *, context: int, steps: int, rounds: int) -> "Load | None":
    """Return the load of numbers with commas between; None of an empty text.

    Raises:
        ConfigError: they are no numbers, or the context is shorter than the steps.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.serving.decode_point import Load

    if not given.strip():
        return None
    try:
        rows = tuple(int(word) for word in given.split(","))
    except ValueError as error:
        raise ConfigError(f"rows are numbers with commas between, not {given!r}") from error
    return Load(rows, context, steps, rounds)


def measure_peer(cfg: "RunConfig", load: "Load") -> "Sequence[dict[str, object]]":
    """Return what transformers takes for each number of rows, in a process of its own.

    Raises:
        ConfigError: it cannot compute this model, or is not installed.
    """
    import statistics

    from jaxfound.config.schema import ConfigError
    from jaxfound.models.weights.config_out import write_config
    from jaxfound.serving.decode_point import NUM_WARM
    from jaxfound.serving.transformers_peer import PeerLoad, PeerTimes

    model = cfg.model.model_copy(update={"mtp_depth": 0})
    config = write_config(model, dtype="bfloat16")
    results: list[dict[str, object]] = []
    for rows in load.rows:
        asked = PeerLoad(config, rows, load.context, load.steps, NUM_WARM, load.rounds)
        done = subprocess.run(
            [sys.executable, "-m", PEER],
            input=json.dumps(asdict(asked)),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ConfigError(
                f"transformers failed with {rows} rows of {load.context:,} tokens: {last[0]}. "
                "Leave out --peer-rows, or install torch and transformers for this device"
            )
        times = PeerTimes(**json.loads(done.stdout))
        token_s = statistics.median(statistics.median(steps) for steps in times.rounds)
        figures = {name: value for name, value in asdict(times).items() if name != "rounds"}
        medians = [statistics.median(steps) for steps in times.rounds]
        results.append(
            {"rows": rows, "token_s": token_s, "median_step_s_by_round": medians, **figures}
        )
    return results


def line_of(point: "Point") -> str:
    """Return one line about a point that is done."""
    return (
        f"{point.cache}, {point.rows} rows: {1e3 * point.token_s:.3f} ms a token, "
        f"{point.share:.1%} of the floor"
    )


def table_of(
    found: "Sequence[Point]", peers: "Sequence[dict[str, object]]", *, title: str
) -> "Table":
    """Return a table of all points."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "cache" else "right")
    for point in found:
        peak = "-" if point.peak_bytes is None else f"{point.peak_bytes / 1e9:.1f}"
        table.add_row(
            point.cache,
            str(point.rows),
            f"{1e3 * point.token_s:.3f}",
            f"{point.rows / point.token_s:,.0f}",
            f"{1e3 * point.floor_s:.3f}",
            f"{point.share:.1%}",
            f"{(point.weight_bytes + point.cache_bytes) / 1e9:.2f}",
            peak,
        )
    for peer in peers:
        rows, token_s = int(str(peer["rows"])), float(str(peer["token_s"]))
        rate = f"{rows / token_s:,.0f}"
        table.add_row("transformers", str(rows), f"{1e3 * token_s:.3f}", rate, "-", "-", "-", "-")
    return table


def check_record(out: Path | None, *, device: str) -> None:
    """Refuse a record of another device.

    Raises:
        ConfigError: names both devices.
    """
    from jaxfound.config.schema import ConfigError

    there = {str(c["device"]) for c in read_calls(out)} if out and out.exists() else set()
    if there - {device}:
        raise ConfigError(
            f"{out} holds measurements of {', '.join(sorted(there))}; this is {device}. "
            "Name another file"
        )


def read_calls(path: Path) -> list[dict[str, object]]:
    """Return the calls of a record.

    Raises:
        ConfigError: it is not a record of this command.
    """
    from jaxfound.config.schema import ConfigError

    record = json.loads(path.read_text("utf-8"))
    if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"{path} is no record of `bench decode`; name another file")
    return record["calls"]


def add_call(path: Path, call: dict[str, object]) -> None:
    """Add a call to a record, behind those that are there."""
    calls = read_calls(path) if path.exists() else []
    write_json({"format_version": FORMAT_VERSION, "calls": [*calls, call]}, path)
