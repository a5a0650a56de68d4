"""Keeps what came of drills: `pytest -p tests.drill_record --drills FILE …` adds each test to FILE.

A drill that is run again replaces what it was before, so that files may be run one at a time.
"""

import json
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

FORMAT_VERSION = 1


def pytest_addoption(parser):
    parser.addoption("--drills", type=Path, help="JSON file to which outcomes are added")


def pytest_configure(config):
    if config.getoption("--drills"):
        config.pluginmanager.register(Drills(config.getoption("--drills")))


class Drills:
    """The outcome and the seconds of every test, set-up included, until they are written."""

    def __init__(self, path: Path):
        self.path = path
        self.commit = ""
        self.found: dict[str, dict] = {}

    @pytest.hookimpl
    def pytest_sessionstart(self):
        # Not before jaxtyping has put its hook on the package.
        from jaxfound.resources.platform import source_commit

        self.commit = source_commit()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        drill = self.found.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        drill["seconds"] = round(drill["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            drill["outcome"] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            drill["why"] = report.longrepr[2]

    @pytest.hookimpl
    def pytest_sessionfinish(self):
        ran = {
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "jax": version("jax"),
            "cores": os.cpu_count(),
        }
        before = json.loads(self.path.read_text("utf-8"))["drills"] if self.path.exists() else {}
        drills = before | {name: drill | ran for name, drill in self.found.items()}
        record = {"format_version": FORMAT_VERSION, "drills": dict(sorted(drills.items()))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
