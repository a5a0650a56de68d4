"""Eight virtual CPU devices, programs that compile fast, hardware marks that skip by name."""

import gc
import logging
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

from jaxfound.resources.logs import LOGGERS

jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# On the CPU, half the compile time. The machine code is worse; which operations there are, and in
# which format, stays.
IN_HASTE = jax.config.jax_platforms == "cpu"
if IN_HASTE:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", True)

# Tracing makes many objects and little garbage: fewer looks through all of them.
gc.set_threshold(50_000, 20, 50)

# Files that take longest, the longest first: they begin first, so that no process waits for
# another's at the end. All others follow in the order of their names.
LONGEST = (
    "test_pipelines_equal_one_device.py",
    "test_every_pair_of_axes.py",
    "test_launch.py",
)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    here = jax.default_backend()
    for item in items:
        if item.get_closest_marker("gpu") and here != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"needs a gpu; this is {here}"))
        if item.get_closest_marker("multidevice") and jax.device_count() < 8:
            item.add_marker(pytest.mark.skip(reason=f"needs 8 devices; here {jax.device_count()}"))


def pytest_collection_finish():
    # What was imported stays to the end.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def levels_as_they_were():
    """What a test sets of the loggers' levels, as a command does, ends with it."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)
    yield
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def optimized():
    """Programs are compiled as they are outside of tests."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", IN_HASTE)
