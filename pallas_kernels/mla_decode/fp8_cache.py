"""The 656-byte token of an 8-bit latent cache (DeepSeek-V3.2): latent, scales, rope.

Bytes 0-511 are 512 e4m3 latents, 512-527 four float32 scales, one for 128 latents, and 528-655 are
64 bfloat16 rope channels, which keep their precision because positions live in them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats import BLOCK, Format, Quantized
from pallas_kernels.mla_decode.cases import LATENT, ROPE
from pallas_kernels.quantize import quantize

NUM_SCALES = LATENT // BLOCK
SCALE_BYTES = 4 * NUM_SCALES
ROPE_BYTES = 2 * ROPE
TOKEN_BYTES = LATENT + SCALE_BYTES + ROPE_BYTES
# Powers of two: readers that keep scales as 8-bit exponents would misread any other, silently.
FORMAT = Format(block=(1, BLOCK), scale="power_of_two")


def pack(tokens: Float[Array, "*slots 576"]) -> UInt8[Array, "*slots 656"]:
    """Return the bytes of latents and rope channels of tokens."""
    slots = tokens.shape[:-1]
    rows = tokens.reshape(-1, tokens.shape[-1])
    latent = quantize(rows[:, :LATENT], format=FORMAT)
    parts = (
        lax.bitcast_convert_type(latent.values, jnp.uint8),
        lax.bitcast_convert_type(latent.scales, jnp.uint8).reshape(-1, SCALE_BYTES),
        lax.bitcast_convert_type(rows[:, LATENT:].astype(jnp.bfloat16), jnp.uint8).reshape(
            -1, ROPE_BYTES
        ),
    )
    return jnp.concatenate(parts, axis=-1).reshape(*slots, TOKEN_BYTES)


def unpack(packed: UInt8[Array, "*slots 656"]) -> Float[Array, "*slots 576"]:
    """Return what `pack` stored, in float32."""
    slots = packed.shape[:-1]
    rows = packed.reshape(-1, TOKEN_BYTES)
    values, scales, rope = jnp.split(rows, (LATENT, LATENT + SCALE_BYTES), axis=-1)
    latent = Quantized(
        values=lax.bitcast_convert_type(values, FORMAT.dtype),
        scales=lax.bitcast_convert_type(scales.reshape(-1, NUM_SCALES, 4), jnp.float32),
        rows=len(rows),
        columns=LATENT,
        format=FORMAT,
    )
    tail = lax.bitcast_convert_type(rope.reshape(-1, ROPE, 2), jnp.bfloat16)
    both = jnp.concatenate([latent.dequantize(), tail.astype(jnp.float32)], axis=-1)
    return both.reshape(*slots, LATENT + ROPE)
