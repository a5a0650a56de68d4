"""`jaxfound train` in a process of a job, whose checkpoints one process gathers and writes.

Everything else is as it is; what is saved is small, so that gathering is nothing.
"""

import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import jaxfound.training.run as runs
from jaxfound.cli.main import main
from jaxfound.resources.checkpoint.manager import Restored
from jaxfound.resources.checkpoint.writer import SaveReport


class GatheredCheckpoints:
    """Steps as files of whole arrays, written by process 0."""

    def __init__(self, directory: Path, **_):
        self.directory, self.reports = directory, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def latest(self):
        return max((int(p.stem) for p in self.directory.glob("*.npz")), default=None)

    def restore_latest(self, *, like):
        step = self.latest()
        if step is None:
            return None
        with np.load(self.directory / f"{step}.npz") as file:
            leaves = [file[str(i)] for i in range(len(file.files))]

        def put(leaf, value):
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: value[at])

        shapes, tree = jax.tree_util.tree_flatten(like)
        return Restored(step, jax.tree_util.tree_unflatten(tree, map(put, shapes, leaves)), {})

    def save(self, step, state, metadata):
        whole = process_allgather(jax.tree_util.tree_leaves(state), tiled=True)
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            new = self.directory / f"{step}.new"
            with new.open("wb") as file:
                np.savez(file, **{str(i): leaf for i, leaf in enumerate(whole)})
            os.replace(new, self.directory / f"{step}.npz")
        self.reports.append(SaveReport(step, 1, 0.0, 1.0))

    def wait(self):
        pass

    def take_reports(self):
        reports, self.reports = self.reports, []
        return reports


runs.CheckpointManager = GatheredCheckpoints
main()
