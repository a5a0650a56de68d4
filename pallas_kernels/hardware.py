"""What each kind of accelerator can do, as plain data; devices that are absent are rows like any.

Peaks are the makers' published dense figures, so a share of peak is comparable between reports.
Reading a row starts no JAX backend; only `current` does.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jax

log = logging.getLogger(__name__)

Platform = Literal["cpu", "cuda", "rocm", "tpu", "unknown"]
NumberFormat = Literal["float32", "tf32", "bfloat16", "float8"]

TERA = 1e12
GB = 10**9


@dataclass(frozen=True, eq=False)
class Hardware:
    """One kind of device.

    Attributes:
        kind: the name JAX reports as `device.device_kind`.
        architecture: the instruction set that kernels are written for, such as "sm90".
        peak_flops: dense FLOP/s of the matrix unit, by number format; a missing format is
            one that the unit does not multiply.
        memory_bytes: capacity of the device's own memory.
        memory_bps: peak bandwidth of that memory, bytes/s.
        num_cores: streaming multiprocessors, or cores of another maker's name.
        scratch_bytes: on-chip memory one program may use (shared memory, VMEM).
        alignment: multiple of (M, N, K) at which a matrix product wastes nothing, by format.
    """

    kind: str
    platform: Platform
    architecture: str
    peak_flops: Mapping[NumberFormat, float]
    memory_bytes: int
    memory_bps: float
    num_cores: int
    scratch_bytes: int
    alignment: Mapping[NumberFormat, tuple[int, int, int]]

    def supports(self, number_format: NumberFormat) -> bool:
        """True where the matrix unit multiplies `number_format` itself."""
        return number_format in self.peak_flops


HOPPER_ALIGNMENT: Mapping[NumberFormat, tuple[int, int, int]] = {
    "float32": (1, 4, 4),
    "tf32": (64, 8, 8),
    "bfloat16": (64, 8, 16),
    "float8": (64, 8, 128),
}
AMPERE_ALIGNMENT: Mapping[NumberFormat, tuple[int, int, int]] = {
    "float32": (1, 4, 4),
    "tf32": (16, 8, 8),
    "bfloat16": (16, 8, 16),
}
TPU_ALIGNMENT: Mapping[NumberFormat, tuple[int, int, int]] = {
    "float32": (8, 128, 128),
    "bfloat16": (16, 128, 128),
    "float8": (32, 128, 128),
}
NO_ALIGNMENT: Mapping[NumberFormat, tuple[int, int, int]] = {"float32": (1, 1, 1)}


def _peaks(
    *, float32: float, tf32: float = 0.0, bfloat16: float = 0.0, float8: float = 0.0
) -> Mapping[NumberFormat, float]:
    """Peaks given in TFLOP/s; 0 leaves the format out."""
    named: dict[NumberFormat, float] = {
        "float32": float32,
        "tf32": tf32,
        "bfloat16": bfloat16,
        "float8": float8,
    }
    return {name: value * TERA for name, value in named.items() if value}


HOPPER_PEAKS = _peaks(float32=66.9, tf32=494.7, bfloat16=989.4, float8=1978.9)
SM90_SCRATCH_BYTES = 232_448


def _hopper(
    kind: str,
    memory_bytes: int,
    *,
    memory_bps: float,
    num_cores: int = 132,
    peak_flops: Mapping[NumberFormat, float] = HOPPER_PEAKS,
) -> Hardware:
    return Hardware(
        kind=kind,
        platform="cuda",
        architecture="sm90",
        peak_flops=peak_flops,
        memory_bytes=memory_bytes,
        memory_bps=memory_bps,
        num_cores=num_cores,
        scratch_bytes=SM90_SCRATCH_BYTES,
        alignment=HOPPER_ALIGNMENT,
    )


def _ampere(kind: str, memory_bytes: int, *, memory_bps: float) -> Hardware:
    return Hardware(
        kind=kind,
        platform="cuda",
        architecture="sm80",
        peak_flops=_peaks(float32=19.5, tf32=156.0, bfloat16=312.0),
        memory_bytes=memory_bytes,
        memory_bps=memory_bps,
        num_cores=108,
        scratch_bytes=166_912,
        alignment=AMPERE_ALIGNMENT,
    )


def _tpu(
    kind: str,
    architecture: str,
    *,
    peak_flops: Mapping[NumberFormat, float],
    memory_bytes: int,
    memory_bps: float,
    num_cores: int = 1,
) -> Hardware:
    return Hardware(
        kind=kind,
        platform="tpu",
        architecture=architecture,
        peak_flops=peak_flops,
        memory_bytes=memory_bytes,
        memory_bps=memory_bps,
        num_cores=num_cores,
        scratch_bytes=128 * 2**20,
        alignment=TPU_ALIGNMENT,
    )


CPU = Hardware(
    kind="cpu",
    platform="cpu",
    architecture="host",
    # An order of magnitude for cost models on a laptop; nothing is ever reported against it.
    peak_flops=_peaks(float32=0.1, bfloat16=0.05),
    memory_bytes=16 * GB,
    memory_bps=20e9,
    num_cores=1,
    scratch_bytes=2**20,
    alignment=NO_ALIGNMENT,
)

ROWS: tuple[Hardware, ...] = (
    CPU,
    _hopper("NVIDIA H200", 150_754_820_096, memory_bps=4.8e12),
    _hopper("NVIDIA H100 80GB HBM3", 85_520_809_984, memory_bps=3.35e12),
    _hopper("NVIDIA H800", 85_520_809_984, memory_bps=3.35e12),
    _hopper(
        "NVIDIA H20",
        102_625_181_696,
        memory_bps=4.0e12,
        num_cores=78,
        peak_flops=_peaks(float32=44.0, tf32=74.0, bfloat16=148.0, float8=296.0),
    ),
    _ampere("NVIDIA A100-SXM4-40GB", 42_949_672_960, memory_bps=1.555e12),
    _ampere("NVIDIA A100-SXM4-80GB", 85_899_345_920, memory_bps=2.039e12),
    Hardware(
        kind="NVIDIA B200",
        platform="cuda",
        architecture="sm100",
        peak_flops=_peaks(float32=75.0, tf32=1125.0, bfloat16=2250.0, float8=4500.0),
        memory_bytes=192 * GB,
        memory_bps=8.0e12,
        num_cores=148,
        scratch_bytes=SM90_SCRATCH_BYTES,
        alignment={**HOPPER_ALIGNMENT, "float8": (128, 8, 128), "bfloat16": (128, 8, 64)},
    ),
    Hardware(
        kind="AMD Instinct MI300X",
        platform="rocm",
        architecture="gfx942",
        peak_flops=_peaks(float32=163.4, tf32=653.7, bfloat16=1307.4, float8=2614.9),
        memory_bytes=192 * GB,
        memory_bps=5.3e12,
        num_cores=304,
        scratch_bytes=65_536,
        alignment={"float32": (1, 4, 4), "bfloat16": (16, 16, 16), "float8": (16, 16, 32)},
    ),
    _tpu(
        "TPU v4",
        "v4",
        peak_flops=_peaks(float32=68.0, bfloat16=275.0),
        memory_bytes=32 * GB,
        memory_bps=1.228e12,
    ),
    _tpu(
        "TPU v5 lite",
        "v5e",
        peak_flops=_peaks(float32=49.0, bfloat16=197.0),
        memory_bytes=16 * GB,
        memory_bps=0.819e12,
    ),
    _tpu(
        "TPU v5p",
        "v5p",
        peak_flops=_peaks(float32=114.0, bfloat16=459.0),
        memory_bytes=95 * GB,
        memory_bps=2.765e12,
    ),
    _tpu(
        "TPU v6 lite",
        "v6e",
        peak_flops=_peaks(float32=229.0, bfloat16=918.0),
        memory_bytes=32 * GB,
        memory_bps=1.64e12,
    ),
)
HARDWARE: dict[str, Hardware] = {row.kind: row for row in ROWS}
# Names that JAX reports for a card that a row above already describes.
ALIASES: dict[str, str] = {
    "NVIDIA H100": "NVIDIA H100 80GB HBM3",
    "NVIDIA H200 NVL": "NVIDIA H200",
    "NVIDIA A100": "NVIDIA A100-SXM4-80GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "TPU v5e": "TPU v5 lite",
    "TPU v5": "TPU v5p",
    "TPU v6e": "TPU v6 lite",
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100 80GB HBM3",
    "b200": "NVIDIA B200",
}

_target = jax.make_user_context(default_value="")


@lru_cache(maxsize=64)
def find(kind: str) -> Hardware:
    """Return the row of `kind`; an unknown kind gets a row without peaks, and one log line.

    The row of an unknown kind supports no number format, so every special kernel refuses it and
    the XLA path serves it.
    """
    row = HARDWARE.get(ALIASES.get(kind, kind))
    if row is not None:
        return row
    log.warning("hardware.unknown", extra={"kind": kind, "known": sorted(HARDWARE)})
    return Hardware(
        kind=kind,
        platform="unknown",
        architecture="unknown",
        peak_flops={},
        memory_bytes=0,
        memory_bps=0.0,
        num_cores=1,
        scratch_bytes=0,
        alignment=NO_ALIGNMENT,
    )


def target(kind: str) -> AbstractContextManager[None]:
    """Trace inside `with target("NVIDIA H200"):` as if that device were there.

    Needed to compile for a device that this machine lacks; part of the jit cache key, so a
    function traced for one target is traced again for another.
    """
    return _target(kind)


def current() -> Hardware:
    """Return the hardware that a program traced now will run on.

    That is the `target` in force, else the abstract device of the mesh in force, else JAX's default
    or first device, which starts the backend.
    """
    if _target.value:
        return find(_target.value)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return find(device.device_kind)
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return find(default.device_kind)
    return find(jax.devices()[0].device_kind)
