"""Training door: a run from its config, step by step, resumable at any of them."""

from jaxfound.training.events import Event, NonFiniteError, TrainingError
from jaxfound.training.run import Run, start, train
from jaxfound.training.state import TrainState
from jaxfound.training.step import make_train_step

__all__ = [
    "Event",
    "NonFiniteError",
    "Run",
    "TrainState",
    "TrainingError",
    "make_train_step",
    "start",
    "train",
]
