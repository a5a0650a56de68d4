"""A tiny training loop whose state tells how many updates it has seen.

Run as a program, it saves step 2, begins to save step 4, and is then stuck in the middle of the
write until it is killed.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.resources.checkpoint.storage import OrbaxStorage

ADAM = optax.adam(1e-2)


def start():
    """Step 0: the probe is minus the number of updates."""
    params = {"probe": jnp.zeros(()), "w": jnp.ones((8, 16))}
    return {
        "params": params,
        "opt": ADAM.init(params["w"]),
        "rng": jax.random.key(7),
        "step": jnp.int32(0),
        "none": jnp.zeros((0, 4), jnp.bfloat16),
    }


@partial(jax.jit, donate_argnums=0)
def update(state):
    rng, noise = jax.random.split(state["rng"])
    gradient = state["params"]["w"] + jax.random.normal(noise, (8, 16))
    change, opt = ADAM.update(gradient, state["opt"])
    params = {
        "probe": state["params"]["probe"] - 1.0,
        "w": optax.apply_updates(state["params"]["w"], change),
    }
    return {
        "params": params,
        "opt": opt,
        "rng": rng,
        "step": state["step"] + 1,
        "none": state["none"],
    }


def train_to(step, *, state=None):
    state = start() if state is None else state
    while int(state["step"]) < step:
        state = update(state)
    return state


def abstract(tree, *, sharding=None):
    """What `tree` is, without its values; `sharding` maps a shape to where it goes."""

    def leaf(x):
        there = x.sharding if sharding is None else sharding(x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    return jax.tree.map(leaf, tree)


def numbers(tree):
    """Host copies of all leaves, random keys as integers."""

    def leaf(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x, copy=True)

    return jax.tree.map(leaf, tree)


def assert_equal(tree, expected):
    """Bit for bit: a checkpoint only moves numbers."""
    jax.tree.map(np.testing.assert_array_equal, numbers(tree), expected)


class GatedStorage(OrbaxStorage):
    """Waits in the middle of a write until `gate` is set."""

    def __init__(self, *, half_written=False):
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.half_written = half_written

    def write(self, directory, arrays):
        if self.half_written:
            directory.mkdir()
            (directory / "half").write_bytes(b"not all of it")
        self.entered.set()
        assert self.gate.wait(30)
        if not self.half_written:
            super().write(directory, arrays)


class FullDisk(OrbaxStorage):
    """Fails as a full file system does, after having written a part."""

    def write(self, directory, arrays):
        directory.mkdir()
        (directory / "part").write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device", str(directory))


def stuck_in_step_4(directory):
    state = train_to(2)
    with CheckpointManager(directory, keep=1, mode="sync") as manager:
        manager.save(2, state, {"data_position": 2})
    storage = GatedStorage(half_written=True)
    manager = CheckpointManager(directory, keep=1, storage=storage)
    manager.restore_latest(like=abstract(state))
    manager.save(4, train_to(4, state=state), {"data_position": 4})
    storage.entered.wait()
    sys.stdout.write("stuck\n")
    sys.stdout.flush()
    time.sleep(60)


if __name__ == "__main__":
    stuck_in_step_4(Path(sys.argv[1]))
