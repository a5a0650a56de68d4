"""Time MLA decode, on bfloat16 and packed 8-bit caches, against XLA on a contiguous one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench import peers
from pallas_kernels.bench.measure import Check, Part, Problem, Work
from pallas_kernels.bench.timing import Candidate, compiled_candidate, untimed
from pallas_kernels.mla_decode import OP, SPLIT_LEN, mla_decode, pack, reference
from pallas_kernels.mla_decode.cases import BENCH_SHAPES, LATENT, PAGE, ROPE, MlaCase, make_case
from pallas_kernels.mla_decode.fp8_cache import TOKEN_BYTES

# B, S, N.
Sizes = tuple[int, int, int]
SIZES: tuple[Sizes, ...] = BENCH_SHAPES
SM_SCALE = 0.1352
SPLIT_LENGTHS: dict[str, int | None] = {"auto": None, "fixed": SPLIT_LEN}
CHECKED_SEQUENCES = 2
WIDTH = LATENT + ROPE
CONTIGUOUS = "reads a cache that is contiguous already"


class Operands(NamedTuple):
    """A decode step: full lengths, shuffled pages, and the same cache packed in 8 bits."""

    q: jax.Array
    cache: jax.Array
    packed: jax.Array
    table: jax.Array
    lengths: jax.Array


def make_operands(sizes: Sizes) -> Operands:
    """Queries, both caches with shuffled pages, their table, and full lengths."""
    batch, num_tokens, num_heads = sizes
    pages_each = num_tokens // PAGE
    keys = jax.random.split(jax.random.key(0), 3)

    @untimed
    def run(keys: jax.Array) -> Operands:
        q = jax.random.normal(keys[0], (batch, 1, num_heads, WIDTH), jnp.bfloat16) / 2
        cache = jax.random.normal(keys[1], (batch * pages_each, PAGE, WIDTH), jnp.bfloat16) / 10
        table = jax.random.permutation(keys[2], batch * pages_each).astype(jnp.int32)
        lengths = jnp.full((batch,), num_tokens, jnp.int32)
        return Operands(q, cache, pack(cache), table.reshape(batch, pages_each), lengths)

    return jax.block_until_ready(run(keys))


def operand_bytes(sizes: Sizes) -> int:
    """About what the caches, paged, contiguous and packed, take."""
    batch, num_tokens, _ = sizes
    return 6 * batch * num_tokens * WIDTH


def case_of(sizes: Sizes, cache_dtype: str) -> MlaCase:
    """The case of `sizes` on the hardware that is here."""
    batch, num_tokens, num_heads = sizes
    case = make_case(batch, num_heads, num_tokens, hardware=hardware.current())
    return replace(case, cache_dtype=cache_dtype)


def work_of(sizes: Sizes, cache_dtype: str) -> Work:
    """FLOPs and bytes of a step; each token of the cache is read once."""
    case = case_of(sizes, cache_dtype)
    num_tokens = sizes[0] * sizes[1]
    num_bytes = case.bytes_moved(num_tokens)
    if cache_dtype == "uint8":
        num_bytes = case.bytes_moved(0) + num_tokens * TOKEN_BYTES
    return Work(case.flops(num_tokens), num_bytes, "bfloat16")


def ours(operands: Operands, *, name: str, backend: str, mode: str, packed: bool) -> Candidate:
    """One of our kernels with a fixed or automatic split."""

    def run(q: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return mla_decode(
            q,
            cache,
            block_table=table,
            lengths=lengths,
            latent=LATENT,
            sm_scale=SM_SCALE,
            split_len=SPLIT_LENGTHS[mode],
            backend=backend,
        ).out

    cache = operands.packed if packed else operands.cache
    return compiled_candidate(name, run, [(operands.q, cache, operands.table, operands.lengths)])


def xla_contiguous(operands: Operands) -> Candidate:
    """XLA on a cache without pages: spares it the gather that a paged cache costs."""

    def run(q: jax.Array, tokens: jax.Array) -> jax.Array:
        scores = jnp.einsum("bnc,bsc->bns", q, tokens, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * SM_SCALE, axis=-1).astype(jnp.bfloat16)
        return jnp.einsum("bns,bsc->bnc", weights, tokens[..., :LATENT])

    in_order = untimed(lambda cache, table: cache[table].reshape(len(table), -1, WIDTH))
    tokens = in_order(operands.cache, operands.table)
    return compiled_candidate("xla_contiguous", run, [(operands.q[:, 0], tokens)])


def flashinfer(operands: Operands) -> Candidate:
    """FlashInfer's MLA decode on the same pages.

    Raises:
        NotCarriedError: if FlashInfer is not there.
    """
    make_wrapper = peers.flashinfer("flashinfer.mla", "BatchMLAPagedAttentionWrapper")
    module = peers.torch()
    batch, pages_each = operands.table.shape
    arrays = (operands.q[:, 0], operands.cache, operands.table.reshape(-1), operands.lengths)
    q, cache, table, lengths = (peers.to_torch(x) for x in arrays)
    work_space = module.empty(128 * 2**20, dtype=module.int8, device="cuda")
    wrapper = make_wrapper(work_space, backend="fa3")
    starts = module.arange(batch + 1, dtype=module.int32, device="cuda")
    wrapper.plan(
        starts,
        starts * pages_each,
        table,
        lengths,
        operands.q.shape[2],
        LATENT,
        ROPE,
        PAGE,
        False,
        SM_SCALE,
        module.bfloat16,
        module.bfloat16,
    )

    def start(index: int) -> Any:
        parts = (q[..., :LATENT], q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:])
        return wrapper.run(*parts)

    candidate = peers.torch_candidate("flashinfer_mla", start, (q, cache, table, work_space))
    # Its first call compiles.
    candidate.wait(candidate.start(0))
    return candidate


PEERS: dict[str, tuple[Callable[[Operands], Candidate], str]] = {
    "xla_contiguous": (xla_contiguous, CONTIGUOUS),
    "flashinfer_mla": (flashinfer, ""),
}
FLOAT8 = "_fp8_cache"


def problem(sizes: Sizes) -> Problem:
    """Both splits of every kernel of ours, on both caches, and the peers."""
    operands = make_operands(sizes)
    case = case_of(sizes, "bfloat16")
    names = [b.name for b in OP.all_backends if b.name != "xla" and b.refuses(case) is None]
    work, packed_work = work_of(sizes, "bfloat16"), work_of(sizes, "uint8")
    chosen = OP.choose(case_of(sizes, "uint8")).name
    parts: list[Part] = []
    for mode, split_len in SPLIT_LENGTHS.items():
        settings = {"split_len": split_len} if split_len else {}
        for backend in names:
            name = f"{backend}_{mode}"
            build = partial(ours, operands, name=name, backend=backend, mode=mode, packed=False)
            parts.append(Part(name, work, build, settings=settings))
        name = f"{chosen}_{mode}{FLOAT8}"
        build = partial(ours, operands, name=name, backend=chosen, mode=mode, packed=True)
        # XLA has no splits: one of the modes says all.
        if chosen != "xla" or mode == "auto":
            parts.append(Part(name, packed_work, build, settings=settings))
    parts += [
        Part(name, work, partial(build, operands), against="mosaic_gpu_auto", note=note)
        for name, (build, note) in PEERS.items()
    ]
    return Problem("mla_decode", named(sizes), parts, partial(_checker, operands))


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("BSN", sizes, strict=True))


def _checker(operands: Operands) -> Check:
    """Compare the first sequences with the reference on the same cache."""
    few = slice(0, CHECKED_SEQUENCES)

    @untimed
    def run(q: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return reference.mla_decode(
            q[few].astype(jnp.float32),
            cache,
            block_table=table[few],
            lengths=lengths[few],
            latent=LATENT,
            sm_scale=SM_SCALE,
        ).out

    q, cache, packed, table, lengths = operands
    expected = np.asarray(run(q, cache, table, lengths))
    of_packed = np.asarray(run(q, packed, table, lengths))

    def check(name: str, result: Any) -> Difference:
        first = result[few]
        found = first.astype(jnp.float32) if isinstance(first, jax.Array) else first.float().cpu()
        right = of_packed if name.endswith(FLOAT8) else expected
        return difference(np.asarray(found).reshape(right.shape), right)

    return check
