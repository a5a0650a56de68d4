"""Other libraries' kernels for the same problem; each says why it cannot be timed here."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.measure import NotCarriedError
from pallas_kernels.bench.timing import Candidate

# Wheels from 0.7 on weigh 100 MB; both kinds hold sources only.
NO_FLASHINFER = (
    "flashinfer is not installed (0.6.1: 8 MB of sources, which nvcc compiles at first use)"
)
NO_NVCC = "flashinfer compiles its kernels with nvcc at first use, and there is no nvcc"
NVCC = ("nvcc", "/usr/local/cuda/bin/nvcc")


def torch() -> Any:
    """Return torch with a GPU.

    Raises:
        NotCarriedError: if it is not installed or sees no GPU.
    """
    if importlib.util.find_spec("torch") is None:
        raise NotCarriedError("torch is not installed")
    module = importlib.import_module("torch")
    if not module.cuda.is_available():
        raise NotCarriedError("torch sees no GPU")
    return module


def load() -> None:
    """Import what there is of other libraries; before threads do, which could see half of one."""
    for name in ("torch", "flashinfer"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def to_torch(array: jax.Array) -> Any:
    """The same memory as a torch tensor; 8-bit floats travel as bytes."""
    module = torch()
    if array.dtype.itemsize > 1:
        return module.from_dlpack(array)
    names = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
    as_bytes = jax.lax.bitcast_convert_type(array, jnp.uint8)
    jax.block_until_ready(as_bytes)
    return module.from_dlpack(as_bytes).view(getattr(module, names[array.dtype.name]))


def torch_candidate(name: str, start: Callable[[int], Any], operands: Sequence[Any]) -> Candidate:
    """A candidate of torch's, with the memory of its tensors and what its allocator gives.

    Args:
        operands: the tensors that one call reads.
    """
    module = torch()
    module.cuda.synchronize()

    def memory_bytes() -> int:
        module.cuda.synchronize()
        before = module.cuda.memory_allocated()
        module.cuda.reset_peak_memory_stats()
        start(0)
        module.cuda.synchronize()
        given = module.cuda.max_memory_allocated() - before
        return sum(x.nbytes for x in operands) + given

    return Candidate(name, start, lambda result: module.cuda.synchronize(), memory_bytes)


def flashinfer(module: str, name: str) -> Any:
    """Return what is called `name` in a module of FlashInfer's.

    Raises:
        NotCarriedError: if it is not installed, cannot compile its kernels here or has no `name`.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise NotCarriedError(NO_FLASHINFER)
    if not any(shutil.which(path) for path in NVCC):
        raise NotCarriedError(NO_NVCC)
    torch()
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise NotCarriedError(f"this flashinfer has no {name}")
    return found
