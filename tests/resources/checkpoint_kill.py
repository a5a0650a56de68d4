"""Kills a save, an upload or a restore at a named place, and looks at what a new start finds.

One program for all places: it imports once and forks a process for each start, before JAX has
threads. Prints a line of JSON a place. `python -m tests.resources.checkpoint_kill FOLDER PLACE…`
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxfound.resources.checkpoint import CheckpointManager, Tiers, uploader
from jaxfound.resources.failpoint import VARIABLE
from tests.resources import probe


def state_at(step):
    return {"w": jnp.arange(64.0) + step, "key": jax.random.key(step)}


def one_start(root, *, steps, own_disk):
    """Restore, save these steps, upload; return what was restored and what is there at the end."""
    tiers = Tiers(local=root / "disk") if own_disk else Tiers()
    with CheckpointManager(
        root / "run" / "checkpoints", keep=0, mode="sync", tiers=tiers
    ) as manager:
        manager._transit.carry_on = lambda: None
        found = manager.restore_latest(like=probe.abstract(state_at(0)))
        if found is not None:
            probe.assert_equal(found.state, probe.numbers(state_at(found.step)))
        for step in steps:
            manager.save(step, state_at(step), {})
            if own_disk:
                shared = uploader.SharedTier(manager.directory)
                uploader.Uploader(manager._transit.local, shared, patience_s=0).run()
        return {"restored": found and found.step, "steps": manager.steps()}


def in_a_process(root, *, kill_at="", **options):
    """Run `one_start` in a process of its own; return its signal and its answer."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        if kill_at:
            os.environ[VARIABLE] = f"{kill_at}:1:kill"
        answer = one_start(root, **options)
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return -os.waitstatus_to_exitcode(status), json.loads(text) if text else None


def main(folder, *places):
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore", RuntimeWarning)
    for number, place in enumerate(places):
        name, _, disk = place.partition("@")
        root, own_disk = Path(folder) / str(number), disk == "disk"
        in_a_process(root, steps=[2], own_disk=own_disk)
        died_of, _ = in_a_process(root, steps=[4], own_disk=own_disk, kill_at=name)
        code, after = in_a_process(root, steps=[6], own_disk=own_disk)
        told = {"place": place, "killed": died_of == signal.SIGKILL, "code": code, "after": after}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
