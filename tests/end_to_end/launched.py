"""Runs that an agent starts on simulated hosts, small enough to be started again and again."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxfound.config.load import save
from jaxfound.config.run import RunConfig
from jaxfound.resources.launch.agent import Agent, Told
from jaxfound.resources.launch.hosts import Asked, places_of
from jaxfound.resources.launch.ports import free_ports
from jaxfound.resources.metrics import read_metrics
from jaxfound.resources.run_directory import RunDirectory
from tests.training.tiny import state_at, tiny

STEPS = 14
# Rows that two and three processes can share; a hang is one after some seconds.
OPTIONS = (
    f"train.steps={STEPS}", "train.batch_size=6", "optimizer.warmup_steps=2", "checkpoint.every=2",
    "train.eval_batches=1", "watch.hang_s=6", "watch.slow_s=120",
)  # fmt: skip
# Where this very package is imported from.
IMPORTS = os.pathsep.join([".", *sys.path])


class Ended(NamedTuple):
    """A run that is over: what the agent told, the run's numbers, and its last state."""

    events: list[Told]
    directory: RunDirectory
    records: list[dict]
    state: Mapping[str, np.ndarray]

    @property
    def code(self) -> int:
        return self.events[-1].values["code"]

    def of_kind(self, kind: str) -> list:
        return [event.values for event in self.events if event.kind == kind]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {r["step"]: r["loss"] for r in self.records if r["event"] == "train"}


def launched(folder: Path, *overrides: str, hosts: int, devices: int, **options) -> Ended:
    """Train on simulated hosts until the agent is done; options as of `told`."""
    cfg = tiny(folder, *OPTIONS, *overrides)
    return ended(cfg, told(cfg, folder, hosts=hosts, devices=devices, **options))


def told(
    cfg: RunConfig, folder: Path, *, hosts: int, devices: int, failures: str = "", **options
) -> list[Told]:
    """Return what an agent tells to its end; `failures` are of one attempt each."""
    folder.mkdir(exist_ok=True)
    save(cfg, folder / "tiny.yaml")
    directory = RunDirectory(Path(cfg.runs_dir) / cfg.name)
    asked = Asked(simulate_hosts=hosts, devices_per_host=devices)
    places = places_of(
        asked, task=None, accelerators=0, host="here", run_id="run", port=free_ports()
    )
    agent = Agent(command_of(folder), places, directory, disks=folder / "disks", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFOUND_FAILPOINT", failures)
        patch.setenv("PYTHONPATH", IMPORTS)
        return list(agent.run())


def command_of(folder: Path) -> tuple[str, ...]:
    """Return the command that trains the run whose config is in `folder`."""
    program = (sys.executable, "-m", "jaxfound.cli.main")
    return (*program, "train", str(folder / "tiny.yaml"), "--prompt", "")


def ended(cfg: RunConfig, events: list[Told]) -> Ended:
    """Return what a run left."""
    directory = RunDirectory(Path(cfg.runs_dir) / cfg.name)
    records = list(read_metrics(directory.metrics))
    done = [r["step"] for r in records if r["event"] in ("finished", "stopped")]
    return Ended(events, directory, records, state_at(cfg, done[-1]))
