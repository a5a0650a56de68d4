"""What a run leaves on disk, by name: its config, its numbers, its checkpoints."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run.

    Attributes:
        path: the folder; it need not exist.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The effective config, reloadable."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON record a line."""
        return self.path / "metrics.jsonl"

    @property
    def planned(self) -> Path:
        """What the plan said beside what the first steps measured, JSON."""
        return self.path / "planned.json"

    @property
    def starts(self) -> Path:
        """What each start of the run trained with, a JSON record a line."""
        return self.path / "starts.jsonl"

    @property
    def goodput(self) -> Path:
        """Where the seconds went, a JSON record a line."""
        return self.path / "goodput.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder a committed step."""
        return self.path / "checkpoints"

    @property
    def bad_batches(self) -> Path:
        """Batches of steps that were not finite."""
        return self.path / "bad_batches"

    def newest_attempt(self, process: int) -> int:
        """Return the newest attempt of which there is a log of `process`, -1 without any."""
        logs = self.path.glob(f"logs/attempt-*/process-{process}.log")
        names = (path.parent.name.removeprefix("attempt-") for path in logs)
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def logs(self, attempt: int) -> Path:
        """What the processes of a job said in one attempt, a file each."""
        return self.path / "logs" / f"attempt-{attempt}"
