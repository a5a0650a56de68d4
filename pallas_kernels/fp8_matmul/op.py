"""The block-scaled 8-bit product D = A·Bᵀ (+ C): contract, checks and choice of backend.

Contract: A [*stack, M, K] in tiles of 1x128; B [N, K] in squares of 128x128 (weights) or tiles of
1x128 (the weight gradient); both with the same kind of scale. The sum over each 128 of K is
promoted to float32. Every size is legal: M = 0 or N = 0 gives an empty result, K = 0 gives C or
zeros. The gradient recipe lives in `pallas_kernels.linear`, which quantises.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import hardware
from pallas_kernels.formats import (
    BLOCK,
    FormatError,
    Quantized,
    check_quantized,
    check_same_scale_kind,
)
from pallas_kernels.fp8_matmul import jax_triton, mosaic_gpu, reference, xla
from pallas_kernels.fp8_matmul.cases import MatmulCase, OutDtype, make_case
from pallas_kernels.registry import Backend, KernelOp

OUT_DTYPES: dict[OutDtype, jnp.dtype] = {
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "float32": jnp.dtype(jnp.float32),
}


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    c: Float[Array, "*stack m n"] | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
) -> Float[Array, "*stack m n"]:
    """Return A·Bᵀ (+ C) in `out_dtype`, bfloat16 or float32.

    Args:
        c: added in float32 before the result is rounded.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        FormatError: if the operands' formats or inner sizes do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    case = case_of(a, b, out_dtype=out_dtype if c is None else jnp.float32)
    chosen = OP.choose(case, backend=backend)
    if case.flops:
        product = chosen.run(a, b, case=case, out_dtype=OUT_DTYPES[case.out_dtype])
    else:
        product = jnp.zeros((*a.shape[:-1], b.rows), OUT_DTYPES[case.out_dtype])
    if c is not None:
        product = product + c.astype(jnp.float32)
    return product.astype(out_dtype)


def case_of(a: Quantized, b: Quantized, *, out_dtype: jax.typing.DTypeLike) -> MatmulCase:
    """Check that the operands fit each other and return their case.

    Raises:
        FormatError: if they do not.
    """
    check_quantized("a", a)
    check_quantized("b", b)
    check_same_scale_kind(a, b)
    if a.format.block != (1, BLOCK):
        raise FormatError(f"a must be in tiles of 1x{BLOCK}, got {a.format}.")
    if b.format.block not in ((BLOCK, BLOCK), (1, BLOCK)):
        raise FormatError(
            f"b must be in blocks of {BLOCK}x{BLOCK} or tiles of 1x{BLOCK}, got {b.format}. "
            "Scales must run along K, the second dim of both operands; use .mT or requantise."
        )
    if len(b.shape) != 2 or a.columns != b.columns:
        raise FormatError(
            f"a is {a.shape} and b is {b.shape}: b must be [N, K] with the K of a. "
            "For a stack of weights use grouped_matmul or jax.vmap."
        )
    name = jnp.dtype(out_dtype).name
    if name not in OUT_DTYPES:
        raise FormatError(f"out_dtype={name} is not one of {[*OUT_DTYPES]}.")
    return MatmulCase(
        m=math.prod(a.shape[:-1]),
        n=b.rows,
        k=a.columns,
        b_block_rows=b.format.block[0],
        out_dtype="float32" if name == "float32" else "bfloat16",
        hardware=hardware.current(),
        a_element=a.format.element,
        b_element=b.format.element,
    )


OP: KernelOp[MatmulCase] = KernelOp(
    name="fp8_matmul",
    reference=reference.fp8_matmul,
    backends=(
        Backend(name="mosaic_gpu", refuses=mosaic_gpu.refuses, run=mosaic_gpu.run),
        Backend(name="jax_triton", refuses=jax_triton.refuses, run=jax_triton.run),
        Backend(name="xla", refuses=xla.refuses, run=xla.run),
    ),
    make_case=make_case,
)
