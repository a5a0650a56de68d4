"""What quantising means: plain jnp, float32, one page."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import Format, Quantized

# The smallest normal float32. A smaller scale would be flushed to zero by the hardware.
SMALLEST_SCALE = 2.0**-126

# The parts of a float32.
NUM_FRACTION_BITS = 23
FRACTION_BITS = (1 << NUM_FRACTION_BITS) - 1
EXPONENT_BIAS = 127


def quantize(x: Float[Array, "*stack rows columns"], *, format: Format) -> Quantized:
    """Return `x` in `format`; every scale is finite and positive, every element finite or NaN.

    A block's scale maps its largest finite magnitude to the format's largest element. A block of
    zeros keeps scale 1, so it comes back as exact zeros. NaN and infinite inputs become NaN
    elements and do not touch their neighbours: the 8-bit cast would turn infinity into NaN but a
    clip into an ordinary number.
    """
    rows, columns = x.shape[-2:]
    x = _pad_to_blocks(x.astype(jnp.float32), format)
    *stack, block_rows, block_columns = format.num_blocks(x.shape)
    blocks = x.reshape(*stack, block_rows, format.block[0], block_columns, format.block[1])
    finite = jnp.isfinite(blocks)
    largest = jnp.where(finite, jnp.abs(blocks), 0.0).max(axis=(-3, -1), keepdims=True)
    scales = scale_of(largest, format)
    # By the reciprocal: a division in each element is what would take the time. Beside a format's
    # step its rounding is nothing.
    scaled = jnp.clip(blocks * (1.0 / scales), -format.largest, format.largest)
    elements = jnp.where(finite, scaled, jnp.nan).astype(format.dtype)
    return Quantized(
        values=elements.reshape(x.shape),
        scales=scales.reshape(*stack, block_rows, block_columns),
        rows=rows,
        columns=columns,
        format=format,
    )


def swiglu(
    gate: Float[Array, "tokens n"], up: Float[Array, "tokens n"]
) -> tuple[Float[Array, "tokens n"]]:
    """Return silu(gate) · up in float32 (Shazeer, 2020)."""
    g, u = (x.astype(jnp.float32) for x in (gate, up))
    return (g * jax.nn.sigmoid(g) * u,)


def swiglu_gradients(
    gate: Float[Array, "tokens n"], up: Float[Array, "tokens n"], grad: Float[Array, "tokens n"]
) -> tuple[Float[Array, "tokens n"], Float[Array, "tokens n"]]:
    """Return the gradients of gate and up in float32, for the gradient of silu(gate) · up."""
    g, u, d = (x.astype(jnp.float32) for x in (gate, up, grad))
    share = jax.nn.sigmoid(g)
    return d * u * share * (1.0 + g * (1.0 - share)), d * g * share


def scale_of(largest: Float[Array, "*blocks"], format: Format) -> Float[Array, "*blocks"]:
    """Return the scale of blocks whose largest finite magnitude is `largest`."""
    if format.scale == "power_of_two":
        scale = _power_of_two_scale(largest, format)
    else:
        scale = jnp.maximum(largest / format.largest, SMALLEST_SCALE)
    return jnp.where(largest > 0, scale, 1.0)


def _power_of_two_scale(
    largest: Float[Array, "*blocks"], format: Format
) -> Float[Array, "*blocks"]:
    """The smallest normal power of two times which the format's largest element covers `largest`.

    By the bits of both numbers: a quotient or a logarithm in float32 is off by one step exactly
    where `largest` is a power of two times the largest element.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    cover = int(np.float32(format.largest).view(np.int32))
    over = (bits & FRACTION_BITS) > (cover & FRACTION_BITS)
    exponent = (bits >> NUM_FRACTION_BITS) - (cover >> NUM_FRACTION_BITS) + over.astype(jnp.int32)
    biased = jnp.maximum(exponent + EXPONENT_BIAS, 1)
    return lax.bitcast_convert_type(biased << NUM_FRACTION_BITS, jnp.float32)


def _pad_to_blocks(
    x: Float[Array, "*stack rows columns"], format: Format
) -> Float[Array, "*stack padded_rows padded_columns"]:
    widths = [(0, want - have) for have, want in zip(x.shape, format.padded(x.shape), strict=True)]
    if not any(after for _, after in widths):
        return x
    return jnp.pad(x, widths)
