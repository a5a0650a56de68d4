"""Power that the card draws under one candidate, read through NVML."""

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.bench.timing import Candidate

# The sensor is read every 100 ms and averages 25 ms, so a stretch of one load must be longer than
# both before a reading is of that load. Rounds are shorter and alternate between candidates.
STRETCH_S = 0.15


class NoPowerError(RuntimeError):
    """Power cannot be read here; the text says why."""


@dataclass(frozen=True)
class Meter:
    """Power of one card.

    Attributes:
        watts: returns what the card draws now.
    """

    watts: Callable[[], float]


def open_meter() -> Meter:
    """Return the meter of JAX's first device.

    Raises:
        NoPowerError: if NVML's Python package, the driver or the sensor is missing.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise NoPowerError(
            "NVML's package is not installed; install nvidia-ml-py to read the power"
        ) from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(_device_index())
        _instant_watts(nvml, handle)
    except nvml.NVMLError as error:
        raise NoPowerError(f"NVML: {error}") from error
    return Meter(lambda: _instant_watts(nvml, handle))


def _device_index() -> int:
    """NVML's number of JAX's first device; NVML does not know of CUDA_VISIBLE_DEVICES."""
    local = jax.local_devices()[0].local_hardware_id or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if local < len(visible) and visible[local].strip().isdigit():
        return int(visible[local])
    return local


def _instant_watts(nvml: Any, handle: Any) -> float:
    """The card's power over the sensor's last 25 ms; the older call averages a whole second."""
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise NoPowerError("the driver does not say what the card draws at this instant")
    return field.value.uiVal / 1e3


def watts_under(
    candidate: Candidate, meter: Meter, *, num_calls: int, stretch_s: float = STRETCH_S
) -> float:
    """Return the power while nothing but `candidate` has run for `stretch_s`.

    Args:
        num_calls: calls that are started at a time; the next are started before these are done.
    """

    def start() -> Any:
        result = None
        for index in range(num_calls):
            result = candidate.start(index)
        return result

    end = time.perf_counter() + stretch_s
    running = start()
    while time.perf_counter() < end:
        following = start()
        candidate.wait(running)
        running = following
    watts = meter.watts()
    candidate.wait(running)
    return watts
