"""Weights in 8-bit for a whole step: quantised before its micro-batches and layers, once each.

In a product of its own each micro-batch would quantise them again, and remat once more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax

from jaxfound.models.build import Frame, Leaf
from jaxfound.models.layers.linear import Linear, apply_kernel, in_rows, weight_dtype
from jaxfound.models.served import EXPERTS, matches
from pallas_kernels.formats import Quantized
from pallas_kernels.linear import linear_of_quantized
from pallas_kernels.quantize import quantize_squares


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedOnce:
    """A kernel that was quantised before; where its layer is not in fp8 it is as without.

    Attributes:
        kernel: as it is stored, which gets the gradient; of a stack of layers with a leading dim.
        quantized: the same as [K, N] in squares.
    """

    kernel: jax.Array
    quantized: Quantized

    def multiply(self, layer: Linear, x: jax.Array) -> jax.Array:
        """Return x times the kernel."""
        if layer.format != "fp8":
            return apply_kernel(layer, x, self.kernel, format=layer.format)
        product = partial(linear_of_quantized, w_q=self.quantized)
        return in_rows(layer, x, self.kernel, product, format="fp8")


def quantized_once(frame: Frame, params: Mapping[str, jax.Array]) -> dict[str, Quantized]:
    """Return the kernels that have an fp8 rule, quantised, by path.

    There are none where fsdp cuts parameters: each is gathered whole for its product and dropped,
    and all of them in 8-bit would stay. Nor are there of experts where tensor cuts their squares.
    """
    rules = frame.execution.rules
    if rules.cuts_parameters:
        return {}
    found, format_of = {}, frame.execution.precision.format_of
    for path in params if rules.degree("tensor") == 1 else ():
        operation = path.rpartition(".")[0]
        if matches(path, EXPERTS) and any(
            format_of(operation, n) == "fp8" for n in frame.layers_of(path)
        ):
            found[path] = quantize_squares(params[path], dtype=frame.execution.dtype)
    for path, linear in frame.linears.items():
        if all(format_of(linear.path, n) != "fp8" for n in frame.layers_of(path)):
            continue
        kernel = params[path]
        dims = kernel.shape[kernel.ndim - len(linear.dims) :]
        k = math.prod(dims[: linear.num_inputs])
        matrix = kernel.reshape(*kernel.shape[: kernel.ndim - len(dims)], k, -1)
        found[path] = quantize_squares(matrix, dtype=weight_dtype("fp8", linear.dtype))
    return found


def with_quantized(
    params: Mapping[str, jax.Array], quantized: Mapping[str, Quantized]
) -> dict[str, Leaf]:
    """Return parameters for `Frame.bind` whose kernels use what was quantised before."""
    return {
        path: QuantizedOnce(array, quantized[path]) if path in quantized else array
        for path, array in params.items()
    }
