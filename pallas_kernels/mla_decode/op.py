"""Attention of a decode step over a paged cache of latents (DeepSeek-V2's MLA, absorbed form).

Contract: q [B, T, N, C + R], cache [pages, page, C + R] or, in 8-bit, [pages, page, 656] bytes as
`fp8_cache` packs them, block_table [B, max_pages], lengths [B].
Any number of heads, any T ≥ 1 (bottom-right causal), lengths from 0 to what the table has room
for. Slots behind a length may hold NaN, table entries behind the last page anything. `sm_scale`
has no default: the width of the cache is not the width of the heads it stands for.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import hardware
from pallas_kernels.mla_decode import (
    fp8_cache,
    jax_triton,
    mosaic_gpu,
    mosaic_packed,
    reference,
    xla,
)
from pallas_kernels.mla_decode.cases import MlaCase, make_case
from pallas_kernels.mla_decode.reference import Decoded
from pallas_kernels.registry import Backend, KernelOp

# Tokens of one part of a sequence. A constant, so that a row's result does not depend on the
# batch it is in; a multiple of the page.
SPLIT_LEN = 2048


def mla_decode(
    q: Float[Array, "batch queries heads width"],
    cache: Shaped[Array, "pages page cache_width"],
    *,
    block_table: Int[Array, "table_batch max_pages"],
    lengths: Int[Array, " num_lengths"],
    latent: int,
    sm_scale: float,
    split_len: int | None = SPLIT_LEN,
    backend: str | None = None,
) -> Decoded:
    """Return the attention-weighted latents and the natural-log sum of exponentials.

    Args:
        latent: channels C of a token's value; the other R channels carry its position.
        split_len: tokens of one part of a sequence, a multiple of the page. Fixed, a row is the
            same bit for bit in every batch; None = chosen to fill the device.
    Raises:
        ValueError: if the operands do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    case = _checked_case(q, cache, block_table, lengths, latent)
    if split_len is not None and (split_len <= 0 or split_len % case.page):
        raise ValueError(
            f"split_len={split_len} must be a positive multiple of the page, {case.page}."
        )
    if not q.size or not block_table.size:
        shape = (*q.shape[:3], latent)
        return Decoded(
            out=jnp.zeros(shape, q.dtype), lse=jnp.full(q.shape[:3], jnp.inf, jnp.float32)
        )
    chosen = OP.choose(case, backend=backend)
    return chosen.run(
        q, cache, block_table, lengths, case=case, sm_scale=sm_scale, split_len=split_len
    )


def _checked_case(
    q: Array, cache: Array, block_table: Array, lengths: Array, latent: int
) -> MlaCase:
    batch, num_queries, num_heads, width = q.shape
    _, page, cache_width = cache.shape
    packed = cache.dtype == jnp.uint8
    expected = fp8_cache.TOKEN_BYTES if packed else width
    if cache_width != expected or not 0 < latent <= width:
        raise ValueError(
            f"q has {width} channels, the cache {cache_width}, of which latent={latent}: q and "
            f"cache must have latent + rope channels, a packed one {fp8_cache.TOKEN_BYTES} bytes."
        )
    if packed and (latent, width - latent) != (fp8_cache.LATENT, fp8_cache.ROPE):
        raise ValueError(
            f"latent={latent} and {width - latent} rope channels; a packed cache holds "
            f"{fp8_cache.LATENT} and {fp8_cache.ROPE}."
        )
    if block_table.shape[0] != batch or lengths.shape[0] != batch:
        raise ValueError(
            f"q has {batch} sequences, block_table {block_table.shape[0]} and lengths "
            f"{lengths.shape[0]}; they must be the same."
        )
    return MlaCase(
        batch=batch,
        num_queries=num_queries,
        num_heads=num_heads,
        latent=latent,
        rope=width - latent,
        page=page,
        max_tokens=page * block_table.shape[1],
        cache_dtype=cache.dtype.name,
        hardware=hardware.current(),
    )


OP: KernelOp[MlaCase] = KernelOp(
    name="mla_decode",
    reference=reference.mla_decode,
    backends=(
        Backend(name="mosaic_gpu", refuses=mosaic_gpu.refuses, run=mosaic_gpu.run),
        Backend(name="mosaic_gpu_packed", refuses=mosaic_packed.refuses, run=mosaic_packed.run),
        Backend(name="jax_triton", refuses=jax_triton.refuses, run=jax_triton.run),
        Backend(name="xla", refuses=xla.refuses, run=xla.run),
    ),
    make_case=make_case,
)
