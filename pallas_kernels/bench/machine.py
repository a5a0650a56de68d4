"""The machine that is measured on: whether it can be, its versions, its ceilings."""

import platform
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.bench.measure import in_threads
from pallas_kernels.bench.timing import Candidate, compiled_candidate, interleaved

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "torch"),
    *("nvidia-cudnn-cu13", "nvidia-cublas", "flashinfer-python", "nvidia-ml-py"),
)

CEILING_SIZE = 8192
COPIED_ELEMENTS = 1 << 29
FORMATS: dict[str, jax.typing.DTypeLike] = {
    "bfloat16_flops": jnp.bfloat16,
    "float8_flops": jnp.float8_e4m3fn,
}


def why_not_here() -> str | None:
    """Why kernels cannot be timed on this machine, with the way out; None if they can."""
    here = jax.default_backend()
    if here == "gpu":
        return None
    return (
        f"JAX runs on {here} here, which has no GPU kernels to time. Run this on a machine with "
        "an NVIDIA GPU and `jaxfound[cuda13]`, with JAX_PLATFORMS unset; or draw a file that was "
        "measured: `jaxfound bench kernels --show docs/benchmarks/kernels-h200.json`"
    )


def use_cache(directory: Path) -> None:
    """Keep every compiled program, and what XLA's autotuning found, in `directory`."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def versions() -> Mapping[str, str]:
    """Versions of what a measurement depends on; packages that are absent are left out."""
    found = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def ceilings(*, num_threads: int = 1) -> Mapping[str, float]:
    """Return what the machine does now: bytes/s of a copy, FLOP/s of bfloat16 and 8-bit products.

    Measured with XLA in this process: a share of the datasheet says less than a share of what
    this card reaches under its own power limit.
    """
    builds: list[Callable[[], Candidate]] = [_copy]
    builds += [partial(_product, name) for name in FORMATS]
    copy, *products = in_threads(builds, num_threads=num_threads)
    (copy_us,) = (min(times) for times in interleaved([copy], num_rounds=3).values())
    found = {"copy_bps": 8 * COPIED_ELEMENTS / (copy_us * 1e-6)}
    for product in products:
        times = interleaved([product], num_rounds=3)[product.name]
        found[product.name] = 2 * CEILING_SIZE**3 / (min(times) * 1e-6)
    return found


def _copy() -> Candidate:
    big = jax.random.normal(jax.random.key(0), (COPIED_ELEMENTS,), jnp.float32)
    return compiled_candidate("copy", lambda x: x + 1.0, [(big,)])


def _product(name: str) -> Candidate:
    shape = (CEILING_SIZE, CEILING_SIZE)
    x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(FORMATS[name])

    def run(x: jax.Array) -> jax.Array:
        by_k = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, x, by_k, preferred_element_type=jnp.bfloat16)

    return compiled_candidate(name, run, [(x,)])
