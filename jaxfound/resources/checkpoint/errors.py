"""The errors of this room: what is wrong with a checkpoint, where, and the way out."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or restored."""


class DamagedCheckpointError(CheckpointError):
    """A committed checkpoint whose files are not the ones that were written."""


def describe_error(error: BaseException) -> str:
    """Return the kind and the text of `error`."""
    return f"{type(error).__name__}: {error}"
