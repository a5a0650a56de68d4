"""MLA decode in Triton, for NVIDIA cards that are no Hopper.

On Hopper it is the second opinion. A program takes a block of query rows (heads of one sequence,
and its query tokens) and one part of the sequence; it loads each tile of latents once, as keys and
as values. A second kernel merges the parts in order and reads only those that hold tokens.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import sharded, triton
from pallas_kernels.hardware import Hardware
from pallas_kernels.mla_decode.cases import SHARD_RULE, MlaCase
from pallas_kernels.mla_decode.reference import Decoded

# A program keeps its whole sum in registers; the matrix unit takes 16 channels at a time.
MAX_LATENT = 512
MIN_CHANNELS = 16
LOG2_E = math.log2(math.e)

# Words of the kernels' signatures: an array's address, and a number known when it is compiled.
Pointer = Any
constexpr = Any
# Triton's language; set by the adapter, because this file is read without Triton too.
tl: Any = None


@dataclass(frozen=True)
class Tile:
    """How one program works.

    Attributes:
        rows: query rows.
        tokens: tokens of one step; fewer where the page is no multiple.
        num_warps: warps that share the sum.
        num_stages: steps in flight.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def refuses(case: MlaCase) -> str | None:
    """Why the case is not for this kernel; None if it is."""
    hardware = case.hardware
    if hardware.platform == "cuda" and not hardware.supports("bfloat16"):
        return f"{hardware.kind} is {hardware.architecture}, which does not multiply bfloat16"
    if case.cache_dtype == "uint8":
        return "the cache is packed bytes; this kernel reads bfloat16. The XLA backend unpacks it."
    if case.cache_dtype != "bfloat16":
        return f"the cache is {case.cache_dtype}; this kernel reads bfloat16"
    for name, size in {"latent": case.latent, "rope": case.rope}.items():
        if size < MIN_CHANNELS or size > MAX_LATENT or size & (size - 1):
            return (
                f"{name}={size}; this kernel takes powers of two from {MIN_CHANNELS} to "
                f"{MAX_LATENT}. The XLA backend serves it."
            )
    if case.page % MIN_CHANNELS:
        return f"page={case.page} is not a multiple of {MIN_CHANNELS} tokens"
    return triton.refuses(hardware) or sharded.refuses_mesh()


def run(
    q: Float[Array, "batch queries heads width"],
    cache: Float[Array, "pages page width"],
    block_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    *,
    case: MlaCase,
    sm_scale: float,
    split_len: int | None,
) -> Decoded:
    """Return the op's result; sequences and heads may be sharded."""
    attend = partial(_attend, case=case, sm_scale=sm_scale, split_len=split_len)
    # Triton's call has no rule for vmap: mapped batches run one after another.
    call = jax.custom_batching.sequential_vmap(
        lambda *arrays: sharded.partitioned(attend, SHARD_RULE)(*arrays)
    )
    return Decoded(*call(q, cache, block_table, lengths))


def _attend(
    q: Array,
    cache: Array,
    block_table: Array,
    lengths: Array,
    *,
    case: MlaCase,
    sm_scale: float,
    split_len: int | None,
) -> tuple[Array, Array]:
    """The result on one device: a kernel for the parts, and one that merges them."""
    batch, num_queries, num_heads, width = q.shape
    num_rows = num_queries * num_heads
    tile = choose_tile(num_rows, case.hardware)
    num_blocks = -(-num_rows // tile.rows)
    max_pages = block_table.shape[1]
    pages = _pages_per_part(batch * num_blocks, max_pages, split_len, case=case)
    num_parts = -(-max_pages // pages)
    place = (num_parts, batch, num_rows)
    part_dtype = q.dtype if num_parts == 1 else jnp.dtype(jnp.float32)
    call = partial(triton.call, hardware=case.hardware)
    # Numbers of both kernels.
    sizes: dict[str, Any] = {"BATCH": batch, "NUM_ROWS": num_rows, "LATENT": case.latent}
    sizes["PART_LEN"] = pages * case.page
    out, lse = call(
        latent_attention,
        q.reshape(batch, num_rows, width).astype(cache.dtype),
        cache,
        block_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        out_shape=_results(place, case.latent, part_dtype),
        grid=(batch * num_blocks, num_parts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **sizes,
        NUM_HEADS=num_heads,
        NUM_QUERIES=num_queries,
        MAX_PAGES=max_pages,
        PAGE=case.page,
        ROPE=case.rope,
        ROWS=tile.rows,
        # The largest power of two that divides a page: no step crosses one.
        TOKENS=min(tile.tokens, case.page & -case.page),
        SCALE=float(sm_scale * LOG2_E),
    )
    if num_parts > 1:
        out, lse = call(
            merge_parts,
            out,
            lse,
            lengths.astype(jnp.int32),
            out_shape=_results(place[1:], case.latent, q.dtype),
            grid=(batch * num_rows,),
            num_warps=4,
            num_stages=2,
            **sizes,
        )
    shape = (batch, num_queries, num_heads)
    return out.reshape(*shape, case.latent), lse.reshape(shape)


def _results(
    place: tuple[int, ...], latent: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((*place, latent), dtype),
        jax.ShapeDtypeStruct(place, jnp.float32),
    )


def _pages_per_part(
    num_programs: int, max_pages: int, split_len: int | None, *, case: MlaCase
) -> int:
    """Pages of one part: from `split_len`, else so that the programs fill the cores once."""
    if split_len is not None:
        return split_len // case.page
    wanted = max(1, min(case.hardware.num_cores // num_programs, max_pages // 4))
    return -(-max_pages // wanted)


def choose_tile(num_rows: int, hardware: Hardware) -> Tile:
    """Return the tile for a sequence's query rows: the fewest that hold them, at most 64."""
    rows = next(size for size in (16, 32, 64) if size >= min(num_rows, 64))
    # Beside 64 rows only Hopper has room for 64 tokens: Ampere lacks the registers, and
    # Blackwell's matrix unit reads the weights, too, from shared memory.
    tokens = 64 if rows < 64 or hardware.architecture == "sm90" else 32
    # With 4 warps the sum of 64 rows spills its registers.
    return Tile(rows=rows, tokens=tokens, num_warps=8, num_stages=2)


def latent_attention(
    q: "Pointer",
    cache: "Pointer",
    block_table: "Pointer",
    lengths: "Pointer",
    out: "Pointer",
    lse: "Pointer",
    BATCH: "constexpr",
    NUM_ROWS: "constexpr",
    NUM_HEADS: "constexpr",
    NUM_QUERIES: "constexpr",
    MAX_PAGES: "constexpr",
    PAGE: "constexpr",
    LATENT: "constexpr",
    ROPE: "constexpr",
    ROWS: "constexpr",
    TOKENS: "constexpr",
    PART_LEN: "constexpr",
    SCALE: "constexpr",
) -> None:
    """ROWS query rows over one part of their sequence; source for Triton, not to be called."""
    num_blocks = tl.cdiv(NUM_ROWS, ROWS)
    sequence = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    part = tl.program_id(1)
    length = tl.load(lengths + sequence)
    first = part * PART_LEN
    end = tl.minimum(first + PART_LEN, length)
    # Nobody reads a part behind the end, the first one excepted.
    if (part > 0) & (first >= length):
        return

    rows = block * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(rows, NUM_ROWS - 1)
    num_seen = inside // NUM_HEADS + length - NUM_QUERIES + 1
    channels = tl.arange(0, LATENT)
    rope_channels = LATENT + tl.arange(0, ROPE)
    # 64 bits: a cache may have more than 2^31 elements.
    q_at = q + (sequence.to(tl.int64) * NUM_ROWS + inside)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q_at + channels[None, :])
    q_rope = tl.load(q_at + rope_channels[None, :])

    # The running maximum starts finite: the difference of two infinities is NaN.
    largest = tl.full((ROWS,), -1e30, dtype=tl.float32)
    mass = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS, LATENT), dtype=tl.float32)
    for start in range(first, end, TOKENS):
        page = tl.load(block_table + sequence * MAX_PAGES + start // PAGE)
        tokens = start + tl.arange(0, TOKENS)
        alive = (tokens < length)[:, None]
        at = cache + (page.to(tl.int64) * PAGE + tokens % PAGE)[:, None] * (LATENT + ROPE)
        # Dead slots are not loaded: zero weight times NaN would be NaN.
        latents = tl.load(at + channels[None, :], mask=alive, other=0.0)
        ropes = tl.load(at + rope_channels[None, :], mask=alive, other=0.0)
        scores = tl.dot(q_latent, latents.T)
        scores = tl.dot(q_rope, ropes.T, scores)
        seen = tokens[None, :] < num_seen[:, None]
        scores = tl.where(seen, scores * SCALE, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        mass = mass * fade + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(latents.dtype), latents, total * fade[:, None])
        largest = new_largest

    some = tl.where(mass == 0, 1.0, mass)
    natural = (largest + tl.log2(some)) * 0.6931471805599453
    place = (part.to(tl.int64) * BATCH + sequence) * NUM_ROWS + rows
    stored = rows < NUM_ROWS
    tl.store(lse + place, tl.where(mass == 0, float("inf"), natural), mask=stored)
    mean = (total / some[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * LATENT + channels[None, :], mean, mask=stored[:, None])


def merge_parts(
    parts: "Pointer",
    part_lse: "Pointer",
    lengths: "Pointer",
    out: "Pointer",
    lse: "Pointer",
    BATCH: "constexpr",
    NUM_ROWS: "constexpr",
    LATENT: "constexpr",
    PART_LEN: "constexpr",
) -> None:
    """One query row from its parts, in order; source for Triton, not to be called."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row // NUM_ROWS)
    num_parts = tl.maximum(tl.cdiv(length, PART_LEN), 1)
    channels = tl.arange(0, LATENT)
    # Tensors of one element, so that the loop carries the same type throughout.
    largest = tl.full((1,), -1e30, dtype=tl.float32)
    mass = tl.zeros((1,), dtype=tl.float32)
    total = tl.zeros((LATENT,), dtype=tl.float32)
    for part in range(0, num_parts):
        place = tl.cast(part, tl.int64) * BATCH * NUM_ROWS + row
        level = tl.load(part_lse + place + tl.arange(0, 1))
        # A part that this row sees nothing of.
        level = tl.where(level == float("inf"), float("-inf"), level)
        new_largest = tl.maximum(largest, level)
        fade = tl.exp(largest - new_largest)
        share = tl.exp(level - new_largest)
        total = total * fade + tl.load(parts + place * LATENT + channels) * share
        mass = mass * fade + share
        largest = new_largest

    some = tl.where(mass == 0, 1.0, mass)
    tl.store(out + row * LATENT + channels, (total / some).to(out.dtype.element_ty))
    natural = tl.where(mass == 0, float("inf"), largest + tl.log(some))
    tl.store(lse + row + tl.arange(0, 1), natural)
