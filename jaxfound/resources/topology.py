"""What there is: hosts, devices, and the memory of one device."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    # jax.Device is this class under a name that type checkers take for a variable.
    from jaxlib._jax import Device
else:
    Device = jax.Device


@dataclass(frozen=True)
class Topology:
    """The devices of a job, discovered or imagined.

    Attributes:
        hosts: processes of the job.
        devices_per_host: devices that one process drives; the same everywhere.
        device_kind: the vendor's name, e.g. `NVIDIA H200`.
        memory_bytes: memory of one device that a program may use.
    """

    hosts: int
    devices_per_host: int
    device_kind: str
    memory_bytes: int

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.hosts * self.devices_per_host

    @classmethod
    def discover(cls) -> "Topology":
        """Return the topology of this job; starts the JAX backend.

        A GPU's memory is what JAX's allocator may take; CPU devices share the host's evenly.
        """
        local = jax.local_devices()
        return cls(
            hosts=jax.process_count(),
            devices_per_host=len(local),
            device_kind=local[0].device_kind,
            memory_bytes=usable_bytes(local[0].memory_stats() or {}, num_local=len(local)),
        )


def usable_bytes(stats: Mapping[str, int], *, num_local: int) -> int:
    """Return the bytes that a program may use on one of `num_local` devices of this host.

    Args:
        stats: what the device says of its memory; empty for CPU devices.
        num_local: devices that share the host's memory.
    """
    return stats.get("bytes_limit", host_memory_bytes() // num_local)


def host_memory_bytes() -> int:
    """Return the physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
