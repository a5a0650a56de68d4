"""The clock of the bench: time that GPU kernels take, as the driver records it."""

import importlib
from collections.abc import Callable
from typing import Any


def kernel_seconds(run: Callable[[], None]) -> float:
    """Return the seconds that all GPU kernels started by `run` took, without gaps between them.

    `run` must wait for its own kernels. Counts kernels of every library in the process. One
    measurement at a time: the driver allows one subscriber. The driver's recorder stays loaded
    between measurements, because unloading it takes longer than a round.

    Raises:
        RuntimeError: if nothing ran on a GPU.
    """
    extension: Any = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    extension._cupti_init()
    timings: list[tuple[str, float]] = []
    try:
        run()
    finally:
        timings = extension._cupti_get_timings(False)
    if not timings:
        raise RuntimeError("no GPU kernel ran while the clock was on.")
    return sum(milliseconds for _, milliseconds in timings) / 1e3
