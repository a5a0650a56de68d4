"""Logging for a program that is ours: an event and its fields on a line, for people and as JSON.

Importing jaxfound sets nothing up: a host application's handlers see our records as any other's,
and `configure_logging` is for programs that have none.
"""

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from jaxfound.resources import json_lines

# Our packages: `level` is theirs, and other packages are heard from WARNING up.
LOGGERS = ("jaxfound", "pallas_kernels")
Level = int | str
# A process keeps its newest records: one file that grows to this size, and so many full ones.
MAX_BYTES = 16 * 2**20
FULL_FILES = 3

# What every record has; anything else came in through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(
    level: Level = "INFO",
    *,
    json_path: Path | None = None,
    json_level: Level | None = None,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Show records on stderr, and append them to `json_path` as JSON lines.

    The handlers sit on the root logger: without one there, the first library that logs through
    `logging.info` puts up a handler of its own, which says everything a second time. Handlers of an
    earlier call are replaced, those of others are left alone.

    Args:
        level: of what is shown.
        json_path: a file of this process alone; full, it becomes `….1`, that one `….2` and so on.
        json_level: of what is written there; `level` by default.
        max_bytes: at which a file is full.

    Raises:
        ValueError: if `level` is no level.
    """
    handlers: list[logging.Handler] = [StderrHandler()]
    handlers[0].setLevel(level)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        file = OurFileHandler(
            json_path, encoding="utf-8", delay=True, maxBytes=max_bytes, backupCount=FULL_FILES
        )
        file.setFormatter(JsonFormatter())
        file.setLevel(level if json_level is None else json_level)
        handlers.append(file)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(min(handler.level for handler in handlers))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, StderrHandler | OurFileHandler)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return what the caller passed in `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class HumanFormatter(logging.Formatter):
    """`16:53:28 INFO checkpoint.saved step=40 num_bytes=1024`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        fields = [f"{name}={_short(value)}" for name, value in fields_of(record).items()]
        return " ".join([super().formatMessage(record), *fields])


class JsonFormatter(logging.Formatter):
    """A JSON object with `time_s`, `level`, `logger`, `event`, the fields, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of strict JSON, without the line end."""
        line: dict[str, object] = {
            "time_s": record.created,
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **{name: _plain(value) for name, value in fields_of(record).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_lines.to_line(line).rstrip("\n")


class StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is when a record comes, so that redirection works."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(HumanFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record` as one line."""
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


class OurFileHandler(RotatingFileHandler):
    """A file that `configure_logging` opened and may close."""


def _short(value: object) -> str:
    """Return `value` for people: floats to four digits, text with blanks in quotes."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text or not text else text


def _plain(value: object) -> object:
    """Return `value` as JSON data; a log line is never lost to a value that is none."""
    try:
        return json_lines.to_plain(value)
    except TypeError:
        return str(value)
