"""A job of several hosts, in one process: each has some of the virtual devices and its own disk.

What a real process does with its own devices is done here for each host in turn. Processes that
talk to each other are in checkpoint_member.py.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint import CheckpointManager, saving, uploader
from jaxfound.resources.checkpoint.leaves import describe, flatten
from jaxfound.resources.checkpoint.manifest import Key
from jaxfound.resources.checkpoint.tiers import LocalTier, SharedTier
from jaxfound.resources.checkpoint.uploader import Uploader
from tests.resources import probe

SPECS = {
    "w": P("fsdp"),
    "zeros": P("fsdp"),
    "b": P(),
    "moments": P(None, "fsdp"),
    "count": P(),
    "key": P(),
}


def state_at(step, *, num_devices):
    """The state at a step over the first devices: parts of w and moments, copies of the rest."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
    state = {
        "params": {
            "w": jnp.arange(72.0).reshape(12, 6) + step,
            "b": jnp.arange(6).astype(jnp.bfloat16) * step,
        },
        "moments": jnp.arange(48.0).reshape(4, 12) - step,
        "count": jnp.int32(step),
        "key": jax.random.key(step),
        "zeros": jnp.zeros((12, 2)),
        "none": jnp.zeros((0, 3)),
    }
    placed = {
        path: jax.device_put(leaf, NamedSharding(mesh, SPECS.get(path[-1], P())))
        for path, leaf in flatten(state).items()
    }
    return jax.tree.unflatten(jax.tree.structure(state), list(placed.values()))


@dataclass
class Hosts:
    """`count` hosts of two devices each; their disks and the shared tier are under `root`."""

    root: Path
    count: int
    attempt: str = "attempt-1"
    disks: tuple[str, ...] = ()
    refused: list[str] = field(default_factory=list)

    @cached_property
    def shared(self):
        return SharedTier(self.root / "run" / "checkpoints")

    @cached_property
    def locals(self):
        names = self.disks or tuple(f"disk-{number}" for number in range(self.count))
        return [LocalTier.open(self.root / name, shared=self.shared.root) for name in names]

    def state(self, step):
        return state_at(step, num_devices=2 * self.count)

    def origin(self, process):
        hosts = tuple(local.host for local in self.locals)
        return saving.Origin(self.attempt, {"fsdp": 2 * self.count}, hosts, process)

    def job(self, step, process):
        state = self.state(step)
        table = flatten(state)
        copy = saving.snapshot_of(
            table, process=process, in_pieces=True, whose=lambda device: device.id // 2
        )
        return saving.Job(step, copy, describe(table), {"data_position": step}, 0.0, 0.0)

    def save(self, step, *, processes=None):
        """Write the part of each host to its own disk."""
        for process in range(self.count) if processes is None else processes:
            local = self.locals[process]
            saver = saving.PartSaver(local.slot(0), local.host)
            saver.write(self.job(step, process), self.origin(process))

    def uploader(self, process, **options):
        options = {"patience_s": 0, **options}
        return Uploader(self.locals[process], self.shared, **options)

    def upload(self, *, processes=None, **options):
        """Let the uploader of each host work once, as far as it comes alone; say who is done."""
        which = range(self.count) if processes is None else processes
        return [self.uploader(process, **options).run() for process in which]

    def manager(self, **options):
        """What one process reads of the shared tier."""
        return CheckpointManager(self.shared.root, keep=0, **options)

    def restored(self, *, num_devices=1):
        """The newest checkpoint on other devices: its step, and whether every number is right."""
        like = probe.abstract(state_at(0, num_devices=num_devices))
        with self.manager() as manager:
            found = manager.restore_latest(like=like)
        if found is None:
            return None
        probe.assert_equal(found.state, probe.numbers(self.state(found.step)))
        assert found.metadata == {"data_position": found.step}
        return found.step

    def key(self, step):
        return Key(step, self.attempt)


def records(hosts, host):
    return uploader.read_records(hosts.locals[host].root)[0]


def work(manager):
    """Let the uploader of the manager's host work once."""
    transit = manager._transit
    return uploader.Uploader(
        transit.local, uploader.SharedTier(manager.directory), keep=transit.keep, patience_s=0
    ).run()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path):
    path.write_bytes(b"\0" * path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


TAMPERS = {"flip": flip, "zero": zero, "truncate": truncate, "delete": Path.unlink}


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
