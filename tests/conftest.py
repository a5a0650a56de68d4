"""Eight virtual CPU devices, a compile cache, and hardware marks that skip themselves by name."""

import os
from pathlib import Path

# Before JAX reads it: with fewer threads than this, virtual devices can wait for each other for
# good (jaxfound/resources/platform.py: use_virtual_cpus).
os.environ.setdefault("NPROC", "32")

import jax
import pytest

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax-tests"

jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_collection_modifyitems(items):
    here = jax.default_backend()
    for item in items:
        if item.get_closest_marker("gpu") and here != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"needs a gpu; this is {here}"))
        if item.get_closest_marker("multidevice") and jax.device_count() < 8:
            item.add_marker(pytest.mark.skip(reason=f"needs 8 devices; here {jax.device_count()}"))
