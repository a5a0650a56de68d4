"""`jaxfound report`: one HTML page about a run."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import RunPath, open_console

if TYPE_CHECKING:
    from jaxfound.config.run import RunConfig
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.forecast import Checked

log = logging.getLogger(__name__)


def report_command(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes; RUN/report.html.", metavar="FILE")
    ] = None,
) -> None:
    """Write one HTML page about RUN: curves, timings, checkpoints, samples, config.

    It holds everything it shows, so it can be mailed or opened without a network.
    """
    path = write_report(run, out=out)
    open_console().print(f"wrote {path}", markup=False)


def read_config(there: "RunDirectory") -> "RunConfig | None":
    """Return the run's config, None when it is not there or of another version."""
    from jaxfound.config.load import load
    from jaxfound.config.schema import ConfigError

    try:
        return load(there.config) if there.config.exists() else None
    except ConfigError as error:
        log.warning("report.config_unread", extra={"error": str(error)})
        return None


def read_planned(there: "RunDirectory") -> "Checked | None":
    """Return what the plan said beside the first steps, None when that was not written."""
    from jaxfound.training.forecast import Checked

    if not there.planned.exists():
        return None
    return Checked.from_data(json.loads(there.planned.read_text("utf-8")))


def write_report(run: Path, *, out: Path | None = None) -> Path:
    """Write the page about a run's folder and return where it is.

    Args:
        run: a run's folder; it may be in the middle of its training.
        out: the page; `report.html` in the folder when None.
    Raises:
        typer.BadParameter: if the folder is no run's, or its record is damaged.
    """
    from jaxfound.cli.pages.history import read_history
    from jaxfound.cli.pages.report_page import report_page
    from jaxfound.resources.run_directory import RunDirectory

    there = RunDirectory(run)
    if not there.metrics.exists() and not there.config.exists():
        raise typer.BadParameter(
            f"{run} holds neither {there.metrics.name} nor {there.config.name}: it is not a run's "
            "folder. `jaxfound train` makes one as runs_dir/name, e.g. runs/tiny-mla-moe"
        )
    try:
        history = read_history(there.metrics)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    text = there.config.read_text("utf-8", "replace") if there.config.exists() else ""
    page = report_page(
        run.resolve().name,
        history,
        config_text=text,
        cfg=read_config(there),
        checked=read_planned(there),
    )
    path = out or run / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
