"""Kernels that bring their own product: in a format that is chosen as it runs, or watched."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxfound.models.layers.linear import Linear, apply_kernel
from jaxfound.training.operand_numbers import Sums, sums_of
from pallas_kernels.formats import ACTIVATION


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """A kernel whose format is an argument of the program, so that one program tries every choice.

    Of experts all three have the same choice, and the layer itself tells their formats apart.

    Attributes:
        kernel: as it is stored; of a stack of layers with a leading dim.
        fp8: whether the product is in fp8; else it is in the format that the model's rules say.
    """

    kernel: jax.Array
    fp8: Bool[Array, "*L"]

    def multiply(self, layer: Linear, x: jax.Array) -> jax.Array:
        """Return the product in the chosen format; the other one is not computed."""

        def in_fp8(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return apply_kernel(layer, x, kernel, format="fp8")

        def as_ruled(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return apply_kernel(layer, x, kernel, format=layer.format)

        return jax.lax.cond(self.fp8, in_fp8, as_ruled, x, self.kernel)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watched:
    """A kernel whose product is counted: the sums are the gradients of two arguments that are zero.

    So they leave layers, loops and recomputation by the way that gradients take anyway.

    Attributes:
        kernel: as it is stored; of a stack of layers with a leading dim.
        of_input: zeros in, sums of the input out.
        of_gradient: zeros in, sums of the output's gradient out.
    """

    kernel: jax.Array
    of_input: Sums
    of_gradient: Sums

    def multiply(self, layer: Linear, x: jax.Array) -> jax.Array:
        """Return the product as the model's rules say."""
        x = count_input(x, self.of_input)
        y = apply_kernel(layer, x, self.kernel, format=layer.format)
        return count_gradient(y, self.of_gradient)


def in_rows(x: jax.Array, num_channels: int) -> jax.Array:
    """Return an activation as a matrix with its channels last."""
    return x.reshape(math.prod(x.shape) // num_channels, num_channels)


@jax.custom_vjp
def count_input(x: jax.Array, sums: Sums) -> jax.Array:
    """Return `x`; the gradient of `sums` are the sums of `x`, however often it is used."""
    return x


def _count_input(x: jax.Array, sums: Sums) -> tuple[jax.Array, Sums]:
    return x, sums_of(in_rows(x, sums.channels.shape[-1]), ACTIVATION)


count_input.defvjp(_count_input, lambda found, grad: (grad, found))


@jax.custom_vjp
def count_gradient(y: jax.Array, sums: Sums) -> jax.Array:
    """Return `y`; the gradient of `sums` are the sums of the gradient of `y`."""
    return y


def _count_gradient(num_channels: jax.Array, grad: jax.Array) -> tuple[jax.Array, Sums]:
    return grad, sums_of(in_rows(grad, num_channels.shape[-1]), ACTIVATION)


count_gradient.defvjp(lambda y, sums: (y, jnp.zeros(sums.channels.shape[-1])), _count_gradient)


def replaced(
    params: dict[str, jax.Array], paths: list[str], make: Callable[[str, jax.Array], object]
) -> dict[str, object]:
    """Return parameters with the kernels of some operations replaced by what `make` makes."""
    of_operation = {name: name.rpartition(".")[0] for name in params}
    return {
        name: make(of_operation[name], array) if of_operation[name] in paths else array
        for name, array in params.items()
    }
