"""The drop-in matrix product of a model's linear layers, in the number format that is asked for."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import ACTIVATION, WEIGHT, Quantized
from pallas_kernels.fp8_matmul import fp8_matmul, fp8_matmul_sum
from pallas_kernels.quantize import (
    quantize,
    quantize_both,
    quantize_squares,
    rounded,
    swiglu_both,
    swiglu_gradients_both,
)
from pallas_kernels.sharded import (
    STACK_LETTERS,
    ShardRule,
    is_local,
    on_automatic_axes,
    vary,
    varying_axes,
)
from pallas_kernels.widened_matmul import widened_matmul
from pallas_kernels.widened_matmul.cases import FEW_ROWS

Precision = Literal["float32", "bfloat16", "fp8", "fp8_weights"]


def linear(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], *, precision: Precision
) -> Float[Array, "*batch n"]:
    """Return `x @ w` computed in `precision`, in the dtype of `x`; differentiable in both.

    Args:
        x: activations; any leading dims.
        w: weights, input features first.
        precision: "float32" multiplies in full float32 (never TF32); "bfloat16" rounds both
            operands and the incoming gradient to bfloat16 and sums in float32; "fp8" quantises
            by the DeepSeek-V3 recipe, forward and backward, and any size is padded; "fp8_weights"
            rounds the weights alone, to squares of 128x128, and multiplies in the dtype of `x`.
    Raises:
        ValueError: if `precision` is not a row of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown. Use one of {sorted(PRECISIONS)}.")
    axes = varying_axes(x, w)
    stack = STACK_LETTERS[: x.ndim - 1]
    rule = ShardRule(operands=(f"{stack}k", "kn"), results=(f"{stack}n",), contracted="k")
    product = on_automatic_axes(PRECISIONS[precision], rule)
    return product(vary(x, axes), vary(w, axes))


def quantized_linear(x: Float[Array, "*batch k"], w: Quantized) -> Float[Array, "*batch n"]:
    """Return what `linear` returns in "fp8", of weights that were quantised before; no gradient.

    Args:
        x: activations; any leading dims.
        w: weights [n, k] in squares: `quantize(w, format=WEIGHT).mT`, kept as it is.
    """
    x_q = quantize(x, format=ACTIVATION)
    return fp8_matmul(x_q, w, out_dtype=_sum_dtype(x.dtype)).astype(x.dtype)


def widened_linear(x: Float[Array, "*batch k"], w: Quantized) -> Float[Array, "*batch n"]:
    """Return what `linear` returns in "fp8_weights", of weights kept in 8 bits; no gradient.

    Few rows multiply weights that are widened as they are read; for many all are widened before.

    Args:
        x: activations; any leading dims.
        w: weights [n, k] in squares: `quantize(w, format=WEIGHT).mT`, kept as it is.
    """
    num_rows = math.prod(x.shape[:-1])
    if num_rows > FEW_ROWS:
        return _in_own_dtype(x, w.mT.dequantize(x.dtype))
    stack = replace(w, values=w.values[None], scales=w.scales[None], turned=None)
    product = widened_matmul(x.reshape(num_rows, x.shape[-1]), stack)
    return product.reshape(*x.shape[:-1], w.rows)


def linear_of_quantized(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], w_q: Quantized
) -> Float[Array, "*batch n"]:
    """Return what `linear` returns in "fp8", of weights that were quantised before.

    Differentiable in `x` and `w`: one quantisation serves the product, the gradient of its input
    (the same squares, transposed) and every other use of the weights before they change.

    Args:
        x: activations; any leading dims.
        w: the weights, which get the gradient; their values are not read.
        w_q: `quantize(w, format=WEIGHT)`.
    """
    return _fp8_product_of(x, w, w_q, _Dtypes(x=x.dtype, w=w.dtype))


def linears_of_quantized(
    x: Float[Array, "*batch k"], w: tuple[Array, ...], w_q: tuple[Quantized, ...]
) -> tuple[Array, ...]:
    """Return `linear_of_quantized` of the same x and each of the weights.

    The gradient of x is one sum over the outputs of all, where a kernel takes it as one
    (`fp8_matmul.adds_products`). For arrays that one device has whole.

    Args:
        x: activations; any leading dims.
        w: weights [k, n], n of each its own, which get the gradients; their values are not read.
        w_q: `quantize(w, format=WEIGHT)` of each.
    """
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    outs: tuple[Array, ...] = _linears(tokens, w, w_q, _Dtypes(x=x.dtype, w=w[0].dtype))
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outs)


class Swiglu(NamedTuple):
    """What there is one of for each matrix of a feed-forward down(silu(gate(x)) · up(x))."""

    gate: Any
    up: Any
    down: Any


def swiglu_of_quantized(
    x: Float[Array, "*batch k"], w: Swiglu, w_q: Swiglu
) -> Float[Array, "*batch k"]:
    """Return down(silu(gate(x)) · up(x)) in "fp8", of weights that were quantised before.

    As three calls of `linear_of_quantized`, but that what is multiplied and its gradients stay in
    float32 until they are rounded to 8 bits, by the kernels that make them. For arrays that one
    device has whole; `serves_swiglu` says where it is worth it.

    Args:
        x: activations; any leading dims.
        w: the weights, [k, n] and [n, k], which get the gradients; their values are not read.
        w_q: `quantize(w, format=WEIGHT)` of each.
    """
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out: Array = _swiglu(tokens, w, w_q, _Dtypes(x=x.dtype, w=w.gate.dtype))
    return out.reshape(*x.shape[:-1], w_q.down.columns)


def _product(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], *, dtype: jnp.dtype
) -> Float[Array, "*batch n"]:
    """`x @ w` with operands of `dtype` and a float32 (or wider) sum."""
    return lax.dot_general(
        x.astype(dtype),
        w.astype(dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype.itemsize >= 4 else None,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )


def _float32(x: Float[Array, "*batch k"], w: Float[Array, "k n"]) -> Float[Array, "*batch n"]:
    # Wider operands stay wide, so that a float64 check of a model is a float64 check here too.
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    return _product(x, w, dtype=dtype).astype(x.dtype)


def _fp8_weights(x: Float[Array, "*batch k"], w: Float[Array, "k n"]) -> Float[Array, "*batch n"]:
    # In the dtype of `x`, as serving widens what it keeps in 8 bits.
    return _in_own_dtype(x, rounded(w.astype(x.dtype), format=WEIGHT))


def _in_own_dtype(x: Float[Array, "*batch k"], w: Float[Array, "k n"]) -> Float[Array, "*batch n"]:
    return _bfloat16(x, w) if x.dtype == jnp.bfloat16 else _float32(x, w)


@jax.custom_vjp
def _bfloat16(x: Float[Array, "*batch k"], w: Float[Array, "k n"]) -> Float[Array, "*batch n"]:
    operands = (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(*operands, contracted, preferred_element_type=_left_in(x.dtype)).astype(
        x.dtype
    )


def _bfloat16_forward(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"]
) -> tuple[Float[Array, "*batch n"], tuple[Array, Array]]:
    return _bfloat16(x, w), (x, w)


def _bfloat16_backward(
    saved: tuple[Array, Array], grad: Float[Array, "*batch n"]
) -> tuple[Float[Array, "*batch k"], Float[Array, "k n"]]:
    # Written out because the automatic rule multiplies a float32 gradient by a bfloat16 operand,
    # which a GPU runs as a slow float32 product.
    x, w = (operand.astype(jnp.bfloat16) for operand in saved)
    g = grad.astype(jnp.bfloat16)
    dims = tuple(range(x.ndim - 1))
    grad_x = lax.dot_general(
        g,
        w,
        (((g.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=_left_in(saved[0].dtype),
    )
    grad_w = lax.dot_general(
        x, g, ((dims, dims), ((), ())), preferred_element_type=_left_in(saved[1].dtype)
    )
    return grad_x.astype(saved[0].dtype), grad_w.astype(saved[1].dtype)


_bfloat16.defvjp(_bfloat16_forward, _bfloat16_backward)


def _left_in(wanted: jnp.dtype) -> jnp.dtype:
    """The dtype that a product of bfloat16 leaves its float32 sums in, for a caller's own.

    Where one device has all of a sum it rounds it as it writes it: left in float32, a GPU writes
    and reads twice the bytes to round it in the next kernel. Where devices have parts of it, those
    are added up in float32.
    """
    return _sum_dtype(wanted) if is_local() else jnp.dtype(jnp.float32)


class _Dtypes(NamedTuple):
    x: jnp.dtype
    w: jnp.dtype


def _fp8(x: Float[Array, "*batch k"], w: Float[Array, "k n"]) -> Float[Array, "*batch n"]:
    return _fp8_product(x, w, _Dtypes(x=x.dtype, w=w.dtype))


@partial(jax.custom_vjp, nondiff_argnames=("dtypes",))
def _fp8_product(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], dtypes: _Dtypes
) -> Float[Array, "*batch n"]:
    return _fp8_of(quantize(_in_rows(x), format=ACTIVATION), quantize_squares(w), x, dtypes)


def _fp8_forward(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], dtypes: _Dtypes
) -> tuple[Float[Array, "*batch n"], tuple[Quantized, Quantized]]:
    return _forward_of(x, quantize_squares(w), dtypes)


def _forward_of(
    x: Float[Array, "*batch k"], w_q: Quantized, dtypes: _Dtypes
) -> tuple[Float[Array, "*batch n"], tuple[Quantized, Quantized]]:
    # What backward keeps is the transpose, in tiles along the tokens that its weight gradient sums
    # over: as many bytes as the operand of this product, of which it would be made a second time.
    x_q, x_t = quantize_both(_in_rows(x), format=ACTIVATION)
    return _fp8_of(x_q, w_q, x, dtypes), (x_t, replace(w_q, turned=None))


def _fp8_of(
    x_q: Quantized, w_q: Quantized, x: Float[Array, "*batch k"], dtypes: _Dtypes
) -> Float[Array, "*batch n"]:
    product = fp8_matmul(x_q, w_q.mT, out_dtype=_sum_dtype(dtypes.x))
    return product.reshape(*x.shape[:-1], w_q.columns).astype(dtypes.x)


def _fp8_backward(
    dtypes: _Dtypes, saved: tuple[Quantized, Quantized], grad: Float[Array, "*batch n"]
) -> tuple[Float[Array, "*batch k"], Float[Array, "k n"]]:
    x_t, w_q = saved
    # Both from the gradient itself, neither from an 8-bit copy, and never in squares: square
    # blocks on gradients made training diverge (DeepSeek-V3, appendix B.2).
    grad_q, grad_t = quantize_both(_in_rows(grad), format=ACTIVATION)
    grad_x = fp8_matmul(grad_q, w_q, out_dtype=_sum_dtype(dtypes.x))
    grad_w = fp8_matmul(x_t, grad_t, out_dtype=_left_in(dtypes.w))
    grad_x = grad_x.reshape(*grad.shape[:-1], w_q.rows)
    return grad_x.astype(dtypes.x), grad_w.astype(dtypes.w)


_fp8_product.defvjp(_fp8_forward, _fp8_backward)


@partial(jax.custom_vjp, nondiff_argnames=("dtypes",))
def _fp8_product_of(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], w_q: Quantized, dtypes: _Dtypes
) -> Float[Array, "*batch n"]:
    return _fp8_of(quantize(_in_rows(x), format=ACTIVATION), w_q, x, dtypes)


def _fp8_of_forward(
    x: Float[Array, "*batch k"], w: Float[Array, "k n"], w_q: Quantized, dtypes: _Dtypes
) -> tuple[Float[Array, "*batch n"], tuple[Quantized, Quantized]]:
    return _forward_of(x, w_q, dtypes)


def _fp8_of_backward(
    dtypes: _Dtypes, saved: tuple[Quantized, Quantized], grad: Float[Array, "*batch n"]
) -> tuple[Float[Array, "*batch k"], Float[Array, "k n"], None]:
    return *_fp8_backward(dtypes, saved, grad), None


_fp8_product_of.defvjp(_fp8_of_forward, _fp8_of_backward)


@partial(jax.custom_vjp, nondiff_argnames=("dtypes",))
def _linears(
    x: Float[Array, "tokens k"],
    w: tuple[Array, ...],
    w_q: tuple[Quantized, ...],
    dtypes: _Dtypes,
) -> tuple[Array, ...]:
    x_q = quantize(x, format=ACTIVATION)
    return tuple(_fp8_of(x_q, each, x, dtypes) for each in w_q)


def _linears_forward(
    x: Float[Array, "tokens k"],
    w: tuple[Array, ...],
    w_q: tuple[Quantized, ...],
    dtypes: _Dtypes,
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    x_q, x_t = quantize_both(x, format=ACTIVATION)
    kept = tuple(replace(each, turned=None) for each in w_q)
    return tuple(_fp8_of(x_q, each, x, dtypes) for each in w_q), (x_t, kept)


def _linears_backward(
    dtypes: _Dtypes, saved: tuple[Any, ...], grads: tuple[Array, ...]
) -> tuple[Float[Array, "tokens k"], tuple[Array, ...], None]:
    x_t, w_q = saved
    rounded = [quantize_both(grad, format=ACTIVATION) for grad in grads]
    pairs = [(grad_q, each) for (grad_q, _), each in zip(rounded, w_q, strict=True)]
    of_x = fp8_matmul_sum(pairs, out_dtype=_sum_dtype(dtypes.x)).astype(dtypes.x)
    of_weights = (fp8_matmul(x_t, g_t, out_dtype=_left_in(dtypes.w)) for _, g_t in rounded)
    return of_x, tuple(one.astype(dtypes.w) for one in of_weights), None


_linears.defvjp(_linears_forward, _linears_backward)


@partial(jax.custom_vjp, nondiff_argnames=("dtypes",))
def _swiglu(
    x: Float[Array, "tokens k"], w: Swiglu, w_q: Swiglu, dtypes: _Dtypes
) -> Float[Array, "tokens k"]:
    return _swiglu_forward(x, w, w_q, dtypes)[0]


def _swiglu_forward(
    x: Float[Array, "tokens k"], w: Swiglu, w_q: Swiglu, dtypes: _Dtypes
) -> tuple[Float[Array, "tokens k"], tuple[Any, ...]]:
    x_q, x_t = quantize_both(x, format=ACTIVATION)
    gate, up = (_fp8_of(x_q, kernel, x, dtypes) for kernel in (w_q.gate, w_q.up))
    hidden_q, hidden_t = swiglu_both(gate, up)
    return _fp8_of(hidden_q, w_q.down, x, dtypes), (x_t, gate, up, hidden_t, w_q)


def _swiglu_backward(
    dtypes: _Dtypes, saved: tuple[Any, ...], grad: Float[Array, "tokens k"]
) -> tuple[Float[Array, "tokens k"], Swiglu, None]:
    x_t, gate, up, hidden_t, w_q = saved
    product = partial(fp8_matmul, out_dtype=_sum_dtype(dtypes.x))
    of_weight = partial(fp8_matmul, out_dtype=_left_in(dtypes.w))
    grad_q, grad_t = quantize_both(grad, format=ACTIVATION)
    of_hidden = product(grad_q, w_q.down).astype(dtypes.x)
    (gate_q, gate_t), (up_q, up_t) = swiglu_gradients_both(gate, up, of_hidden)
    pairs = [(gate_q, w_q.gate), (up_q, w_q.up)]
    of_x = fp8_matmul_sum(pairs, out_dtype=_sum_dtype(dtypes.x)).astype(dtypes.x)
    of_weights = Swiglu(
        gate=of_weight(x_t, gate_t), up=of_weight(x_t, up_t), down=of_weight(hidden_t, grad_t)
    )
    return of_x, Swiglu(*(one.astype(dtypes.w) for one in of_weights)), None


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _in_rows(x: Float[Array, "*batch n"]) -> Float[Array, "*rows n"]:
    """A single vector as a matrix of one row; else `x`."""
    return x[None] if x.ndim == 1 else x


def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The result dtype of a product whose caller wants `dtype`: never rounded twice."""
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


PRECISIONS: dict[str, Callable[[Array, Array], Array]] = {
    "float32": _float32,
    "bfloat16": _bfloat16,
    "fp8": _fp8,
    "fp8_weights": _fp8_weights,
}
