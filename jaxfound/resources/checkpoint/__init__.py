"""Checkpoints: a snapshot of the state, written in the background, committed whole or not at all.

A checkpoint is a pytree of arrays and a dict of JSON values; it knows no trainer and no model.
"""

from jaxfound.resources.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxfound.resources.checkpoint.manager import CheckpointManager, Restored
from jaxfound.resources.checkpoint.saving import Storage
from jaxfound.resources.checkpoint.tiers import Tiers
from jaxfound.resources.checkpoint.transit import Note
from jaxfound.resources.checkpoint.writer import SaveReport

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "Note",
    "Restored",
    "SaveReport",
    "Storage",
    "Tiers",
]
