"""Quantise: a matrix into block-scaled 8-bit floating point, and back.

Contract: `quantize` and `rounded` accept any shape, empty ones too. Zero, tiny, huge, subnormal
and partial blocks give finite elements and finite positive scales; NaN and infinity come out as
NaN, alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import hardware
from pallas_kernels.formats import BLOCK, Format, FormatError, Quantized, check_quantized
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.cases import QuantizeCase, make_case
from pallas_kernels.registry import Backend, KernelOp


def quantize(
    x: Float[Array, "*stack rows columns"], *, format: Format, backend: str | None = None
) -> Quantized:
    """Return `x` in `format`. No gradient passes through; `rounded` has one.

    Args:
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        KernelError: if `backend` refuses the case.
    """
    rows, columns = x.shape[-2:]
    case = QuantizeCase(rows=rows, columns=columns, format=format, hardware=hardware.current())
    return OP.choose(case, backend=backend).run(jax.lax.stop_gradient(x), format=format)


def rounded(
    x: Float[Array, "*stack rows columns"], *, format: Format
) -> Float[Array, "*stack rows columns"]:
    """Return `x` as it comes back from `format`; its gradient passes straight through."""
    return _rounded(x, format)


@partial(jax.custom_vjp, nondiff_argnames=("format",))
def _rounded(
    x: Float[Array, "*stack rows columns"], format: Format
) -> Float[Array, "*stack rows columns"]:
    return quantize(x, format=format).dequantize(x.dtype)


def _rounded_forward(
    x: Float[Array, "*stack rows columns"], format: Format
) -> tuple[Float[Array, "*stack rows columns"], None]:
    return _rounded(x, format), None


def _rounded_backward(
    format: Format, saved: None, grad: Float[Array, "*stack rows columns"]
) -> tuple[Float[Array, "*stack rows columns"]]:
    return (grad,)


_rounded.defvjp(_rounded_forward, _rounded_backward)


def requantize_transposed(q: Quantized) -> Quantized:
    """Return the transpose of a 1x128 matrix, again in tiles of 1x128: the operand of wgrad.

    The weight gradient sums over tokens, so its tiles must run along tokens (DeepSeek-V3, section
    3.3.2: 1x128 becomes 128x1). One fused pass: the full-precision matrix is never stored.

    Raises:
        FormatError: if `q` is not in tiles of 1x128.
    """
    check_quantized("q", q)
    if q.format.block != (1, BLOCK):
        raise FormatError(f"requantising for wgrad needs 1x128 tiles, got {q.format}.")
    return quantize(q.dequantize(jnp.float32).mT, format=q.format)


def _serves_everything(case: QuantizeCase) -> None:
    return None


OP: KernelOp[QuantizeCase] = KernelOp(
    name="quantize",
    reference=reference.quantize,
    # Bound by memory: XLA's one fused pass is the fast path, so the reference is the backend.
    backends=(Backend(name="xla", refuses=_serves_everything, run=reference.quantize),),
    make_case=make_case,
)
