"""Checkpoints: a snapshot of the state, written in the background, committed whole or not at all.

A checkpoint is a pytree of arrays and a dict of JSON values; it knows no trainer and no model.
"""

from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.manager import CheckpointManager, Restored
from jaxfound.resources.checkpoint.writer import SaveReport, Storage

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "Restored",
    "SaveReport",
    "Storage",
]
