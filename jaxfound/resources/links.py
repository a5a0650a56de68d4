"""What carries data between two devices: classes of links, each figure with where it is from.

Bandwidths are bytes/s in one direction while as much comes back. A datasheet's figure is the line
rate, so seconds worked out from it are a lower bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GB = 1e9
MICRO = 1e-6
# Gigabits are what networks are sold by.
GIGABIT = 1e9 / 8

Source = Literal["measured", "datasheet", "given"]


@dataclass(frozen=True)
class Link:
    """One class of links.

    Attributes:
        name: what reports call it.
        bandwidth_bps: bytes/s each way, of one device inside a host, of one NIC between hosts.
        latency_s: of one message.
        source: whether the bandwidth was measured here, is the maker's, or was given by a file.
        nics: between hosts, how such a network is usually built: a NIC for each device or one for
            each host; a topology may say otherwise.
    """

    name: str
    bandwidth_bps: float
    latency_s: float
    source: Source
    nics: Literal["device", "host"] = "device"

    def text(self) -> str:
        """Return the class with its figures and their source."""
        return (
            f"{self.name}, {self.bandwidth_bps / GB:g} GB/s ({self.source}), "
            f"{self.latency_s / MICRO:g} us a message"
        )


# One step of a ring in NCCL's own cost model: its tuning table (src/graph/tuning.cc), rows NVLINK,
# PCI and NET, ring algorithm, simple protocol. TCP is slower than the last; no figure for it.
NVLINK_STEP_S = 3.4 * MICRO
PCIE_STEP_S = 5.7 * MICRO
NETWORK_STEP_S = 14.0 * MICRO


def _inside(
    name: str, gigabytes: int | float, latency_s: float, source: Source = "datasheet"
) -> Link:
    return Link(name, gigabytes * GB, latency_s, source)


# 256 MiB a device between four H200s in one process, jax 0.11.2, timed from Python and untuned: a
# permute and an all_to_all both moved 176 GB/s. The maker's figure is 450 GB/s each way.
NVLINK4 = _inside("NVLink 4", 176.0, NVLINK_STEP_S, "measured")

# By the kind's name in the hardware table. NVLink's published totals count both directions: 600
# GB/s (A100), 400 (H800), 900 (H100, H200, H20), 1,800 (B200). MI300X: 128 GB/s both ways on each
# of 7 links; its latency has no figure here, and NVLink's stands in.
INSIDE: Mapping[str, Link] = {
    # 16 MiB a device between 8 virtual devices on two cores, permute and all_reduce alike.
    "cpu": _inside("shared memory", 0.8, 60 * MICRO, "measured"),
    "NVIDIA H200": NVLINK4,
    # The same 18 links as an H200's.
    "NVIDIA H100 80GB HBM3": NVLINK4,
    "NVIDIA H20": NVLINK4,
    "NVIDIA H800": _inside("NVLink 4, 8 links", 200.0, NVLINK_STEP_S),
    "NVIDIA A100-SXM4-40GB": _inside("NVLink 3", 300.0, NVLINK_STEP_S),
    "NVIDIA A100-SXM4-80GB": _inside("NVLink 3", 300.0, NVLINK_STEP_S),
    "NVIDIA B200": _inside("NVLink 5", 900.0, NVLINK_STEP_S),
    "AMD Instinct MI300X": _inside("Infinity Fabric", 448.0, NVLINK_STEP_S),
}
# Other wirings that a file may name for the inside of a host.
OTHER_INSIDE: Mapping[str, Link] = {
    # 16 lanes at 32 and 16 GT/s (PCI-SIG).
    "pcie5": _inside("PCIe 5 x16", 63.0, PCIE_STEP_S),
    "pcie4": _inside("PCIe 4 x16", 31.5, PCIE_STEP_S),
    "nvlink4": NVLINK4,
}


def _network(name: str, gigabits: int, nics: Literal["device", "host"]) -> Link:
    return Link(name, gigabits * GIGABIT, NETWORK_STEP_S, "datasheet", nics)


# The number is the line rate of one NIC in Gb/s. InfiniBand and the fast RoCE come as one NIC a
# device in the makers' own hosts of eight; slower Ethernet as one NIC that the host's devices
# share.
NETWORKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        _network("ib800", 800, "device"),
        _network("ib400", 400, "device"),
        _network("ib200", 200, "device"),
        _network("ib100", 100, "host"),
        _network("roce400", 400, "device"),
        _network("roce200", 200, "device"),
        _network("roce100", 100, "host"),
        _network("eth100", 100, "host"),
        _network("eth25", 25, "host"),
        _network("eth10", 10, "host"),
        _network("eth1", 1, "host"),
    )
}
