"""Opens matplotlib, which is an extra, and puts what was drawn into a PNG file."""

import importlib
from pathlib import Path
from typing import Any

from jaxfound.config.schema import ConfigError

DPI = 150


def open_pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'jaxfound[plots]'"
        ) from None
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a figure of pyplot as a PNG, its folder too, and let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    open_pyplot().close(figure)
