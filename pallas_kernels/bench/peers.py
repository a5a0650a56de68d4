"""Other libraries' kernels for the same problem; each says why it cannot be timed here."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Candidate
from pallas_kernels.formats import Quantized, round_up


class NotCarriedError(RuntimeError):
    """A peer is not on this machine or refuses the case; the text says why."""


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


def to_torch(array: jax.Array) -> Any:
    """The same memory as a torch tensor; 8-bit floats travel as bytes."""
    module = torch()
    if array.dtype.itemsize > 1:
        return module.from_dlpack(array)
    names = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
    as_bytes = jax.lax.bitcast_convert_type(array, jnp.uint8)
    jax.block_until_ready(as_bytes)
    return module.from_dlpack(as_bytes).view(getattr(module, names[array.dtype.name]))


def torch_blockwise(operands: list[tuple[Quantized, Quantized]]) -> Candidate:
    """Torch's product of 1x128 by 128x128 scales: the same problem as ours (cuBLASLt).

    Raises:
        NotCarriedError: if torch is missing or too old.
    """
    module = torch()
    functional = importlib.import_module("torch.nn.functional")
    if not hasattr(functional, "scaled_mm"):
        raise NotCarriedError(f"torch {module.__version__} has no scaled_mm")
    kinds = functional.ScalingType
    sets = []
    for a, b in operands:
        k_blocks = b.scales.shape[1]
        padded = jnp.pad(b.scales, ((0, 0), (0, round_up(k_blocks, 4) - k_blocks)))
        # Columns of A's scales are contiguous, rows of B's start on 16 bytes: cuBLASLt's rule.
        a_scales = to_torch(jnp.asarray(a.scales.T)).t()
        b_scales = to_torch(padded)[:, :k_blocks].t()
        sets.append((to_torch(a.values), to_torch(b.values[: b.rows]).t(), a_scales, b_scales))

    def start(index: int) -> Any:
        a, b, a_scales, b_scales = sets[index % len(sets)]
        return functional.scaled_mm(
            a,
            b,
            a_scales,
            kinds.BlockWise1x128,
            b_scales,
            kinds.BlockWise128x128,
            output_dtype=module.bfloat16,
        )

    return Candidate("torch_blockwise", start, lambda result: module.cuda.synchronize())


def torch_bfloat16(operands: list[tuple[Quantized, Quantized]]) -> Candidate:
    """Torch's bfloat16 product of the same sizes.

    Raises:
        NotCarriedError: if torch is missing.
    """
    module = torch()
    sets = [
        (to_torch(a.dequantize(jnp.bfloat16)), to_torch(b.dequantize(jnp.bfloat16)).t())
        for a, b in operands
    ]

    def start(index: int) -> Any:
        a, b = sets[index % len(sets)]
        return module.mm(a, b)

    return Candidate("torch_bfloat16", start, lambda result: module.cuda.synchronize())


def xla_bfloat16(operands: list[tuple[Quantized, Quantized]]) -> Candidate:
    """XLA's bfloat16 product of the same sizes."""
    sets = [(a.dequantize(jnp.bfloat16), b.dequantize(jnp.bfloat16)) for a, b in operands]
    dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))))
    compiled = dot.lower(*sets[0]).compile()
    return Candidate("xla_bfloat16", lambda i: compiled(*sets[i % len(sets)]))
