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

    def logs(self, attempt: int) -> Path:
        """What the processes of a job said in one attempt, a file each."""
        return self.path / "logs" / f"attempt-{attempt}"
