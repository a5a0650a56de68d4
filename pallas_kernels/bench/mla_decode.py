"""Time MLA decode against XLA on a cache that is contiguous already."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.accuracy import difference
from pallas_kernels.bench.timing import Candidate, Record, interleaved
from pallas_kernels.mla_decode import mla_decode, reference
from pallas_kernels.mla_decode.cases import LATENT, PAGE, ROPE, make_case

# B, S, N.
Sizes = tuple[int, int, int]
SM_SCALE = 0.1352
SPLIT_LENGTHS: dict[str, int | None] = {"fixed": 4096, "auto": None}
CHECKED_SEQUENCES = 2


def make_operands(sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries, a cache with shuffled pages, its table, and full lengths."""
    batch, num_tokens, num_heads = sizes
    pages_each = num_tokens // PAGE
    keys = jax.random.split(jax.random.key(0), 3)
    width = LATENT + ROPE
    q = jax.random.normal(keys[0], (batch, 1, num_heads, width), jnp.bfloat16) / 2
    cache = jax.random.normal(keys[1], (batch * pages_each, PAGE, width), jnp.bfloat16) / 10
    table = jax.random.permutation(keys[2], batch * pages_each).astype(jnp.int32)
    return q, cache, table.reshape(batch, pages_each), jnp.full((batch,), num_tokens, jnp.int32)


def ours(operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array], *, mode: str) -> Candidate:
    """The Hopper kernel with a fixed or automatic split."""

    def run(q: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return mla_decode(
            q,
            cache,
            block_table=table,
            lengths=lengths,
            latent=LATENT,
            sm_scale=SM_SCALE,
            split_len=SPLIT_LENGTHS[mode],
            backend="mosaic_gpu",
        ).out

    compiled = jax.jit(run).lower(*operands).compile()
    return Candidate(f"mosaic_gpu_{mode}", lambda i: compiled(*operands))


def xla_contiguous(
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array], sizes: Sizes
) -> Candidate:
    """XLA on a cache without pages: spares it the gather that a paged cache costs."""
    batch, num_tokens, _ = sizes
    q, cache, _, _ = operands
    tokens = cache.reshape(batch, num_tokens, LATENT + ROPE)

    def run(q: jax.Array, tokens: jax.Array) -> jax.Array:
        scores = jnp.einsum("bnc,bsc->bns", q, tokens, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * SM_SCALE, axis=-1).astype(jnp.bfloat16)
        return jnp.einsum("bns,bsc->bnc", weights, tokens[..., :LATENT])

    compiled = jax.jit(run).lower(q[:, 0], tokens).compile()
    return Candidate("xla_contiguous", lambda i: compiled(q[:, 0], tokens))


def bench(sizes: Sizes, *, ceilings: Mapping[str, float], num_rounds: int = 9) -> Iterator[Record]:
    """Yield one record for each split mode and for XLA, interleaved in this process."""
    batch, num_tokens, num_heads = sizes
    case = make_case(batch, num_heads, num_tokens, hardware=hardware.current())
    total = batch * num_tokens
    flops, bytes_moved = case.flops(total), case.bytes_moved(total)
    floor_us = 1e6 * max(flops / ceilings["bfloat16_flops"], bytes_moved / ceilings["copy_bps"])
    operands = make_operands(sizes)
    candidates = [ours(operands, mode=mode) for mode in SPLIT_LENGTHS]
    candidates.append(xla_contiguous(operands, sizes))
    rounds = interleaved(candidates, num_rounds=num_rounds)
    expected = _expected(operands)
    record = Record(
        op="mla_decode",
        sizes={"B": batch, "S": num_tokens, "N": num_heads},
        backend="",
        flops=flops,
        bytes_moved=bytes_moved,
        floor_us=floor_us,
    )
    for candidate in candidates:
        total_error, row_error = None, None
        if candidate.name != "xla_contiguous":
            found = candidate.start(0)[:CHECKED_SEQUENCES]
            measured = difference(np.asarray(found, np.float32), expected)
            total_error, row_error = measured.total, measured.row
        yield replace(
            record,
            backend=candidate.name,
            rounds_us=rounds[candidate.name],
            total_error=total_error,
            row_error=row_error,
        )


def _expected(operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> np.ndarray:
    q, cache, table, lengths = (operands[0], operands[1], operands[2], operands[3])
    few = slice(0, CHECKED_SEQUENCES)
    found = jax.jit(
        lambda q, cache, table, lengths: (
            reference.mla_decode(
                q.astype(jnp.float32),
                cache,
                block_table=table,
                lengths=lengths,
                latent=LATENT,
                sm_scale=SM_SCALE,
            ).out
        )
    )(q[few], cache, table[few], lengths[few])
    return np.asarray(found)
