"""The block-scaled 8-bit product D = A·Bᵀ (+ C): contract, checks and choice of backend.

Contract: A [*stack, M, K] in tiles of 1x128; B [N, K] in squares of 128x128 (weights) or tiles of
1x128 (the weight gradient); both with the same kind of scale. The sum over each 128 of K is
promoted to float32. Every size is legal: M = 0 or N = 0 gives an empty result, K = 0 gives C or
zeros. The gradient recipe lives in `pallas_kernels.linear`, which quantises.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import hardware, sharded
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


def fp8_matmul_sum(
    pairs: Sequence[tuple[Quantized, Quantized]],
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
) -> Float[Array, "m n"]:
    """Return the sum of A·Bᵀ over pairs of matrices, in `out_dtype`.

    Where `is_one_sum` it is one product, rounded once. Else each product is rounded to
    `out_dtype`, and so is their sum.

    Args:
        pairs: operands [M, K] and [N, K]; K may differ.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        FormatError: if the operands of a pair do not fit, or the products have several shapes.
        KernelError: if `backend` refuses the case.
    """
    cases = [case_of(a, b, out_dtype=out_dtype) for a, b in pairs]
    if len({(case.m, case.n) for case in cases}) != 1:
        shapes = ", ".join(f"{case.m}x{case.n}" for case in cases) or "none"
        raise FormatError(f"products of one shape can be added; these are {shapes}.")
    if is_one_sum(cases, backend=backend):
        dtype = OUT_DTYPES[cases[0].out_dtype]
        return mosaic_gpu.run_sum(pairs, case=_whole(cases), out_dtype=dtype)
    first, *others = (fp8_matmul(a, b, out_dtype=out_dtype, backend=backend) for a, b in pairs)
    return sum(others, start=first)


def is_one_sum(cases: Sequence[MatmulCase], *, backend: str | None = None) -> bool:
    """Whether a kernel adds up these products of one shape as it makes them.

    It does on one Hopper GPU that has all of the operands, for many rows and weights in squares.
    """
    whole = _whole(cases)
    squares = all(case.b_block_rows == BLOCK and case.flops for case in cases)
    alike = len({(case.a_element, case.b_element) for case in cases}) == 1
    if not (squares and alike and sharded.is_local()) or whole.few_rows:
        return False
    return OP.choose(whole, backend=backend).run is mosaic_gpu.run


def adds_products(m: int, n: int, ks: Sequence[int]) -> bool:
    """Whether `fp8_matmul_sum` is one product here, for matrices of M x K and N x K in squares."""
    here = hardware.current()
    return is_one_sum([make_case(m, n, k, hardware=here) for k in ks])


def _whole(cases: Sequence[MatmulCase]) -> MatmulCase:
    return replace(cases[0], k=sum(case.k for case in cases))


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
