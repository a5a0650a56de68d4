"""Which backend JAX will start, decided without starting one."""

import os
import platform
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

# Device files of accelerators: NVIDIA on Linux, NVIDIA under WSL, AMD, TPU.
ACCELERATOR_FILES = ("nvidia[0-9]*", "dxg", "kfd", "accel[0-9]*", "vfio/[0-9]*")
# Wheels with these plugins are installed on machines without a GPU too, to compile for one.
CUDA_PLUGINS = frozenset({"xla_cuda12", "xla_cuda13"})
# Threads of the CPU backend for each virtual device: one may wait in a collective while another
# must run the partner it waits for.
THREADS_PER_VIRTUAL_DEVICE = 4
# Packages that decide what a run computes, and how fast.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def default_to_cpu(*, devices: Path = Path("/dev")) -> bool:
    """Choose the CPU for this process and its children when there is nothing better; say whether.

    Without this, JAX with a CUDA plugin complains at length on a machine without a GPU. A choice
    that was made before (`JAX_PLATFORMS`, `jax.config`) stands. No backend is started; call it
    before anything does.

    Args:
        devices: folder of device files.
    """
    if os.environ.get("JAX_PLATFORMS") or sees_accelerator(devices):
        return False
    jax = sys.modules.get("jax")
    if jax is not None:
        if jax.config.jax_platforms:
            return False
        jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"
    return True


def sees_accelerator(devices: Path = Path("/dev")) -> bool:
    """Say whether there is a device file of an accelerator, or a JAX plugin for another kind."""
    if any(next(devices.glob(pattern), None) for pattern in ACCELERATOR_FILES):
        return True
    return any(plugin.name not in CUDA_PLUGINS for plugin in entry_points(group="jax_plugins"))


def num_accelerators(devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs have a device file; 0 where JAX must be asked instead."""
    return len(list(devices.glob("nvidia[0-9]*")))


def use_virtual_cpus(num_devices: int, *, alone: bool = False) -> None:
    """Split the CPU into `num_devices` devices; call it before any backend starts.

    The backend's thread pool is made large enough as well (its size is read from `NPROC`): with
    as many threads as cores, devices that wait in one collective can take every thread from the
    device they wait for, and the program stops for good.

    Args:
        alone: whether they are used whatever else this machine has.
    """
    import jax

    if alone:
        jax.config.update("jax_platforms", "cpu")

    os.environ.setdefault("NPROC", str(THREADS_PER_VIRTUAL_DEVICE * num_devices))
    jax.config.update("jax_num_cpu_devices", num_devices)


def devices_here() -> tuple[int, str]:
    """Return how many devices JAX has here, and the kind of the first."""
    import jax

    devices = jax.devices()
    return len(devices), devices[0].device_kind


def leave_a_core() -> None:
    """Let the CPU backend compute on all cores but one; call it before any backend starts.

    No effect where JAX was not told to run on the CPU: an accelerator's host has cores to spare.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.setdefault("NPROC", str(max(1, (os.cpu_count() or 1) - 1)))


def use_compile_cache(directory: Path) -> None:
    """Keep compiled programs in `directory`, unless a cache was chosen already."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def source_commit() -> str:
    """Return the commit this package runs from, `+` if files differ; empty outside a checkout."""
    here = Path(__file__).parent
    try:
        git = partial(subprocess.run, cwd=here, capture_output=True, text=True, check=True)
        commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        return commit + ("+" if git(["git", "status", "--porcelain", "-uno"]).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def package_versions() -> dict[str, str]:
    """Return the versions that a record of a measurement names: of Python and of `PACKAGES`."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty where there is none to ask."""
    try:
        nvml: Any = import_module("pynvml")
    except ModuleNotFoundError:
        return ""
    try:
        nvml.nvmlInit()
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""
