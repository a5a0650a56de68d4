"""Peers of the block-scaled product: the same matrices through other libraries' kernels."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench import peers
from pallas_kernels.bench.measure import NotCarriedError
from pallas_kernels.bench.timing import Candidate, compiled_candidate
from pallas_kernels.formats import Quantized, round_up

# Both operands have K last.
BY_K = (((1,), (1,)), ((), ()))


class Operands(NamedTuple):
    """The same matrices quantised, and dequantised to bfloat16 for peers."""

    a: Quantized
    b: Quantized
    a_wide: jax.Array
    b_wide: jax.Array


def _torch_candidate(
    name: str, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]
) -> Candidate:
    return peers.torch_candidate(name, lambda index: call(*sets[index % len(sets)]), sets[0])


def torch_blockwise(operands: Sequence[Operands]) -> Candidate:
    """Torch's product of 1x128 by 128x128 scales: the same problem as ours (cuBLASLt).

    Raises:
        NotCarriedError: if torch is missing or too old.
    """
    module = peers.torch()
    functional = importlib.import_module("torch.nn.functional")
    if not hasattr(functional, "scaled_mm"):
        raise NotCarriedError(f"torch {module.__version__} has no scaled_mm")
    kinds = functional.ScalingType
    sets = []
    for a, b, _, _ in operands:
        k_blocks = b.scales.shape[1]
        padded = jnp.pad(b.scales, ((0, 0), (0, round_up(k_blocks, 4) - k_blocks)))
        # Columns of A's scales are contiguous, rows of B's start on 16 bytes: cuBLASLt's rule.
        a_scales = peers.to_torch(jnp.asarray(a.scales.T)).t()
        b_scales = peers.to_torch(padded)[:, :k_blocks].t()
        values = peers.to_torch(a.values), peers.to_torch(b.values[: b.rows]).t()
        sets.append((*values, a_scales, b_scales))

    def call(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
        return functional.scaled_mm(
            a,
            b,
            a_scales,
            kinds.BlockWise1x128,
            b_scales,
            kinds.BlockWise128x128,
            output_dtype=module.bfloat16,
        )

    return _torch_candidate("torch_blockwise", call, sets)


def torch_rowwise(operands: Sequence[Operands]) -> Candidate:
    """Torch's product with one scale a row of A and of B, without promotion of the sums.

    Raises:
        NotCarriedError: if torch is missing.
    """
    module = peers.torch()
    sets = []
    for a, b, _, _ in operands:
        values = peers.to_torch(a.values), peers.to_torch(b.values[: b.rows]).t()
        scales = (
            module.ones((a.rows, 1), device="cuda"),
            module.ones((1, b.rows), device="cuda"),
        )
        sets.append((*values, *scales))

    def call(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
        return module._scaled_mm(
            a, b, a_scales, b_scales, out_dtype=module.bfloat16, use_fast_accum=True
        )

    return _torch_candidate("torch_rowwise", call, sets)


def torch_bfloat16(operands: Sequence[Operands]) -> Candidate:
    """Torch's bfloat16 product of the same sizes.

    Raises:
        NotCarriedError: if torch is missing.
    """
    module = peers.torch()
    sets = [(peers.to_torch(one.a_wide), peers.to_torch(one.b_wide).t()) for one in operands]
    return _torch_candidate("torch_bfloat16", module.mm, sets)


def xla_bfloat16(operands: Sequence[Operands]) -> Candidate:
    """XLA's bfloat16 product of the same sizes."""
    sets = [(one.a_wide, one.b_wide) for one in operands]
    return compiled_candidate("xla_bfloat16", lambda a, b: jax.lax.dot_general(a, b, BY_K), sets)


def xla_float8(operands: Sequence[Operands]) -> Candidate:
    """XLA's 8-bit product of the elements alone, without any scale."""
    sets = [(one.a.values, one.b.values) for one in operands]

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, BY_K, preferred_element_type=jnp.bfloat16)

    return compiled_candidate("xla_float8", run, sets)


def flashinfer_groupwise(operands: Sequence[Operands]) -> Candidate:
    """FlashInfer's product of 1x128 by 128x128 scales for Hopper, which is DeepGEMM's.

    Its `gemm_fp8_nt_groupwise` is for Blackwell alone.

    Raises:
        NotCarriedError: if FlashInfer is not there.
    """
    call = peers.flashinfer("flashinfer.gemm", "fp8_blockscale_gemm_sm90")
    sets = []
    for a, b, _, _ in operands:
        values = peers.to_torch(a.values), peers.to_torch(b.values[: b.rows])
        sets.append((*values, peers.to_torch(a.scales), peers.to_torch(b.scales)))
    candidate = _torch_candidate("flashinfer_groupwise", call, sets)
    # Its first call compiles.
    candidate.wait(candidate.start(0))
    return candidate
