"""Eight virtual CPU devices, programs that compile fast, hardware marks that skip by name."""

import os
from pathlib import Path

# Before JAX reads them, and for the processes that tests start. With fewer threads than this,
# virtual devices can wait for each other for good (jaxfound/resources/platform.py:
# use_virtual_cpus).
os.environ.setdefault("NPROC", "32")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".cache" / "jax-tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax
import pytest

jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.config.jax_platforms == "cpu":
    # Half the compile time on the CPU. The machine code is worse; which operations there are,
    # and in which format, stays.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_modifyitems(items):
    here = jax.default_backend()
    for item in items:
        if item.get_closest_marker("gpu") and here != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"needs a gpu; this is {here}"))
        if item.get_closest_marker("multidevice") and jax.device_count() < 8:
            item.add_marker(pytest.mark.skip(reason=f"needs 8 devices; here {jax.device_count()}"))


@pytest.fixture
def optimized():
    """Programs are compiled as they are outside of tests."""
    before = jax.config.jax_disable_most_optimizations
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
