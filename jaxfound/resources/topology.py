"""What there is: hosts, their devices, the memory of one device, and the links between them."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxfound.resources.links import INSIDE, Link
from jaxfound.resources.topology_text import parse_text, read_file
from pallas_kernels import hardware

if TYPE_CHECKING:
    # jax.Device is this class under a name that type checkers take for a variable.
    from jaxlib._jax import Device
else:
    Device = jax.Device


@dataclass(frozen=True)
class Topology:
    """The devices of a job, discovered, read from a file or imagined.

    Attributes:
        hosts: processes of the job.
        devices_per_host: devices that one process drives; the same everywhere.
        device_kind: the vendor's name, e.g. `NVIDIA H200`.
        memory_bytes: memory of one device that a program may use; 0 = not known.
        inside: link between devices of a host; None = the one that this kind is sold with.
        network: link between hosts; None = one host, or not known.
        nics_per_host: NICs of `network` in a host, which its devices share; 0 = as such a network
            usually has, one a device or one a host.
    """

    hosts: int
    devices_per_host: int
    device_kind: str
    memory_bytes: int
    inside: Link | None = None
    network: Link | None = None
    nics_per_host: int = 0

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.hosts * self.devices_per_host

    @property
    def inside_link(self) -> Link | None:
        """Link between two devices of a host; None when the kind has none on record."""
        kind = hardware.ALIASES.get(self.device_kind, self.device_kind)
        return self.inside or INSIDE.get(kind)

    @property
    def num_nics(self) -> int:
        """NICs of a host that carry what crosses hosts; 0 without a network."""
        if self.network is None:
            return 0
        usual = self.devices_per_host if self.network.nics == "device" else 1
        return self.nics_per_host or usual

    @property
    def network_bps(self) -> float:
        """Bytes/s across hosts for one device while every device of its host sends; 0 = unknown."""
        if self.network is None:
            return 0.0
        return self.network.bandwidth_bps * self.num_nics / self.devices_per_host

    @property
    def is_whole_gpu(self) -> bool:
        """Whether `memory_bytes` is all that a GPU has, not what an allocator has taken of it."""
        row = hardware.HARDWARE.get(hardware.ALIASES.get(self.device_kind, self.device_kind))
        return row is not None and row.platform == "cuda" and self.memory_bytes >= row.memory_bytes

    @property
    def architecture(self) -> str:
        """Instruction set of the devices, e.g. `sm90`; empty where the kind is not on record."""
        row = hardware.HARDWARE.get(hardware.ALIASES.get(self.device_kind, self.device_kind))
        return "" if row is None else row.architecture

    @property
    def peak_flops(self) -> Mapping[hardware.NumberFormat, float]:
        """Published dense FLOP/s of one device, by number format; empty where none are.

        The table's figure for a CPU is an order of magnitude that nothing is reported against.
        """
        row = hardware.HARDWARE.get(hardware.ALIASES.get(self.device_kind, self.device_kind))
        return {} if row is None or row.platform == "cpu" else row.peak_flops

    @property
    def memory_bps(self) -> float:
        """Published bytes/s of one device's memory; 0 where none are."""
        row = hardware.HARDWARE.get(hardware.ALIASES.get(self.device_kind, self.device_kind))
        return 0.0 if row is None or row.platform == "cpu" else row.memory_bps

    def text(self) -> str:
        """Return what there is, a line for the devices and one for each kind of link."""
        one = self.hosts == 1
        kind = self.device_kind
        memory = f", {self.memory_bytes / 1e9:,.1f} GB each" if self.memory_bytes else ""
        lines = [
            f"{'1 host' if one else f'{self.hosts} hosts'} x {self.devices_per_host} {kind} "
            f"({self.num_devices} devices{memory})"
        ]
        if self.devices_per_host > 1:
            inside = self.inside_link
            lines.append(f"  inside a host: {inside.text() if inside else 'link not known'}")
        if not one:
            lines.append(f"  between hosts: {self._network_text()}")
        return "\n".join(lines)

    def _network_text(self) -> str:
        if self.network is None:
            return "network not known, so nothing is said of its seconds"
        nics = "1 NIC" if self.num_nics == 1 else f"{self.num_nics} NICs"
        return f"{self.network.text()}; {nics} a host = {self.network_bps / 1e9:g} GB/s a device"

    @classmethod
    def discover(cls) -> "Topology":
        """Return the topology of this job; starts the JAX backend.

        A GPU's memory is what JAX's allocator may take; CPU devices share the host's evenly. The
        network is not looked for: say it with `dataclasses.replace`, or read a file.
        """
        return cls.of(jax.devices())

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Topology":
        """Return the topology of these devices, which the processes of a job hold in equal parts.

        Raises:
            ValueError: if some process holds more of them than another.
        """
        hosts, each = equal_parts([d.process_index for d in devices])
        here = [d for d in devices if d.process_index == jax.process_index()] or list(devices)
        local = len(jax.local_devices())
        return cls(
            hosts=hosts,
            devices_per_host=each,
            device_kind=devices[0].device_kind,
            memory_bytes=usable_bytes(here[0].memory_stats() or {}, num_local=local),
        )

    @classmethod
    def from_file(cls, path: Path | str) -> "Topology":
        """Return the topology that a YAML file describes.

        Raises:
            ConfigError: if it cannot be read, or a key or a name is unknown.
        """
        return cls(*read_file(Path(path)))

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Return the topology of a text like `3x8:h200:ib400`, or of a YAML file's path.

        Raises:
            ConfigError: if the text is neither, naming the nearest known word.
        """
        return cls(*parse_text(text))


def all_devices() -> tuple[Device, ...]:
    """Return every device of the job, in the order of its processes; starts the JAX backend."""
    return tuple(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))


def first_device(platform: str) -> Device:
    """Return this process's first device of a platform, e.g. `cpu`.

    Raises:
        RuntimeError: if there is none, or JAX was told not to use that platform.
    """
    return jax.local_devices(backend=platform)[0]


def equal_parts(process_of_device: Sequence[int]) -> tuple[int, int]:
    """Return how many processes hold these devices, and how many each of them holds.

    Raises:
        ValueError: if some process holds more than another.
    """
    by_process = Counter(process_of_device)
    counts = sorted(set(by_process.values()))
    if len(counts) != 1:
        raise ValueError(
            f"processes hold {counts} of the {len(process_of_device)} devices: a plan needs the "
            "same number from each. Leave out the devices that are too many"
        )
    return len(by_process), counts[0]


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
