"""What this host is: the values that must, or should, be the same on every host of a job."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from jaxfound.resources.platform import driver_version, source_commit

# A container cannot see the digest it was started from: whoever starts it says it here.
IMAGE_VARIABLE = "JAXFOUND_IMAGE_DIGEST"
PACKAGES = ("jaxfound", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Variables that change what programs compute, or how they talk; those of single processes aside.
PREFIXES = ("XLA_", "JAX_", "NCCL_", "GLOO_", "CUDA_", "LIBTPU_")
OWN = frozenset(
    (
        *("JAX_PROCESS_ID", "JAX_LOCAL_PROCESS_ID", "JAX_COMPILATION_CACHE_DIR"),
        *("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    )
)


def must_agree(*, config: str) -> dict[str, str]:
    """Return what makes a job compute one thing: software, driver, image, config.

    Args:
        config: hash of the run's effective config; empty when none was given.
    """
    found = {"python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {name: _version(name) for name in _accelerator_packages()}
    found["source commit"] = source_commit()
    found["driver"] = driver_version()
    found["image"] = image()
    found["config"] = config
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in found.items() if value or name in ("image", "config")}


def should_agree(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what may differ and seldom should: the kernel, the processor, variables."""
    variables = os.environ if environ is None else environ
    found = {
        name: value
        for name, value in variables.items()
        if name.startswith(PREFIXES) and name not in OWN and name != "XLA_FLAGS"
    }
    return {"kernel": platform.release(), "machine": platform.machine(), **found}


def image() -> str:
    """Return what tells a container's image from others; empty outside of one, or if untold."""
    told = os.environ.get(IMAGE_VARIABLE, "")
    if told:
        return told
    for variable in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        path = Path(os.environ.get(variable, ""))
        if path.is_file():
            # The head of a SIF file has the image's own id and the time it was built.
            return f"{path.name} {path.open('rb').read(96).hex()[64:]} {path.stat().st_size}"
    return ""


def boot_id() -> str:
    """Return what tells this host from others, whatever they are called; empty if untold."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        return platform.node()


def _accelerator_packages() -> list[str]:
    names = sorted({each.name or "" for each in distributions()})
    return [n for n in names if n.startswith(("jax-cuda", "nvidia-nccl", "nvidia-cudnn", "libtpu"))]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
