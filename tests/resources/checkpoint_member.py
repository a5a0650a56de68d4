"""One process of a job that saves and restores a small state, for tests of several processes.

It is told what to do as JSON, one list of commands a line of its input, and answers each line by
one line of JSON. `python -m tests.resources.checkpoint_member PORT PROCESS COUNT SHARED LOCAL`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager, Tiers
from jaxfound.resources.control import ControlPlane

ANSWER = "answer: "
DEVICES = 2
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

    def __init__(self, shared, local, plane):
        self.shared, self.local, self.plane = Path(shared), local, plane
        self.manager = self.open({})

    def open(self, options):
        tiers = Tiers(local=Path(self.local)) if self.local else Tiers()
        return CheckpointManager(
            self.shared,
            keep=options.get("keep", 0),
            tiers=tiers,
            plane=self.plane,
            layout={"fsdp": jax.device_count()},
        )

    def save(self, step):
        did = self.manager.save(step, state_at(step), {"data_position": step}, must=True)
        self.manager.wait()
        return did

    def finish(self, limit_s):
        return self.manager.finish_uploads(limit_s=limit_s)

    def notes(self):
        return [[note.kind, note.step] for note in self.manager.take_notes()]

    def reopen(self):
        self.manager.close()
        self.manager = self.open({})

    def latest(self):
        return self.manager.latest()

    def restore(self):
        found = self.manager.restore_latest(like=like())
        if found is None:
            return None
        return [found.step, is_right(found.state, found.step), found.metadata["data_position"]]


def main(port, process, count, shared, local=""):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(count),
        int(process),
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=20,
    )
    member = Member(shared, local, ControlPlane.of_job(timeout_s=60))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(member, name)(*arguments)
        except CheckpointError as error:
            answer = {"error": str(error)}
        # Libraries below write to the same output.
        sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()
    member.manager.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
