"""Weights as serving keeps them: in the format of their products, and each layer's apart.

A step of decoding is as long as its reading of weights. So what training does in every step is done
once: kernels are rounded, those with a rule for 8 bits are quantised. And layers are no stack any
more: a loop over a stack would copy each layer's weights out of it before it multiplies.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.config.params import LAYER_DIMS
from jaxfound.models.build import Arrays, Frame, Leaf
from jaxfound.models.layers.linear import Linear, weight_dtype
from pallas_kernels.formats import WEIGHT, Quantized
from pallas_kernels.quantize import quantize

# Formats whose weights are kept in 8 bits.
IN_8_BIT = ("fp8", "fp8_weights")
# Decoding moves these into its queries and values, as they are.
ABSORBED = ("*.mixer.key_up.kernel", "*.mixer.value_up.kernel")
# Of every expert a matrix [K, N]: no `Linear` holds them, and rules say whether they are in 8 bits.
EXPERTS = ("*.experts.gate", "*.experts.up", "*.experts.down")
# Matrices that no `Linear` holds and that are multiplied, or picked from, in the compute format.
COMPUTE = ("embedding.table", "head.kernel")


class LayerForm(NamedTuple):
    """What serving keeps of one layer's array, or of one that no stack has.

    Attributes:
        dtype: of what is kept, or of what is quantised.
        num_inputs: contracted dims of a kernel that is kept in 8-bit, transposed to [N, K]; 0 for
            whatever is not quantised.
        num_stacked: dims before these, each entry of which is a matrix of its own.
    """

    dtype: jnp.dtype
    num_inputs: int = 0
    num_stacked: int = 0

    def __call__(self, array: jax.Array) -> jax.Array | Quantized:
        """Return what is kept."""
        rounded = array.astype(self.dtype)
        if not self.num_inputs:
            return rounded
        stack, dims = array.shape[: self.num_stacked], array.shape[self.num_stacked :]
        inputs = math.prod(dims[: self.num_inputs])
        # Of the format in which training would quantise it, in every step.
        return quantize(rounded.reshape(*stack, inputs, -1), format=WEIGHT).mT


class Form(NamedTuple):
    """What serving keeps of an array.

    Attributes:
        stacked: whether it is of a stack of layers, which are kept apart.
        layers: what is kept of each layer; one entry where there is no stack.
    """

    stacked: bool
    layers: tuple[LayerForm, ...]

    def __call__(self, array: jax.Array) -> Leaf:
        """Return what is kept."""
        if not self.stacked:
            return self.layers[0](array)
        each = zip(self.layers, jnp.unstack(array), strict=True)
        return tuple(form(layer) for form, layer in each)

    def keeps(self, array: jax.Array) -> bool:
        """Whether an array stays just what it is."""
        return not self.stacked and self.layers[0] == LayerForm(array.dtype)


def serving_arrays(
    frame: Frame, arrays: Arrays, *, mesh: Mesh | None = None, release: bool = False
) -> Arrays:
    """Return weights for `Decoder.extend_pages`; an array of a stack becomes a tuple of layers'.

    Args:
        frame: the model they are of.
        arrays: as training stores them.
        mesh: where they lie; on several devices fp8 kernels are quantised in every step.
        release: delete each given array as soon as it has been read.
    """
    flat = {**arrays.params, **arrays.buffers}
    dims = {path: names for group in frame.dims() for path, names in group.items()}
    forms = forms_of(frame, flat, dims, in_8_bit=mesh is None or mesh.size == 1)
    places = None
    if mesh is not None:
        places = {path: _place(frame, mesh, dims[path], a.shape) for path, a in flat.items()}
    changing = [path for path, array in flat.items() if not forms[path].keeps(array)]
    # One program is compiled fastest; one after the other takes the least memory.
    groups = [[path] for path in changing] if release else [changing]
    kept = dict(flat)
    for group in groups:
        given = {path: flat[path] for path in group}
        out = None if places is None else {path: places[path] for path in group}
        kept |= jax.jit(
            lambda each: {path: forms[path](array) for path, array in each.items()},
            out_shardings=out,
        )(given)
        if release:
            jax.block_until_ready([kept[path] for path in group])
            for array in given.values():
                array.delete()
    return Arrays(*({path: kept[path] for path in group} for group in arrays))


def serving_shapes(frame: Frame, *, is_alone: bool = True) -> Arrays:
    """Return the shapes and formats of what `serving_arrays` returns; nothing is allocated.

    Args:
        frame: the model.
        is_alone: whether one device has all of it.
    """
    given, dims = frame.shapes(), {p: d for group in frame.dims() for p, d in group.items()}
    flat = {path: shape for group in given for path, shape in group.items()}
    forms = forms_of(frame, flat, dims, in_8_bit=is_alone)
    kept = jax.eval_shape(lambda each: {p: forms[p](array) for p, array in each.items()}, flat)
    return Arrays(*({path: kept[path] for path in group} for group in given))


def forms_of(
    frame: Frame,
    arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    dims: Mapping[str, tuple[str | None, ...]],
    *,
    in_8_bit: bool,
) -> dict[str, Form]:
    """Return what serving keeps of each array.

    Args:
        frame: the model they are of.
        arrays: by path.
        dims: names of theirs.
        in_8_bit: whether kernels with an fp8 rule are kept quantised.
    """

    def form(path: str, array: jax.Array | jax.ShapeDtypeStruct) -> Form:
        stacked, linear = dims[path][0] in LAYER_DIMS, frame.linears.get(path)
        numbers = frame.layers_of(path)
        if matches(path, EXPERTS):
            return Form(stacked, tuple(of_experts(path, number) for number in numbers))
        if linear is None:
            dtype = frame.execution.dtype if matches(path, COMPUTE) else array.dtype
            return Form(stacked, (LayerForm(jnp.dtype(dtype)),) * len(numbers))
        return Form(stacked, tuple(of_layer(linear, path, number) for number in numbers))

    def of_experts(path: str, number: int | None) -> LayerForm:
        format = frame.execution.precision.format_of(path.rpartition(".")[0], number)
        dtype = weight_dtype(format, frame.execution.dtype)
        if not in_8_bit or format not in IN_8_BIT:
            return LayerForm(dtype)
        return LayerForm(dtype, num_inputs=1, num_stacked=1)

    def of_layer(linear: Linear, path: str, number: int | None) -> LayerForm:
        format = frame.execution.precision.format_of(linear.path, number)
        quantised = format in IN_8_BIT and in_8_bit and not matches(path, ABSORBED)
        dtype = weight_dtype(format, linear.dtype)
        return LayerForm(dtype, linear.num_inputs if quantised else 0)

    return {path: form(path, array) for path, array in arrays.items()}


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns is of `path`."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _place(
    frame: Frame, mesh: Mesh, names: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return where an array, or each layer of a stack, lies."""
    spec = frame.execution.rules.param_spec(names, shape)
    return NamedSharding(mesh, PartitionSpec(*spec[1:]) if names[0] in LAYER_DIMS else spec)
