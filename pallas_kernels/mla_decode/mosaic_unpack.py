"""The packed cache on Hopper: its bytes into shared memory, and from there to bfloat16 values.

Three views of the same bytes are copied: e4m3 latents, float32 scales and bfloat16 rope channels.
None of the copies cuts whole wgmma patterns out of a row of 656 bytes, so all of them land in
plain rows, and a warpgroup carries the values over.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array

from pallas_kernels import mosaic, mosaic_registers
from pallas_kernels.formats import BLOCK
from pallas_kernels.mla_decode.cases import LATENT, ROPE
from pallas_kernels.mla_decode.fp8_cache import SCALE_BYTES

F8 = jnp.float8_e4m3fn
# A page is copied, unpacked, scored and released in the chunks that have one scale a token.
CHUNK = BLOCK
NUM_CHUNKS = LATENT // CHUNK
# Barriers of what is copied: one a chunk, then rope and scales. Barriers of one array share one
# register of phases.
COPIED_ROPE, COPIED_SCALES = NUM_CHUNKS, NUM_CHUNKS + 1
NUM_COPIED = COPIED_SCALES + 1
# Tokens that are unpacked at once: all of a chunk would not fit the warpgroup's registers.
PIECE = 32
# How the threads share a piece: four neighbours take one token, so a thread needs one scale, and 8
# channels at a time, 8 bytes in and 16 out. The order of tokens keeps both free of bank conflicts.
LATENTS = mosaic.tiled_layout(
    ((PIECE, 32), (8, 32), (4, 32), (2, 32), (8,)),
    warp_dims=(-9,),
    lane_dims=(-3, -5, -7, -2),
    vector_dim=-1,
)
# The same for rope channels, which are only moved, 16 bytes at a time.
ROPES = mosaic.tiled_layout(
    ((16, ROPE), (4, ROPE), (8,)),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# The scale that stands for a token behind the last one; no writer stores a negative zero.
DEAD_SCALE = -0.0
# A scale as the sum of two bfloat16 numbers, each twice in its register.
SPLIT_SCALE = """{
.reg .b32 bits; .reg .f32 rest;
mov.b32 bits, $2;
prmt.b32 $0, bits, 0, 0x3232;
and.b32 bits, bits, 0xffff0000;
mov.b32 rest, bits;
sub.rn.f32 rest, $2, rest;
mov.b32 bits, rest;
prmt.b32 $1, bits, 0, 0x3232;
}"""
# Four e4m3 values times a scale, and the largest magnitude so far. Sign, exponent and mantissa
# moved to their places in a bfloat16 number are the value times 2^-120, subnormals included. The
# smaller product is added to the larger one before that is rounded.
PRODUCTS_OF_FOUR = (
    """{
.reg .b32 bits, value, rest, large, exponent;
mov.b32 large, $6;
mov.b32 exponent, 0x7b807b80;
"""
    + "".join(
        f"""prmt.b32 bits, $3, 0, {signed_bytes};
shl.b32 bits, bits, 4;
and.b32 bits, bits, 0x87f087f0;
mul.rn.bf16x2 value, bits, exponent;
mul.rn.bf16x2 rest, value, $5;
fma.rn.bf16x2 ${result}, value, $4, rest;
abs.bf16x2 value, value;
max.bf16x2 large, large, value;
"""
        for result, signed_bytes in ((0, "0x9180"), (1, "0xb3a2"))
    )
    + """mov.b32 $2, large;
}"""
)
# Two products, or NaN if a value of the same live token was NaN: the token's scores are then. NaN
# has become 480, which the factor takes over the largest bfloat16 number, but not 448, the largest
# e4m3 number.
SPOIL = """{
.reg .b32 large, factor, zero; .reg .pred dead;
mov.b32 factor, $3;
setp.eq.b32 dead, factor, 0x80000000;
selp.b32 factor, 0, 0x7b107b10, dead;
mul.rn.bf16x2 large, $2, factor;
mov.b32 zero, 0;
fma.rn.bf16x2 $0, large, zero, $1;
}"""


def views(cache: Array) -> tuple[Array, Array, Array]:
    """The bytes as latents, as scales and as rope channels; XLA moves none of them."""

    def view(dtype: jax.typing.DTypeLike) -> Array:
        size = jnp.dtype(dtype).itemsize
        parts = cache if size == 1 else cache.reshape(*cache.shape[:2], -1, size)
        return lax.bitcast_convert_type(parts, dtype)

    return view(F8), view(jnp.float32), view(jnp.bfloat16)


def fetch_latents(refs: Any, place: Any, chunk: int) -> None:
    """Start the copy of one chunk of a page's bytes."""
    source = refs.latents.at[place, :, pl.ds(chunk * CHUNK, CHUNK)]
    mosaic.copy_in(source, refs.packed_latents.at[chunk], refs.copied.at[chunk])


def fetch_scales(refs: Any, place: Any) -> None:
    """Start the copy of a page's scales."""
    source = refs.scales.at[place, :, pl.ds(LATENT // 4, NUM_CHUNKS)]
    mosaic.copy_in(source, refs.packed_scales.at[0], refs.copied.at[COPIED_SCALES])


def fetch_rope(refs: Any, place: Any) -> None:
    """Start the copy of a page's rope channels."""
    source = refs.ropes.at[place, :, pl.ds((LATENT + SCALE_BYTES) // 2, ROPE)]
    mosaic.copy_in(source, refs.packed_ropes, refs.copied.at[COPIED_ROPE])


def load_scales(refs: Any, num_alive: Any, piece: Any) -> jax.Array:
    """The scales of a piece's tokens, chunk by chunk, as the threads need them.

    Behind the last token of the page, bytes and scales may be NaN, and zero weight times NaN
    would be NaN.
    """
    scales = mosaic.load(refs.packed_scales.at[0, piece].T, layout=LATENTS.reduce(1))
    token = mosaic.broadcasted_iota(jnp.int32, scales.shape, 1, layout=LATENTS.reduce(1))
    return jnp.where(token + piece.start < num_alive, scales, DEAD_SCALE)


def dequantise(source: Any, scales: Any) -> Any:
    """Bytes of some tokens times their scales in bfloat16; zeros where a scale is `DEAD_SCALE`.

    The instructions that convert 8-bit floats, and float32 to bfloat16, are several times slower
    than others. So the bits of a value are put where bfloat16 has them, and products in bfloat16
    do the rest: a scale that is a power of two rounds once, another one 0.2 % of the values
    the other way.
    """
    values = mosaic.load(source, layout=LATENTS)
    if mosaic.is_interpreting():
        scales = lax.broadcast_in_dim(scales, source.shape, [0])
        products = values.astype(jnp.float32) * scales
        return jnp.where(scales == DEAD_SCALE, 0.0, products).astype(jnp.bfloat16)
    return mosaic_registers.on_registers(
        _products,
        values,
        scales,
        layouts=(LATENTS, LATENTS.reduce(1)),
        out=jax.ShapeDtypeStruct(source.shape, jnp.bfloat16),
        out_layout=LATENTS,
    )


def _products(values: Any, scales: Any) -> Any:
    """What one thread does: registers of 8 values each, all of one token, times its scale."""
    [scale] = [vector.extract(register, [], [0]) for register in scales.registers.flat]
    high, low = mosaic_registers.assemble(SPLIT_SCALE, [scale], "=&r,=&r,f", 2)
    two_words, eight_bytes = mosaic_registers.integers(2, 32), mosaic_registers.integers(8, 8)
    pairs: list[list[ir.Value]] = []
    largest = arith.constant(mosaic_registers.word_type(), 0)
    for register in values.registers.flat:
        quads = vector.bitcast(two_words, vector.bitcast(eight_bytes, register))
        found: list[ir.Value] = []
        for quad in range(2):
            operands = [vector.extract(quads, [], [quad]), high, low, largest]
            *some, largest = mosaic_registers.assemble(
                PRODUCTS_OF_FOUR, operands, "=&r,=&r,=&r,r,r,r,r", 3
            )
            found += some
        pairs.append(found)
    spoiled = mosaic_registers.assemble(SPOIL, [pairs[-1][-1], largest, scale], "=r,r,r,f", 1)
    pairs[-1][-1] = spoiled[0]
    four_words = mosaic_registers.integers(4, 32)
    products = [
        vector.bitcast(
            ir.VectorType.get((8,), ir.BF16Type.get()), vector.from_elements(four_words, found)
        )
        for found in pairs
    ]
    return mosaic_registers.with_registers(values, products)
