"""A matmul with named dims on both sides, in the format its path asks for."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfound.config.precision import Format
from jaxfound.models.execution import Execution
from jaxfound.models.layers.parameter import Dims, names, weight
from pallas_kernels.linear import linear


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
        self.rules = execution.rules
        self.format: Format = execution.format_of(path)
        self.dtype = execution.dtype
        # A float32 product in a bfloat16 model gets its weights unrounded.
        self.weight_dtype = jnp.dtype("float32") if self.format == "float32" else execution.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [..., *inputs] times the kernel, [..., *outputs]."""
        return apply_kernel(self, x, self.kernel[...])


def apply_kernel(layer: Linear, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply by `kernel` in the layer's format, flattening the named dims into M K N."""
    n = layer.num_inputs
    # Cast before the gather: half the bytes cross the wire.
    w = layer.rules.gather(kernel.astype(layer.weight_dtype), *layer.dims)
    rows, outs = x.shape[: x.ndim - n], w.shape[n:]
    k = math.prod(w.shape[:n])
    y = linear(x.reshape(*rows, k), w.reshape(k, -1), precision=layer.format)
    return y.reshape(*rows, *outs).astype(layer.dtype)
