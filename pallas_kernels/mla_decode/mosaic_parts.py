"""What the Hopper kernels of latent decode share outside the kernel: padding, parts, the merge."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import mosaic
from pallas_kernels.mla_decode import mosaic_combine
from pallas_kernels.mla_decode.cases import LATENT, PAGE, MlaCase

ROWS = mosaic.WARPGROUP_ROWS
# Far below every log sum: what a part that saw nothing has; finite, because the difference of two
# infinities is NaN.
FAR_BELOW = -1e30
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Sizes:
    """Static sizes of one launch."""

    batch: int
    num_rows: int
    num_heads: int
    num_queries: int
    pages_per_split: int
    num_splits: int
    sm_scale: float


def attend(
    q: Array,
    cache: Array,
    block_table: Array,
    lengths: Array,
    *,
    case: MlaCase,
    sm_scale: float,
    split_len: int | None,
    launch: Callable[[Sizes, Array, Array, Array, Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """Return result and log sums on one device.

    Args:
        launch: runs the kernel on sizes, padded queries [B, rows, C + R], cache, table and lengths;
            returns results [splits, B, rows, C] and base-2 log sums [splits, B, rows] of the parts.
    """
    batch, num_queries, num_heads, width = q.shape
    rows = num_queries * num_heads
    padded = -(-rows // ROWS) * ROWS
    flat = q.reshape(batch, rows, width).astype(jnp.bfloat16)
    if padded != rows:
        flat = jnp.pad(flat, ((0, 0), (0, padded - rows), (0, 0)))
    if sm_scale <= 0:
        # Kernels want scores to grow with the products, and what is unseen to be far below.
        flat, sm_scale = flat * jnp.bfloat16(np.sign(sm_scale)), abs(sm_scale) or 1.0
    max_pages = block_table.shape[1]
    pages = _pages_per_split(batch * padded // ROWS, max_pages, split_len, case.hardware.num_cores)
    sizes = Sizes(
        batch=batch,
        num_rows=padded,
        num_heads=num_heads,
        num_queries=num_queries,
        pages_per_split=pages,
        num_splits=max(1, -(-max_pages // pages)),
        sm_scale=sm_scale,
    )
    parts, lse = launch(sizes, flat, cache, block_table, lengths)
    if sizes.num_splits > 1:
        out, lse = mosaic_combine.combine(parts, lse, lengths, split_len=pages * PAGE)
    else:
        lse = jnp.where(lse[0] > FAR_BELOW / 2, lse[0] / LOG2_E, jnp.inf)
        out = parts[0]
    shape = (batch, num_queries, num_heads)
    return out[:, :rows].reshape(*shape, LATENT).astype(q.dtype), lse[:, :rows].reshape(shape)


def _pages_per_split(num_blocks: int, max_pages: int, split_len: int | None, num_cores: int) -> int:
    """Pages of one part: from `split_len`, else so that the blocks fill the cores once."""
    if split_len is not None:
        return max(1, split_len // PAGE)
    splits = max(1, min(num_cores // max(num_blocks, 1), max_pages // 4))
    return max(1, -(-max_pages // splits))
