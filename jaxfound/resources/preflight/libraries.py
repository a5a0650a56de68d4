"""Which CUDA, cuDNN and NCCL this process would load, and whether there are several."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from jaxfound.resources.preflight.check import Check, check, passed

# One library, whatever follows its name.
_LIBRARY = re.compile(r"lib(cudart|cublas|cudnn|nccl)\.so(?:\.[\d.]+)?$")
SYSTEM_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
)


def library_paths(folders: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """Return the files of each library found in `folders`, links followed, each once."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for path in folder.glob("lib*.so*") if folder.is_dir() else ():
            match = _LIBRARY.match(path.name)
            if match is not None:
                found[match[1]].add(str(path.resolve()))
    return {name: tuple(sorted(paths)) for name, paths in sorted(found.items())}


def search_folders() -> tuple[Path, ...]:
    """Return where a loader looks: LD_LIBRARY_PATH, NVIDIA's wheels, the system."""
    asked = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    wheels: set[Path] = set()
    for each in distributions():
        if (each.name or "").startswith("nvidia-"):
            files = each.files or ()
            wheels |= {Path(str(each.locate_file(f))).parent for f in files if ".so" in f.name}
    return (*asked, *sorted(wheels), *map(Path, SYSTEM_FOLDERS))


def loaded_libraries(maps: str) -> dict[str, tuple[str, ...]]:
    """Return the files of each library in this process.

    Args:
        maps: what /proc/self/maps says.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for line in maps.splitlines():
        path = line.partition("/")[2]
        match = _LIBRARY.match(Path(path).name) if path else None
        if match is not None:
            found[match[1]].add(f"/{path}")
    return {name: tuple(sorted(paths)) for name, paths in sorted(found.items())}


def check_libraries(
    there: Mapping[str, Sequence[str]], loaded: Mapping[str, Sequence[str]]
) -> tuple[Check, ...]:
    """Say for each library whether there is one of it, on disk and in this process."""
    return tuple(
        _check_one(name, there.get(name, ()), loaded.get(name, ()))
        for name in sorted(there.keys() | loaded.keys())
    )


def check_plugins(installed: Iterable[str]) -> Check:
    """Say whether JAX has one CUDA plugin at most.

    Args:
        installed: names of installed packages.
    """
    plugins = sorted(name for name in installed if re.fullmatch(r"jax-cuda\d+-plugin", name))
    return check(
        "jax plugins",
        passed(len(plugins) <= 1),
        ", ".join(plugins) or "none for CUDA",
        threshold="one CUDA plugin at most",
        remedy=f"pip uninstall all of {', '.join(plugins)} and the pjrt packages, then install the "
        "one for this driver",
    )


def _check_one(name: str, there: Sequence[str], loaded: Sequence[str]) -> Check:
    title, rule = f"lib{name}", "one file in the process, one on the loader's way"
    if len(loaded) > 1:
        value = f"{len(loaded)} loaded at once: {', '.join(loaded)}"
        remedy = "unset LD_LIBRARY_PATH, and uninstall the package that brings the second"
        return check(title, "fail", value, threshold=rule, remedy=remedy)
    return check(
        title,
        passed(len(there) <= 1, "warn"),
        ", ".join(loaded or there),
        threshold=rule,
        remedy=f"there are {len(there)} ({', '.join(there)}): which one is loaded depends on "
        "LD_LIBRARY_PATH; keep the one of JAX's wheels",
    )
