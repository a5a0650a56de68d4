"""Quantise: a matrix into block-scaled 8-bit floating point, and back.

Contract: every shape is accepted, empty ones too. Zero, tiny, huge, subnormal and partial blocks
give finite elements and finite positive scales; NaN and infinity come out as NaN, alone. Backends
round a quotient their own way: where it lies between two elements, either may be taken.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import hardware, sharded
from pallas_kernels.formats import (
    ACTIVATION,
    BLOCK,
    WEIGHT,
    Format,
    FormatError,
    Quantized,
    check_quantized,
)
from pallas_kernels.quantize import jax_triton, reference
from pallas_kernels.quantize.cases import SCOPE, QuantizeCase, Way, make_case
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
    if format.block[0] == 1:
        rows = math.prod(x.shape[:-1])
    case = QuantizeCase(rows=rows, columns=columns, format=format, hardware=hardware.current())
    return OP.choose(case, backend=backend).run(jax.lax.stop_gradient(x), case=case)


def quantize_squares(
    x: Float[Array, "*stack k n"],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    backend: str | None = None,
) -> Quantized:
    """Return weights in squares of 128x128, for their product and for that with their transpose.

    Where a kernel serves, the elements of the transpose are made beside and `.mT` copies nothing.
    No gradient passes through.

    Args:
        x: weights; any leading dims.
        dtype: what they are rounded to before they are quantised; their own by default.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        KernelError: if `backend` refuses the case.
    """
    narrowed = dtype is not None and jnp.dtype(dtype) == jnp.bfloat16
    sizes = {"rows": x.shape[-2], "columns": x.shape[-1], "format": WEIGHT}
    case = QuantizeCase(**sizes, hardware=hardware.current(), way="squares", is_narrowed=narrowed)
    return OP.choose(case, backend=backend).run(jax.lax.stop_gradient(x), case=case)


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


def quantize_both(
    x: Float[Array, "*batch n"], *, format: Format, backend: str | None = None
) -> tuple[Quantized, Quantized]:
    """Return `x`, and its transpose [n, tokens], in tiles of 1x128: a gradient for both products.

    Args:
        x: at least one dim of tokens; they are one dim of the transpose.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        FormatError: if `format` is not in tiles of 1x128.
        KernelError: if `backend` refuses the case.
    """
    check_row_tiles(format)
    *batch, columns = x.shape
    tokens = x.reshape(math.prod(batch), columns)
    case = QuantizeCase(*tokens.shape, format=format, hardware=hardware.current(), way="both")
    run = OP.choose(case, backend=backend).run
    plain, turned = run(jax.lax.stop_gradient(tokens), case=case)
    if len(batch) == 1:
        return plain, turned
    if not sharded.is_local():
        # Tokens in one dim would be gathered where more than the first dim is sharded.
        return quantize(x, format=format, backend=backend), turned
    values, scales = (part.reshape(*batch, part.shape[-1]) for part in (plain.values, plain.scales))
    return replace(plain, values=values, scales=scales, rows=batch[-1]), turned


def swiglu_both(
    gate: Float[Array, "tokens n"], up: Float[Array, "tokens n"], *, backend: str | None = None
) -> tuple[Quantized, Quantized]:
    """Return silu(gate) · up, and its transpose [n, tokens], in tiles of 1x128.

    What it multiplies is float32 until it is rounded to 8 bits.

    Args:
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        KernelError: if `backend` refuses the case.
    """
    case = _swiglu_case(gate, "swiglu")
    stopped = jax.lax.stop_gradient((gate, up))
    return OP.choose(case, backend=backend).run(stopped, case=case)


def swiglu_gradients_both(
    gate: Float[Array, "tokens n"],
    up: Float[Array, "tokens n"],
    grad: Float[Array, "tokens n"],
    *,
    backend: str | None = None,
) -> tuple[tuple[Quantized, Quantized], tuple[Quantized, Quantized]]:
    """Return the gradients of gate and of up, each as `quantize_both` returns a matrix.

    Args:
        grad: the gradient of silu(gate) · up.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        KernelError: if `backend` refuses the case.
    """
    case = _swiglu_case(gate, "swiglu_gradients")
    stopped = jax.lax.stop_gradient((gate, up, grad))
    return OP.choose(case, backend=backend).run(stopped, case=case)


def serves_swiglu(rows: int, columns: int) -> bool:
    """Whether a kernel makes SwiGLU and rounds it in one here; XLA would do no better apart."""
    case = QuantizeCase(rows, columns, ACTIVATION, hardware.current(), way="swiglu")
    return OP.choose(case).name != "xla"


def _swiglu_case(gate: Array, way: Way) -> QuantizeCase:
    return QuantizeCase(*gate.shape, format=ACTIVATION, hardware=hardware.current(), way=way)


def requantize_transposed(q: Quantized, *, backend: str | None = None) -> Quantized:
    """Return the transpose of a 1x128 matrix, again in tiles of 1x128.

    The weight gradient sums over tokens, so its tiles must run along tokens (DeepSeek-V3, section
    3.3.2: 1x128 becomes 128x1). For operands of which nothing else was kept; `linear` rounds what
    it has both ways at once.

    Args:
        q: one matrix, no stack.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        FormatError: if `q` is not in tiles of 1x128.
        KernelError: if `backend` refuses the case.
    """
    check_quantized("q", q)
    check_row_tiles(q.format)
    sizes = {"rows": q.rows, "columns": q.columns, "format": q.format}
    case = QuantizeCase(**sizes, hardware=hardware.current(), way="transposed")
    return OP.choose(case, backend=backend).run(q, case=case)


def check_row_tiles(format: Format) -> None:
    """Raise FormatError unless `format` is in tiles of 1x128."""
    if format.block != (1, BLOCK):
        raise FormatError(f"a transpose needs 1x{BLOCK} tiles on both sides, got {format}.")


@jax.named_scope(SCOPE)
def _by_reference(
    x: Float[Array, "*stack rows columns"] | Quantized | tuple[Array, ...], *, case: QuantizeCase
) -> Any:
    """What the case asks for, as XLA compiles the reference."""
    if isinstance(x, tuple):
        matrices = reference.swiglu(*x) if case.way == "swiglu" else reference.swiglu_gradients(*x)
        pairs = tuple(
            tuple(reference.quantize(m, format=case.format) for m in (matrix, matrix.mT))
            for matrix in matrices
        )
        return pairs[0] if case.way == "swiglu" else pairs
    if isinstance(x, Quantized):
        return reference.quantize(x.dequantize(jnp.float32).mT, format=case.format)
    plain = reference.quantize(
        x.astype(jnp.bfloat16) if case.is_narrowed else x, format=case.format
    )
    if case.way in ("plain", "squares"):
        return plain
    return plain, reference.quantize(x.mT, format=case.format)


def _serves_everything(case: QuantizeCase) -> None:
    return None


OP: KernelOp[QuantizeCase] = KernelOp(
    name="quantize",
    reference=reference.quantize,
    backends=(
        Backend(name="jax_triton", refuses=jax_triton.refuses, run=jax_triton.run),
        Backend(name="xla", refuses=_serves_everything, run=_by_reference),
    ),
    make_case=make_case,
)
