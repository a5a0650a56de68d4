"""The one adapter to jax-triton: which versions serve, and how a kernel's source becomes a call.

Both packages are imported only when a kernel is traced: files that hold kernels are read without
them.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

from jax.interpreters import mlir
from jaxlib.mlir import ir

from pallas_kernels import mosaic
from pallas_kernels.hardware import Hardware

# The calling convention of jax-triton's next series is another, and it needs a later Triton.
VERSIONS: dict[str, str] = {"jax-triton": "0.3", "triton": "3.6"}
# Of the plugin's handler with typed attributes.
TARGET = "triton_kernel_call_ffi"
PLUGINS: tuple[str, ...] = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def refuses(hardware: Hardware) -> str | None:
    """Why `hardware`, or what is installed here, cannot take a Triton kernel; None if it can."""
    if hardware.platform != "cuda":
        return f"{hardware.kind} is {hardware.platform}; this kernel is compiled for NVIDIA GPUs"
    if mosaic.is_interpreting():
        return "the GPU interpreter in force runs Mosaic kernels only"
    return missing()


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why this machine cannot compile Triton kernels for JAX; None if it can."""
    for name, series in VERSIONS.items():
        try:
            have = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed; it comes with the extras `cuda12` and `cuda13`"
        if not have.startswith(f"{series}."):
            return f"{name} {have} is installed; this file is written for {series}"
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return f"jax-triton needs JAX's CUDA plugin; none of {[*PLUGINS]} is installed"
    return None


def call(
    source: Callable[..., None],
    *arrays: Any,
    hardware: Hardware,
    uses: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Call the kernel `source` on `arrays` with the options of `jax_triton.triton_call`.

    `source` finds Triton's language under the name `tl` of its module, which is set here.

    Args:
        uses: functions of its module that it calls, by name; from here on Triton's.
    """
    lower_to_typed_calls()
    return importlib.import_module("jax_triton").triton_call(
        *arrays,
        kernel=_compiled(source, uses),
        name=inspect.unwrap(source).__name__,
        # Stated, it spares the lowering a look at a device, which may be absent.
        compute_capability=int(hardware.architecture.removeprefix("sm")),
        **options,
    )


@lru_cache(maxsize=1)
def lower_to_typed_calls() -> None:
    """Lower calls to the handler that XLA may record in a CUDA graph.

    The untyped one, to which this series of jax-triton lowers, ends each graph: a step of decoding
    is then launched kernel by kernel, which takes the host longer than the kernels take. It is the
    lowering of all Triton calls of the process from here on.
    """
    library = importlib.import_module("jax_triton.triton_lib")

    def lower(ctx: mlir.LoweringRuleContext, *arrays: Any, **params: Any) -> Any:
        backend = library.get_cuda_backend
        results = library.triton_kernel_call_lowering(backend, ctx, *arrays, **params)
        attributes = results[0].owner.attributes
        attributes["call_target_name"] = ir.StringAttr.get(TARGET)
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
        opaque = attributes["backend_config"]
        attributes["backend_config"] = ir.DictAttr.get({"opaque": opaque})
        return results

    mlir.register_lowering(library.triton_kernel_call_p, lower, platform="cuda")


@lru_cache(maxsize=16)
def _compiled(source: Callable[..., Any], uses: tuple[str, ...]) -> Any:
    """A kernel as Triton takes it."""
    # A test's type checks may be wrapped around it.
    kernel = inspect.unwrap(source)
    names = kernel.__globals__
    names["tl"] = importlib.import_module("triton.language")
    for name in uses:
        if isinstance(names[name], FunctionType):
            names[name] = _compiled(names[name], ())
    return importlib.import_module("triton").jit(kernel)
