"""MLA decode on Hopper: one warpgroup scores, two accumulate, one copies pages.

A block takes 64 query rows (heads of one sequence, and its query tokens) and one part of the
sequence. Scores, softmax and accumulation overlap across warpgroups; nothing is computed twice.
Shared memory holds the queries and two pages; the queries' rope channels stay in registers,
because 8 KiB more do not fit.

The scoring warpgroup is what the others wait for, so it signals once a page: an accumulating
warpgroup that has read a page's chunk frees it for the scoring one too, because weights exist only
after the scores. And the maximum that weights are relative to moves only when a row exceeds it by
`SLACK`: sums are then rescaled on few pages, not on all (the trick is FlashAttention-4's), and each
warp sees for itself whether one did.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic, mosaic_registers, sharded
from pallas_kernels.mla_decode import mosaic_parts
from pallas_kernels.mla_decode.cases import LATENT, PAGE, ROPE, SHARD_RULE, MlaCase
from pallas_kernels.mla_decode.mosaic_parts import FAR_BELOW, LOG2_E, ROWS, Sizes
from pallas_kernels.mla_decode.reference import Decoded

# A page is copied, scored and released in chunks of channels: the next page's first chunk is on
# its way while the last one of this page is still in use.
NUM_CHUNKS = 4
CHUNK = LATENT // NUM_CHUNKS
# Chunks, and channels, of one accumulating warpgroup.
OWN_CHUNKS = NUM_CHUNKS // 2
OWN = OWN_CHUNKS * CHUNK
# Pages in flight: two fill shared memory beside the queries.
NUM_SLOTS = 2
# Registers of an accumulating, the scoring and the copying warpgroup: at most 512 a lane group.
ACCUMULATE_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS = 160, 168, 24
# Rows of the factors: one for each slot's fading factors, then the final norm.
NORM = NUM_SLOTS
# How far scores may exceed the maximum they are relative to, in powers of two: weights up to 256
# lose nothing in bfloat16 and float32.
SLACK = 8.0


def refuses(case: MlaCase) -> str | None:
    """Why the case is not for this kernel; None if it is."""
    sizes = {"latent": (case.latent, LATENT), "rope": (case.rope, ROPE), "page": (case.page, PAGE)}
    for name, (have, want) in sizes.items():
        if have != want:
            return f"{name}={have}; this kernel is written for {name}={want}"
    if case.cache_dtype != "bfloat16":
        return f"the cache is {case.cache_dtype}; this kernel reads bfloat16"
    return mosaic.refuses(case.hardware) or sharded.refuses_mesh()


class _Refs(NamedTuple):
    q: Any
    cache: Any
    block_table: Any
    lengths: Any
    out: Any
    lse: Any
    q_chunks: Any
    pages: Any
    page_ropes: Any
    weights: Any
    factors: Any
    full: Any
    full_rope: Any
    empty: Any
    weights_full: Any
    q_full: Any
    finished: Any
    q_rope: Any = None


class _Decode(Sizes):
    """One launch; its methods are the roles of the warpgroups."""

    def part(self, refs: _Refs) -> tuple[Any, Any, Any]:
        """First page, end page and sequence length of this block's part."""
        length = refs.lengths[lax.axis_index("sequence")]
        num_pages = lax.div(length + PAGE - 1, jnp.int32(PAGE))
        first = lax.axis_index("split") * self.pages_per_split
        end = jnp.maximum(first, jnp.minimum(num_pages, first + self.pages_per_split))
        return first, end, length

    def copy(self, refs: _Refs) -> None:
        """The copying warpgroup: bring each page as rope and then chunk by chunk."""
        mosaic.set_max_registers(COPY_REGISTERS, action="decrease")
        first, end, _ = self.part(refs)
        sequence = lax.axis_index("sequence")

        def page(index: Any, _: None) -> None:
            step = index - first
            slot = lax.rem(step, jnp.int32(NUM_SLOTS))
            source = refs.cache.at[refs.block_table[sequence, index]]
            for chunk in range(NUM_CHUNKS):
                self.wait_chunk(refs, step, chunk)
                if chunk == 0:
                    # Whose first chunk is accumulated, that page is scored: its rope is free too.
                    rope = source.at[:, pl.ds(LATENT, ROPE)]
                    mosaic.copy_in(rope, refs.page_ropes.at[slot], refs.full_rope.at[slot])
                columns = source.at[:, pl.ds(chunk * CHUNK, CHUNK)]
                full = refs.full.at[NUM_CHUNKS * slot + chunk]
                mosaic.copy_in(columns, refs.pages.at[slot, chunk], full)

        lax.fori_loop(first, end, page, None)
        for behind in range(NUM_SLOTS):
            for chunk in range(NUM_CHUNKS):
                self.wait_chunk(refs, end - first + behind, chunk)

    def wait_chunk(self, refs: _Refs, step: Any, chunk: int) -> None:
        """Return once the slot that a chunk of `step` will take is read to the end."""

        @pl.when(step >= NUM_SLOTS)
        def _() -> None:
            slot = lax.rem(step, jnp.int32(NUM_SLOTS))
            mosaic.wait(refs.empty.at[NUM_CHUNKS * slot + chunk])

    def score(self, refs: _Refs) -> None:
        """The scoring warpgroup: scores, running maximum and weights of each page."""
        mosaic.set_max_registers(SCORE_REGISTERS, action="increase")
        q_rope = self.load_queries(refs)
        first, end, length = self.part(refs)
        # Pages that every query token sees to the end need no mask.
        seen_by_all = jnp.maximum(length - self.num_queries + 1, 0)
        unmasked = jnp.clip(lax.div(seen_by_all, jnp.int32(PAGE)), first, end)
        carry = (mosaic.per_row(FAR_BELOW), mosaic.per_row(0.0))
        page = partial(self.score_page, refs, q_rope, first)
        carry = lax.fori_loop(first, unmasked, page, carry)
        masked = partial(page, num_seen=self.num_seen(length))
        largest, mass = lax.fori_loop(unmasked, end, masked, carry)

        some = jnp.maximum(mass, 1e-30)
        refs.factors[NORM] = 1.0 / some
        mosaic.commit()
        mosaic.arrive(refs.finished)
        place = (lax.axis_index("split"), lax.axis_index("sequence"), self.rows())
        refs.lse[place] = jnp.where(mass > 0, largest + jnp.log(some) * LOG2_E, FAR_BELOW)

    def rows(self) -> Any:
        """The query rows of this block."""
        return pl.ds(lax.axis_index("rows") * ROWS, ROWS)

    def load_queries(self, refs: _Refs) -> Any:
        """Bring the queries in; return their rope channels as wgmma's left operand."""
        q = refs.q.at[lax.axis_index("sequence"), self.rows()]
        for chunk in range(NUM_CHUNKS):
            columns = q.at[:, pl.ds(chunk * CHUNK, CHUNK)]
            mosaic.copy_in(columns, refs.q_chunks.at[chunk], refs.q_full)
        # The weights' first buffer is free until the first page is scored.
        landing = refs.weights.at[0] if refs.q_rope is None else refs.q_rope
        mosaic.copy_in(q.at[:, pl.ds(LATENT, ROPE)], landing, refs.q_full)
        mosaic.wait(refs.q_full)
        if refs.q_rope is not None:
            return refs.q_rope
        q_rope = mosaic.load(landing, layout=mosaic.ACCUMULATOR)
        # No thread may write weights over the queries before all have read them.
        mosaic.commit()
        return q_rope

    def num_seen(self, length: Any) -> Any:
        """Tokens that each row of the block sees; rows are query token by query token."""
        if self.num_queries == 1:
            return length
        row = mosaic.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.PER_ROW)
        row = row + lax.axis_index("rows") * ROWS
        num_seen = lax.div(row, jnp.int32(self.num_heads)) + length - self.num_queries + 1
        # Rows that pad the block count as later queries; there is nothing behind the last token.
        num_seen = jnp.minimum(num_seen, length)
        return lax.broadcast_in_dim(num_seen, (ROWS, PAGE), [0])

    def score_page(
        self, refs: _Refs, q_rope: Any, first: Any, index: Any, carry: Any, num_seen: Any = None
    ) -> Any:
        """Score one page, publish its weights and the factor that fades the older sum.

        The slot of the weights is free: to get here, this page's chunks were waited for, whose
        copies had waited for the products with the weights of two pages ago.
        """
        largest, mass = carry
        step = index - first
        slot = lax.rem(step, jnp.int32(NUM_SLOTS))
        shape = (ROWS, PAGE)

        if num_seen is not None:
            # Before the scores exist: there would be no registers for both.
            for chunk in range(NUM_CHUNKS):
                mosaic.wait(refs.full.at[NUM_CHUNKS * slot + chunk])
            self.clear_dead_tokens(refs, slot, index)

        def issue(acc: Any) -> None:
            mosaic.wait(refs.full_rope.at[slot])
            mosaic.wgmma(acc, q_rope, refs.page_ropes.at[slot].T)
            for chunk in range(NUM_CHUNKS):
                if num_seen is None:
                    mosaic.wait(refs.full.at[NUM_CHUNKS * slot + chunk])
                mosaic.wgmma(acc, refs.q_chunks.at[chunk], refs.pages.at[slot, chunk].T)

        scores = mosaic.multiply(shape, issue)
        if num_seen is not None:
            token = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.ACCUMULATOR)
            scores = jnp.where(token + index * PAGE < num_seen, scores, FAR_BELOW)
        scale = self.sm_scale * LOG2_E
        page_largest = scores.max(axis=1) * scale
        new_largest = jnp.where(page_largest > largest + SLACK, page_largest, largest)
        fade = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_largest, shape, [0]))
        if num_seen is not None:
            # A row that sees nothing yet has a maximum as far below as its scores.
            weights = jnp.where(scores > FAR_BELOW / 2, weights, 0.0)
        refs.weights[slot] = weights.astype(jnp.bfloat16)
        refs.factors[slot] = fade
        mosaic.commit()
        mosaic.arrive(refs.weights_full.at[slot])
        return new_largest, mass * fade + weights.sum(axis=1)

    def accumulate(self, refs: _Refs, half: Any) -> None:
        """An accumulating warpgroup: weights times its half of each page's channels."""
        mosaic.set_max_registers(ACCUMULATE_REGISTERS, action="increase")
        first, end, _ = self.part(refs)

        def page(index: Any, total: Any) -> Any:
            slot = lax.rem(index - first, jnp.int32(NUM_SLOTS))
            base = NUM_CHUNKS * slot + OWN_CHUNKS * half
            mosaic.wait(refs.weights_full.at[slot])
            fade = mosaic.load(refs.factors.at[slot], layout=mosaic.PER_ROW)
            total = mosaic_registers.rescaled(total, fade)

            def issue(acc: Any) -> None:
                for chunk in range(OWN_CHUNKS):
                    values = refs.pages.at[slot, OWN_CHUNKS * half + chunk]
                    columns = acc.at[:, pl.ds(chunk * CHUNK, CHUNK)]
                    mosaic.wgmma(columns, refs.weights.at[slot], values)
                for chunk in range(OWN_CHUNKS):
                    mosaic.wgmma_wait(OWN_CHUNKS - 1 - chunk)
                    mosaic.arrive(refs.empty.at[base + chunk])

            return mosaic.add_products(total, issue)

        total = lax.fori_loop(first, end, page, mosaic.zeros((ROWS, OWN)))
        mosaic.wait(refs.finished)
        norm = mosaic.load(refs.factors.at[NORM], layout=mosaic.PER_ROW)
        total = (total * lax.broadcast_in_dim(norm, total.shape, [0])).astype(jnp.bfloat16)
        for chunk in range(OWN_CHUNKS):
            stage = refs.q_chunks.at[OWN_CHUNKS * half + chunk]
            stage[...] = total[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        mosaic.commit()
        split, sequence = lax.axis_index("split"), lax.axis_index("sequence")
        out = refs.out.at[split, sequence, self.rows()]

        # Nobody reads a part behind the end, the first one excepted.
        @pl.when((first < end) | (split == 0))
        def _() -> None:
            for chunk in range(OWN_CHUNKS):
                column = (OWN_CHUNKS * half + chunk) * CHUNK
                stage = refs.q_chunks.at[OWN_CHUNKS * half + chunk]
                mosaic.copy_out(stage, out.at[:, pl.ds(column, CHUNK)])

        mosaic.wait_copy_out(0)

    def clear_dead_tokens(self, refs: _Refs, slot: Any, index: Any) -> None:
        """Zero the slots behind the last token: zero weight times NaN would be NaN.

        By the scoring warpgroup, which has registers to spare; the weights it publishes next
        tell the accumulating ones that the page is clean.
        """
        num_alive = refs.lengths[lax.axis_index("sequence")] - index * PAGE
        width = mosaic.SWIZZLE_BYTES // 2

        @pl.when(num_alive < PAGE)
        def _() -> None:
            shape = (PAGE, width)
            token = mosaic.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic.ACCUMULATOR)
            for chunk in range(NUM_CHUNKS):
                for at in range(0, CHUNK, width):
                    columns = refs.pages.at[slot, chunk, :, pl.ds(at, width)]
                    values = mosaic.load(columns, layout=mosaic.ACCUMULATOR)
                    columns[...] = jnp.where(token < num_alive, values, jnp.bfloat16(0))
            mosaic.commit()


def _body(decode: _Decode, names: tuple[str, ...], *refs: Any) -> None:
    """The kernel: two warpgroups accumulate, the third scores, the last copies."""
    memory = _Refs(**dict(zip(names, refs, strict=True)))
    role = lax.axis_index("warpgroup")
    # One chain of conditions: the compiler then sees that the roles exclude each other.
    lax.cond(
        role < 2,
        lambda: decode.accumulate(memory, role),
        lambda: lax.cond(role == 2, lambda: decode.score(memory), lambda: decode.copy(memory)),
    )


def _scratch() -> dict[str, object]:
    """Shared memory of one block, by the field of `_Refs` that holds it."""
    bf16 = jnp.bfloat16
    memory: dict[str, object] = {
        "q_chunks": mosaic.shared((NUM_CHUNKS, ROWS, CHUNK), bf16),
        "pages": mosaic.shared((NUM_SLOTS, NUM_CHUNKS, PAGE, CHUNK), bf16),
        "page_ropes": mosaic.shared((NUM_SLOTS, PAGE, ROPE), bf16),
        "weights": mosaic.shared((NUM_SLOTS, ROWS, PAGE), bf16),
        "factors": mosaic.shared((NUM_SLOTS + 1, ROWS), jnp.float32, matrix=False),
        "full": mosaic.Barrier(num_barriers=NUM_CHUNKS * NUM_SLOTS),
        "full_rope": mosaic.Barrier(num_barriers=NUM_SLOTS),
        "empty": mosaic.Barrier(num_barriers=NUM_CHUNKS * NUM_SLOTS),
        "weights_full": mosaic.Barrier(num_barriers=NUM_SLOTS),
        "q_full": mosaic.Barrier(num_arrivals=NUM_CHUNKS + 1),
        "finished": mosaic.Barrier(),
    }
    if mosaic.is_interpreting():
        memory["q_rope"] = mosaic.shared((ROWS, ROPE), bf16)
    return memory


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
    call = partial(
        mosaic_parts.attend, case=case, sm_scale=sm_scale, split_len=split_len, launch=_launch
    )
    return Decoded(*sharded.partitioned(call, SHARD_RULE)(q, cache, block_table, lengths))


def _launch(sizes: Sizes, *operands: Array) -> tuple[Array, Array]:
    """Run the kernel on queries, cache, table and lengths."""
    decode = _Decode(**vars(sizes))
    place = (decode.num_splits, decode.batch, decode.num_rows)
    scratch = _scratch()
    names = ("q", "cache", "block_table", "lengths", "out", "lse", *scratch)
    launch = mosaic.kernel(
        partial(_body, decode, names),
        out_type=(
            jax.ShapeDtypeStruct((*place, LATENT), jnp.bfloat16),
            jax.ShapeDtypeStruct(place, jnp.float32),
        ),
        scratch_types=tuple(scratch.values()),
        grid=(decode.batch, decode.num_splits, decode.num_rows // ROWS),
        grid_names=("sequence", "split", "rows"),
        num_warpgroups=4,
        reduction_bytes=0,
    )
    out, lse = launch(*operands)
    return out, lse
