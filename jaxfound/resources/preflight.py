"""Checks of this host that cost nothing, made before anything that costs much.

No check starts a JAX backend; the number of devices is passed in by a caller who knows it.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

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


class Check(NamedTuple):
    """One verdict.

    Attributes:
        name: what was looked at.
        ok: whether it is as it must be.
        detail: the value, and the rule.
        way_out: what to do; empty when `ok`.
    """

    name: str
    ok: bool
    detail: str
    way_out: str


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
    return _verdict(
        "python",
        found >= MIN_PYTHON,
        f"{_dotted(found)}, needs {_dotted(MIN_PYTHON)} or newer",
        f"make the environment with Python {_dotted(MIN_PYTHON)}",
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


def check_writable(directory: Path) -> Check:
    """Say whether a file can be made in `directory`, or in the nearest folder above that exists."""
    existing = nearest_existing(directory)
    problem = ""
    try:
        # A real write: permission bits say nothing for root, read-only mounts and quotas.
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".writable-"):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    return _verdict(
        "run directory",
        not problem,
        f"{directory}: {problem or 'writable'}",
        f"choose another runs_dir, or make {existing} writable",
    )


def check_free_disk(directory: Path, *, needed_bytes: int) -> Check:
    """Say whether the disk of `directory` has `needed_bytes` left."""
    free = shutil.disk_usage(nearest_existing(directory)).free
    return _verdict(
        "free disk",
        free >= needed_bytes,
        f"{free / GiB:.2f} GiB free at {directory}, the run needs {needed_bytes / GiB:.2f} GiB",
        "free space, lower checkpoint.keep, or choose another runs_dir",
    )


def check_devices(asked: int, *, found: int, kind: str) -> Check:
    """Say whether the layout's product of mesh axes is the number of devices."""
    return _verdict(
        "devices",
        asked == found,
        f"the layout asks for {asked} devices, here are {found} ({kind})",
        f"change the mesh axes so that their product is {found}, or start on {asked} devices",
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
    return _verdict(
        name,
        ok,
        f"{found or 'not installed'}, needs >={low},<{high}",
        f'install it: pip install "{name}>={low},<{high}"',
    )


def _verdict(name: str, ok: bool, detail: str, way_out: str) -> Check:
    return Check(name, ok, detail, "" if ok else way_out)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
