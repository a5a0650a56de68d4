"""Compile for GPUs that this machine does not have, and read what the assembler says of a kernel.

Needs the wheels of the `aot` extra (plugin and compiler, no driver, no CUDA library). A topology
from here serves whole programs as well as single kernels.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels import hardware

PLUGIN_MODULES = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")
type Fields = tuple[tuple[str, int | str], ...]
# Fields that these cards share; the rest comes from below and from the hardware table.
SHARED_FIELDS: Fields = (
    ("threads_per_block_limit", 1024),
    ("threads_per_warp", 32),
    ("shared_memory_per_block", 49_152),
    ("shared_memory_per_core", 233_472),
    ("threads_per_core_limit", 2048),
    ("fpus_per_core", 128),
    ("block_dim_limit_x", 2_147_483_647),
    ("block_dim_limit_y", 65_535),
    ("block_dim_limit_z", 65_535),
    ("registers_per_core_limit", 65_536),
    ("registers_per_block_limit", 65_536),
)
# By architecture; Blackwell's figures are those of XLA's own description of a B200.
FIELDS: Mapping[str, Fields] = {
    "sm90": (
        ("l2_cache_size", 62_914_560),
        ("clock_rate_ghz", "1.98"),
        ("cuda_compute_capability", "{ major: 9 }"),
    ),
    "sm100": (
        ("l2_cache_size", 132_644_864),
        ("clock_rate_ghz", "1.965"),
        ("cuda_compute_capability", "{ major: 10 }"),
    ),
}


class DevicelessError(RuntimeError):
    """This machine or this kind of device cannot be compiled for."""


@dataclass(frozen=True)
class AssemblerReport:
    """What the assembler said about the kernels of one compilation.

    Attributes:
        num_kernels: kernels it assembled; 0 means that nothing was measured.
        spill_bytes: bytes of registers spilled to memory, of all kernels.
        serialized: its warnings that wgmma was made to wait, which costs half the speed.
    """

    num_kernels: int
    spill_bytes: int
    serialized: tuple[str, ...]


def missing() -> str | None:
    """Why this machine cannot compile for an absent GPU; None if it can."""
    if importlib.util.find_spec(PLUGIN_MODULES[0]) is None:
        return "the `aot` extra is not installed (jax-cuda13-plugin, jax-cuda13-pjrt)"
    return None


def kinds() -> tuple[str, ...]:
    """Return the kinds of devices that can be described to the compiler."""
    return tuple(row.kind for row in hardware.ROWS if row.architecture in FIELDS)


def topology(kind: str, *, hosts: int = 1, devices_per_host: int = 1) -> Sequence[Any]:
    """Return devices of a cluster of `kind` to put into a Mesh and compile for.

    Raises:
        DevicelessError: if the plugin is missing, or the kind is not one of `kinds`.
    """
    reason = missing()
    if reason is not None:
        raise DevicelessError(f"cannot compile for {kind}: {reason}.")
    row = hardware.find(kind)
    if row.architecture not in FIELDS:
        raise DevicelessError(
            f"cannot describe {kind} ({row.architecture}) to the compiler; known are "
            f"{', '.join(kinds())}."
        )
    # The plugin otherwise insists on a driver when it loads.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind.lower().replace(" ", "_"),
        target_config=_target_description(row),
        topology=f"1x{hosts}x{devices_per_host}",
    ).devices


@contextmanager
def without_cache() -> Iterator[None]:
    """Compile inside without JAX's persistent cache.

    The compiler of an absent device can write a cache entry but not load one again: a second
    compilation of the same program would raise.
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _target_description(row: hardware.Hardware) -> str:
    """The card in the text form of XLA's GpuTargetConfigProto."""
    fields: list[tuple[str, int | str]] = [
        *SHARED_FIELDS,
        *FIELDS[row.architecture],
        ("core_count", row.num_cores),
        ("memory_bandwidth", int(row.memory_bps)),
        ("device_memory_size", row.memory_bytes),
        ("shared_memory_per_block_optin", row.scratch_bytes),
    ]
    lines = "\n".join(f"  {name}: {value}" for name, value in fields)
    return (
        f"gpu_device_info {{\n{lines}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 7 }\n"
        "runtime_version { major: 13 }\n"
        f'device_description_str: "{row.kind}"\n'
    )


def read_assembler(text: str) -> AssemblerReport:
    """Return what `text`, printed under MOSAIC_GPU_DUMP_PTXAS=1, says."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    serialized = re.findall(r".*wgmma.*serialized.*", text)
    return AssemblerReport(
        num_kernels=len(spills),
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
        serialized=tuple(serialized),
    )
