"""One process of a job that saves and restores a small state, for tests of several processes.

It is told what to do as JSON, one list of commands a line of its input, and answers each line by
one line of JSON. `python -m tests.resources.checkpoint_member PORT PROCESS COUNT`.
"""

import json
import logging
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Tiers,
    database,
    saving,
)
from jaxfound.resources.control import ControlPlane

ANSWER = "answer: "
DEVICES = 2
# Nothing takes so long but on a machine that does much besides, where uploaders come last.
PATIENCE_S = 300
# Rows of the sharded leaves: two for each device of up to three processes.
ROWS = 12


def mesh():
    return jax.make_mesh((jax.device_count(),), ("fsdp",))


def value(step, leaf):
    """The numbers of a leaf at a step, whatever the mesh."""
    shapes = {"w": (ROWS, 6), "b": (6,), "moments": (4, ROWS), "count": ()}
    shape = shapes[leaf]
    size = int(np.prod(shape, dtype=int))
    numbers = np.arange(size).reshape(shape) * 0.5 + step
    return numbers.astype({"count": "int32"}.get(leaf, "float32"))


SPECS = {"w": P("fsdp"), "b": P(), "moments": P(None, "fsdp"), "count": P()}


def state_at(step):
    """The state at a step on the mesh of the job; b is on every host, w on each in parts."""

    def make(name):
        whole = value(step, name)
        sharding = NamedSharding(mesh(), SPECS[name])
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return {
        "params": {"w": make("w"), "b": make("b")},
        "moments": make("moments"),
        "count": make("count"),
    }


@partial(jax.jit, donate_argnums=0)
def advance(state):
    """The state of the next step, in the memory of this one."""
    return jax.tree.map(lambda leaf: leaf + 1, state)


def like():
    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(leaf, state_at(0))


def is_right(state, step):
    """Whether every shard that is here has the numbers of `step`."""
    leaves = {**state["params"], "moments": state["moments"], "count": state["count"]}
    return all(
        np.array_equal(np.asarray(shard.data), value(step, name)[shard.index])
        for name, leaf in leaves.items()
        for shard in leaf.addressable_shards
    )


class Member:
    """The manager of this process, and what it can be told to do."""

    def __init__(self, plane):
        self.plane = plane
        self.gate = threading.Event()
        self.gate.set()

    def open(self, shared, locals, keep=0):
        """Open a manager; the disk of this process is the one at its place in `locals`."""
        tiers = Tiers(local=Path(locals[self.plane.process])) if locals else Tiers()
        self.manager = CheckpointManager(
            Path(shared),
            keep=keep,
            tiers=tiers,
            plane=self.plane,
            layout={"fsdp": jax.device_count()},
        )

    def save(self, step, must=True):
        did = self.manager.save(step, state_at(step), {"data_position": step}, must=must)
        if must:
            self.manager.wait()
        return did

    def train(self, last, saved):
        """Take steps that consume their state, and save one of them on the way."""
        state, did = state_at(0), ""
        for step in range(1, last + 1):
            state = advance(state)
            if step == saved:
                did = self.manager.save(step, state, {"data_position": step})
        return [did, self.manager.is_saving(), is_right(state, last)]

    def hold(self, process):
        """Let the saves of one process wait in their thread."""
        if self.plane.process == process:
            self.gate.clear()
        for saver in (saving.PartSaver, saving.JoinedSaver):
            saver.write = self._held(saver.write)

    def _held(self, write):
        def held(saver, job, origin):
            self.gate.wait(PATIENCE_S)
            return write(saver, job, origin)

        return held

    def settle(self):
        """Return when nothing is being written, without asking how it ended."""
        while self.manager.is_saving():
            time.sleep(0.01)

    def release(self):
        self.gate.set()
        self.manager.wait()

    def break_disk(self, process):
        """Let the next saves of one process find a full disk."""
        if self.plane.process == process:

            def full(*arguments, **options):
                raise OSError(28, "No space left on device")

            database.write_boxes = full

    def finish(self, limit_s=PATIENCE_S):
        return self.manager.finish_uploads(limit_s=limit_s)

    def notes(self):
        return [[note.kind, note.step] for note in self.manager.take_notes()]

    def steps(self):
        return list(self.manager.steps())

    def latest(self):
        return self.manager.latest()

    def restore(self):
        """Restore the newest: its step, whether it is right, what was passed over and why."""
        said = Said()
        logging.getLogger("jaxfound").addHandler(said)
        logging.getLogger("jaxfound").setLevel("INFO")
        found = self.manager.restore_latest(like=like())
        logging.getLogger("jaxfound").removeHandler(said)
        if found is None:
            return None
        assert found.metadata == {"data_position": found.step}
        tiers = [r.tier for r in said.records if r.message == "checkpoint.restored"]
        reasons = [r.reason for r in said.records if r.message == "checkpoint.damaged"]
        return [found.step, is_right(found.state, found.step), tiers[0], reasons]


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        record.message = record.getMessage()
        self.records.append(record)


def main(port, process, count):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(count),
        int(process),
        cluster_detection_method="deactivate",
        # Soon enough that those who are left when one is killed do not wait for it.
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=20,
    )
    member = Member(ControlPlane.of_job(timeout_s=PATIENCE_S))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(member, name)(*arguments)
        except (CheckpointError, ValueError) as error:
            answer = {"error": str(error)}
        # Libraries below write to the same output.
        sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
