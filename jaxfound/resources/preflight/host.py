"""This host alone: interpreter, packages, the run's folder, devices, limits of the system."""

import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxfound.resources.preflight.check import Check, check, passed

# Package: first version that works, first that does not. The same as pyproject.toml, which a test
# compares: a source tree that is not installed has no metadata to read them from.
VERSION_RANGES: dict[str, tuple[str, str]] = {
    "jax": ("0.11.2", "0.12"),
    "flax": ("0.12.8", "0.14"),
    "optax": ("0.2.8", "0.3"),
    "orbax-checkpoint": ("0.12.4", "0.13"),
}
MIN_PYTHON = (3, 12)
GiB = 1024**3
# A process has a socket to every peer, a file to every shard it writes, and those of its libraries.
MIN_OPEN_FILES = 65536
# NCCL keeps some 10 MB a peer connection there, and data loaders their queues.
MIN_SHM_BYTES = GiB


def check_host(run_dir: Path, *, needed_bytes: int) -> tuple[Check, ...]:
    """Return the verdicts on Python, the packages, the run's folder and its disk."""
    return (
        check_python(tuple(sys.version_info[:3])),
        *check_versions(installed_versions()),
        check_writable(run_dir),
        check_free_disk(run_dir, needed_bytes=needed_bytes),
    )


def check_python(found: tuple[int, ...]) -> Check:
    """Say whether the interpreter's version is new enough."""
    return check(
        "python",
        passed(found >= MIN_PYTHON),
        _dotted(found),
        threshold=f"needs {_dotted(MIN_PYTHON)} or newer",
        remedy=f"make the environment with Python {_dotted(MIN_PYTHON)}",
    )


def check_versions(found: Mapping[str, str]) -> tuple[Check, ...]:
    """Say for each package of `VERSION_RANGES` whether its version in `found` is inside."""
    return tuple(_check_version(name, found.get(name)) for name in VERSION_RANGES)


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages in `VERSION_RANGES`, absent ones left out."""
    found: dict[str, str] = {}
    for name in VERSION_RANGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_writable(directory: Path, *, name: str = "run directory") -> Check:
    """Say whether a file can be made in `directory`, or in the nearest folder above that exists."""
    existing = nearest_existing(directory)
    problem = ""
    try:
        # A real write: permission bits say nothing for root, read-only mounts and quotas.
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".writable-"):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    return check(
        name,
        passed(not problem),
        f"{directory}: {problem or 'writable'}",
        remedy=f"choose another folder (runs_dir), or make {existing} writable",
    )


def check_free_disk(directory: Path, *, needed_bytes: int) -> Check:
    """Say whether the disk of `directory` has `needed_bytes` left."""
    free = shutil.disk_usage(nearest_existing(directory)).free
    return check(
        "free disk",
        passed(free >= needed_bytes),
        f"{free / GiB:.2f} GiB free at {directory}",
        threshold=f"the run needs {needed_bytes / GiB:.2f} GiB",
        remedy="free space, lower checkpoint.keep, or choose another runs_dir",
    )


def check_devices(asked: int, *, found: int, kind: str) -> Check:
    """Say whether the layout's product of mesh axes is the number of devices."""
    return check(
        "devices",
        passed(asked == found),
        f"the layout asks for {asked} devices, here are {found} ({kind})",
        remedy=f"make the product of the mesh axes {found}, or start on {asked} devices",
    )


def check_limits() -> tuple[Check, ...]:
    """Return the verdicts on what the system lets this process use."""
    return (
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        check_shared_memory(_free_bytes(Path("/dev/shm"))),
        check_memory_cap(_memory_cap(), physical=_physical_bytes()),
        check_governor(
            _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        ),
    )


def check_open_files(limit: int) -> Check:
    """Say whether a process may hold enough files and sockets open; -1 is no limit."""
    return check(
        "open files",
        passed(limit < 0 or limit >= MIN_OPEN_FILES, "warn"),
        "no limit" if limit < 0 else f"{limit}",
        threshold=f"at least {MIN_OPEN_FILES}",
        remedy=f"ulimit -n {MIN_OPEN_FILES}, or raise nofile in /etc/security/limits.conf",
    )


def check_locked_memory(limit: int) -> Check:
    """Say whether memory may be pinned without limit, as RDMA needs; -1 is no limit."""
    return check(
        "locked memory",
        passed(limit < 0 or limit >= GiB, "warn"),
        "no limit" if limit < 0 else f"{limit / GiB:.3f} GiB",
        threshold="no limit, or 1 GiB, where a NIC reads memory itself (RDMA)",
        remedy="ulimit -l unlimited; docker run --ulimit memlock=-1",
    )


def check_shared_memory(free_bytes: int | None) -> Check:
    """Say whether /dev/shm has room; None where there is none."""
    return check(
        "shared memory",
        passed(free_bytes is not None and free_bytes >= MIN_SHM_BYTES, "warn"),
        "no /dev/shm" if free_bytes is None else f"{free_bytes / GiB:.2f} GiB free in /dev/shm",
        threshold=f"at least {MIN_SHM_BYTES / GiB:.0f} GiB",
        remedy="docker run --shm-size=16g, or mount a larger tmpfs there",
    )


def check_memory_cap(cap_bytes: int | None, *, physical: int) -> Check:
    """Say whether a control group gives this process less memory than the host has."""
    capped = cap_bytes is not None and cap_bytes < physical
    return check(
        "memory cap",
        passed(not capped, "warn"),
        f"{(cap_bytes or 0) / GiB:.1f} GiB of {physical / GiB:.1f} GiB" if capped else "none",
        threshold="none below the host's memory",
        remedy="give the container or the job all memory (srun --mem=0), or count with this much",
    )


def check_governor(governor: str) -> Check:
    """Say whether the CPU is clocked for speed; empty where the system does not tell."""
    return check(
        "cpu governor",
        passed(governor in ("", "performance", "schedutil"), "warn"),
        governor or "not told",
        threshold="performance",
        remedy="cpupower frequency-set -g performance",
    )


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    absolute = Path(os.path.abspath(path))
    return next(p for p in (absolute, *absolute.parents) if p.exists())


def release(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: `0.12.0rc1` gives (0, 12, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _check_version(name: str, found: str | None) -> Check:
    low, high = VERSION_RANGES[name]
    ok = found is not None and release(low) <= release(found) < release(high)
    return check(
        name,
        passed(ok),
        found or "not installed",
        threshold=f"needs >={low},<{high}",
        remedy=f'install it: pip install "{name}>={low},<{high}"',
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""


def _free_bytes(directory: Path) -> int | None:
    return shutil.disk_usage(directory).free if directory.is_dir() else None


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_cap() -> int | None:
    """Return the control group's limit (version 2, then 1); None without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path)
        if text.isdigit():
            return int(text)
    return None
