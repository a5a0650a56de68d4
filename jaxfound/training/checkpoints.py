"""The checkpoints of a run as its config asks for them, and what is told of them."""

from collections.abc import Iterator
from pathlib import Path

from jax.sharding import Mesh

from jaxfound.config.train import CheckpointConfig
from jaxfound.resources.checkpoint import CheckpointManager, Tiers
from jaxfound.resources.control import ControlPlane
from jaxfound.training.events import Event


def open_checkpoints(
    cfg: CheckpointConfig, directory: Path, *, mesh: Mesh, plane: ControlPlane
) -> CheckpointManager:
    """Return the manager of the checkpoints in `directory`, for the processes of `plane`.

    Raises:
        CheckpointError: if checkpoint.local_dir cannot be used.
    """
    tiers = Tiers(
        local=Path(cfg.local_dir) if cfg.local_dir else None,
        keep_local=cfg.keep_local,
        upload_mbps=cfg.upload_mbps,
        remote=cfg.remote,
        verify=cfg.verify,
    )
    return CheckpointManager(
        directory,
        keep=cfg.keep,
        mode=cfg.mode,
        tiers=tiers,
        plane=plane,
        layout=dict(mesh.shape),
    )


def committed(checkpoints: CheckpointManager) -> Iterator[Event]:
    """Yield what became of saves since the last call: on disk, skipped, uploaded, or not."""
    for report in checkpoints.take_reports():
        values = {k: v for k, v in report._asdict().items() if k != "step"}
        yield Event("checkpoint", report.step, values)
    for note in checkpoints.take_notes():
        yield Event(note.kind, note.step, note.values)
