"""A matmul with named dims on both sides, in the format its path asks for."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfound.config.precision import Format
from jaxfound.models.execution import Execution
from jaxfound.models.layers.parameter import Dims, names, sizes, weight
from pallas_kernels.formats import Quantized
from pallas_kernels.fp8_matmul import adds_products
from pallas_kernels.linear import (
    linear,
    linears_of_quantized,
    quantized_linear,
    widened_linear,
)


@runtime_checkable
class OwnProduct(Protocol):
    """A kernel that brings its own product, as measurements of number formats do."""

    def multiply(self, layer: "Linear", x: jax.Array) -> jax.Array:
        """Return x [..., *inputs] times the kernel of `layer`, [..., *outputs]."""
        ...


@runtime_checkable
class QuantizedBeside(Protocol):
    """A kernel that has its 8-bit copy with it.

    Attributes:
        kernel: as it is stored, which gets the gradient.
        quantized: the same as [K, N] in squares.
    """

    kernel: jax.Array
    quantized: Quantized


@runtime_checkable
class ChosenFormat(Protocol):
    """A kernel of experts whose format is an argument of the program; see `OwnProduct`.

    Attributes:
        kernel: as it is stored.
        fp8: whether products are in fp8; else they are in the format that the rules say.
    """

    kernel: jax.Array
    fp8: jax.Array


class Linear(nnx.Module):
    """Contracts the last dims of its input with `kernel` [*inputs, *outputs]; no bias.

    Args:
        inputs: names and sizes of the contracted dims.
        outputs: names and sizes of the resulting dims.
        path: place in the model, matched by precision rules.
        std: deviation of the initial weights.
    """

    def __init__(
        self,
        inputs: Dims,
        outputs: Dims,
        *,
        rngs: nnx.Rngs,
        execution: Execution,
        path: str,
        std: float,
    ) -> None:
        self.kernel = weight(rngs, inputs + outputs, std=std)
        self.num_inputs = len(inputs)
        self.dims = names(inputs + outputs)
        self.out_sizes = sizes(outputs)
        self.rules = execution.rules
        self.path = path
        # Of a stack: what holds for all its layers; `segments_of` adds what holds for some.
        self.format: Format = execution.precision.format_of(path)
        self.dtype = execution.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [..., *inputs] times the kernel, [..., *outputs].

        Serving keeps kernels with a rule for 8 bits quantised, transposed to [N, K].
        """
        kernel = self.kernel.get_value()
        if isinstance(kernel, Quantized):
            rows = x.shape[: x.ndim - self.num_inputs]
            product = widened_linear if self.format == "fp8_weights" else quantized_linear
            y = product(x.reshape(*rows, kernel.columns), kernel)
            return y.reshape(*rows, *self.out_sizes).astype(self.dtype)
        if isinstance(kernel, OwnProduct):
            return kernel.multiply(self, x)
        return apply_kernel(self, x, kernel, format=self.format)


def products_of(layers: Sequence[Linear], x: jax.Array, *, execution: Execution) -> list[jax.Array]:
    """Return what each of the layers makes of the same x [..., *inputs].

    Where `kernels_of_one_call` and a kernel adds up products as it makes them, it is one call,
    whose gradient of x is one sum.
    """
    beside = kernels_of_one_call(layers, remat=execution.remat)
    if not beside:
        return [layer(x) for layer in layers]
    rows = x.shape[: x.ndim - layers[0].num_inputs]
    matrices = [kernel.quantized for kernel in beside]
    k = matrices[0].rows
    if not adds_products(math.prod(rows), k, [matrix.columns for matrix in matrices]):
        return [layer(x) for layer in layers]
    weights = tuple(
        kernel.kernel.astype(weight_dtype("fp8", layer.dtype)).reshape(k, -1)
        for layer, kernel in zip(layers, beside, strict=True)
    )
    outs = linears_of_quantized(x.reshape(*rows, k), weights, tuple(matrices))
    return [
        y.reshape(*rows, *layer.out_sizes).astype(layer.dtype)
        for layer, y in zip(layers, outs, strict=True)
    ]


def kernels_of_one_call(layers: Sequence[Linear], *, remat: str) -> list[QuantizedBeside]:
    """Return the kernels of layers whose products may be one call; none if they may not.

    All are in 8 bits already. Where something is computed again, each product stays one that a
    policy can name.
    """
    kernels = [layer.kernel.get_value() for layer in layers]
    beside = [kernel for kernel in kernels if isinstance(kernel, QuantizedBeside)]
    in_fp8 = all(layer.format == "fp8" for layer in layers)
    return beside if in_fp8 and remat == "none" and len(beside) == len(layers) else []


def weight_dtype(format: Format, dtype: jnp.dtype) -> jnp.dtype:
    """Return the format in which weights come to a product in `format` of a model in `dtype`."""
    # A float32 product in a bfloat16 model gets its weights unrounded.
    return jnp.dtype("float32") if format == "float32" else dtype


def apply_kernel(layer: Linear, x: jax.Array, kernel: jax.Array, *, format: Format) -> jax.Array:
    """Multiply by `kernel` in `format`, flattening the named dims into M K N."""
    return in_rows(layer, x, kernel, partial(linear, precision=format), format=format)


def in_rows(
    layer: Linear,
    x: jax.Array,
    kernel: jax.Array,
    product: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    format: Format,
) -> jax.Array:
    """Return the `product` of x as [rows, K] and the kernel as [K, N], with the named dims back."""
    n = layer.num_inputs
    # Cast before the gather: half the bytes cross the wire.
    cast = kernel.astype(weight_dtype(format, layer.dtype))
    w = layer.rules.gather(cast, *layer.dims)
    rows, outs = x.shape[: x.ndim - n], w.shape[n:]
    k = math.prod(w.shape[:n])
    y = product(x.reshape(*rows, k), w.reshape(k, -1))
    return y.reshape(*rows, *outs).astype(layer.dtype)
