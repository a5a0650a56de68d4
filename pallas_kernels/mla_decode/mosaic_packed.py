"""MLA decode on Hopper over the packed 8-bit cache: pages become bfloat16 in shared memory.

As in the bfloat16 kernel, a block takes 64 query rows and one part of the sequence, one warpgroup
scores and two accumulate. wgmma wants both operands in bfloat16, so the fourth warpgroup copies
packed bytes in and multiplies them by their scales. It works on quarters of a page: while one is
unpacked the next are on their way, and the products of the page before still run. Two whole
unpacked pages, so that none waits for the other's products, leave no room for all queries: half of
them stay in the scoring warpgroup's registers.

The scoring warpgroup is what the others wait for, so it signals once a page. Sums are rescaled
only where a maximum moved by more than `SLACK`, and each warp sees for itself whether one did.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import mosaic, mosaic_registers, sharded
from pallas_kernels.mla_decode import mosaic_parts, mosaic_unpack
from pallas_kernels.mla_decode.cases import LATENT, PAGE, ROPE, SHARD_RULE, MlaCase
from pallas_kernels.mla_decode.mosaic_parts import FAR_BELOW, LOG2_E, ROWS, Sizes
from pallas_kernels.mla_decode.mosaic_unpack import CHUNK, NUM_CHUNKS
from pallas_kernels.mla_decode.reference import Decoded

# Chunks, and channels, of one accumulating warpgroup.
OWN_CHUNKS = NUM_CHUNKS // 2
OWN = OWN_CHUNKS * CHUNK
# Unpacked pages in flight: one is scored or accumulated while the other is unpacked.
NUM_SLOTS = 2
# Chunks of the queries that stay in the scoring warpgroup's registers, which wgmma reads for free.
HELD_CHUNKS = 2
# Registers of an accumulating, the scoring and the unpacking warpgroup: at most 512 a lane group.
ACCUMULATE_REGISTERS, SCORE_REGISTERS, UNPACK_REGISTERS = 160, 152, 40
# The chunk after which a page's scales are read a second time: registers hold half of them.
LAST_OF_FIRST_SCALES = 1
# Barriers of what is unpacked: one a chunk of each slot, then rope.
FULL_ROPE = NUM_CHUNKS * NUM_SLOTS
# Rows of the factors: one for each slot's fading factors, the final norm and log sum.
NORM, LSE = NUM_SLOTS, NUM_SLOTS + 1
# How far scores may exceed the maximum they are relative to, as in the bfloat16 kernel.
SLACK = 8.0
# The maximum before any score; FAR_BELOW, below it, is a score that does not count.
LOWEST = -1e25


def refuses(case: MlaCase) -> str | None:
    """Why the case is not for this kernel; None if it is."""
    sizes = {"latent": (case.latent, LATENT), "rope": (case.rope, ROPE), "page": (case.page, PAGE)}
    for name, (have, want) in sizes.items():
        if have != want:
            return f"{name}={have}; this kernel is written for {name}={want}"
    if case.cache_dtype != "uint8":
        return f"the cache is {case.cache_dtype}; this kernel reads packed bytes"
    return mosaic.refuses(case.hardware) or sharded.refuses_mesh()


class _Refs(NamedTuple):
    q: Any
    latents: Any
    scales: Any
    ropes: Any
    block_table: Any
    lengths: Any
    out: Any
    lse: Any
    q_chunks: Any
    packed_latents: Any
    packed_scales: Any
    packed_ropes: Any
    pages: Any
    page_ropes: Any
    weights: Any
    factors: Any
    copied: Any
    full: Any
    empty: Any
    weights_full: Any
    q_full: Any
    finished: Any
    q_rope: Any = None


class _Decode(Sizes):
    """One launch; its methods are the roles of the warpgroups."""

    def part(self, refs: _Refs) -> tuple[Any, Any]:
        """Tokens of the sequence from this block's part on, and pages of the part."""
        first = lax.axis_index("split") * (self.pages_per_split * PAGE)
        num_tokens = refs.lengths[lax.axis_index("sequence")] - first
        num_pages = lax.div(jnp.maximum(num_tokens, 0) + PAGE - 1, jnp.int32(PAGE))
        return num_tokens, jnp.minimum(num_pages, self.pages_per_split)

    def rows(self) -> Any:
        """The query rows of this block."""
        return pl.ds(lax.axis_index("rows") * ROWS, ROWS)

    def unpack(self, refs: _Refs) -> None:
        """The unpacking warpgroup: copies packed pages in and turns them into bfloat16."""
        mosaic.set_max_registers(UNPACK_REGISTERS, action="decrease")
        num_tokens, num_pages = self.part(refs)

        @pl.when(num_pages > 0)
        def _() -> None:
            place = self.place(refs, jnp.int32(0))
            mosaic_unpack.fetch_scales(refs, place)
            for chunk in range(NUM_CHUNKS):
                mosaic_unpack.fetch_latents(refs, place, chunk)
            mosaic_unpack.fetch_rope(refs, place)

        page = partial(self.unpack_page, refs, num_tokens, num_pages)
        lax.fori_loop(0, num_pages, lambda step, _: page(step), None)
        for behind in range(NUM_SLOTS):
            for chunk in range(NUM_CHUNKS):
                self.wait_chunk(refs, num_pages + behind, chunk)
        self.wait_scored(refs, num_pages)

    def place(self, refs: _Refs, step: Any) -> Any:
        """Where in the cache page number `step` of this block's part is."""
        index = lax.axis_index("split") * self.pages_per_split + step
        return refs.block_table[lax.axis_index("sequence"), index]

    def unpack_page(self, refs: _Refs, num_tokens: Any, num_pages: Any, step: Any) -> None:
        """Unpack one page chunk by chunk, and start the copy of the next one behind it."""
        slot = lax.rem(step, jnp.int32(NUM_SLOTS))
        more = step + 1 < num_pages
        # Read long before it is needed: it comes from device memory.
        next_place = self.place(refs, jnp.minimum(step + 1, num_pages - 1))

        mosaic.wait(refs.copied.at[mosaic_unpack.COPIED_SCALES])
        pieces = [pl.ds(at, mosaic_unpack.PIECE) for at in range(0, PAGE, mosaic_unpack.PIECE)]
        load_scales = partial(mosaic_unpack.load_scales, refs, num_tokens - step * PAGE)
        scales = [load_scales(piece) for piece in pieces]
        for chunk in range(NUM_CHUNKS):
            mosaic.wait(refs.copied.at[chunk])
            self.wait_chunk(refs, step, chunk)
            for number, piece in enumerate(pieces):
                source = refs.packed_latents.at[chunk, piece]
                values = mosaic_unpack.dequantise(source, scales[number][chunk])
                refs.pages[slot, chunk, piece] = values
            if chunk == LAST_OF_FIRST_SCALES:
                scales = [load_scales(piece) for piece in pieces]
            # All threads have read the bytes, and wgmma may read the values.
            mosaic.commit()
            mosaic.arrive(refs.full.at[NUM_CHUNKS * slot + chunk])

            @pl.when(more)
            def _(chunk: int = chunk) -> None:
                mosaic_unpack.fetch_latents(refs, next_place, chunk)
                if chunk == LAST_OF_FIRST_SCALES:
                    mosaic_unpack.fetch_scales(refs, next_place)

        mosaic.wait(refs.copied.at[mosaic_unpack.COPIED_ROPE])
        rope = mosaic.load(refs.packed_ropes, layout=mosaic_unpack.ROPES)
        self.wait_scored(refs, step)
        refs.page_ropes[...] = rope
        mosaic.commit()
        mosaic.arrive(refs.full.at[FULL_ROPE])

        @pl.when(more)
        def _() -> None:
            mosaic_unpack.fetch_rope(refs, next_place)

    def wait_chunk(self, refs: _Refs, step: Any, chunk: int) -> None:
        """Return once the slot that a chunk of `step` will take is read to the end."""

        @pl.when(step >= NUM_SLOTS)
        def _() -> None:
            slot = lax.rem(step, jnp.int32(NUM_SLOTS))
            mosaic.wait(refs.empty.at[NUM_CHUNKS * slot + chunk])

    def wait_scored(self, refs: _Refs, step: Any) -> None:
        """Return once the page before `step` is scored, so that its rope channels are free."""

        @pl.when(step >= 1)
        def _() -> None:
            mosaic.wait(refs.weights_full.at[lax.rem(step + 1, jnp.int32(NUM_SLOTS))])

    def score(self, refs: _Refs) -> None:
        """The scoring warpgroup: scores, running maximum and weights of each page."""
        mosaic.set_max_registers(SCORE_REGISTERS, action="increase")
        queries = self.load_queries(refs)
        num_tokens, num_pages = self.part(refs)
        # Pages that every query token sees to the end need no mask.
        seen_by_all = jnp.maximum(num_tokens - self.num_queries + 1, 0)
        num_unmasked = jnp.minimum(lax.div(seen_by_all, jnp.int32(PAGE)), num_pages)
        carry = (mosaic.per_row(LOWEST), mosaic.per_row(0.0))
        page = partial(self.score_page, refs, queries)
        carry = lax.fori_loop(0, num_unmasked, page, carry)
        # Read again: over the first loop there are no registers left to keep it.
        num_tokens, num_pages = self.part(refs)
        masked = partial(page, num_seen=self.num_seen(num_tokens))
        largest, mass = lax.fori_loop(num_unmasked, num_pages, masked, carry)

        some = jnp.maximum(mass, 1e-30)
        refs.factors[NORM] = 1.0 / some
        refs.factors[LSE] = jnp.where(mass > 0, largest + jnp.log(some) * LOG2_E, FAR_BELOW)
        mosaic.commit()
        mosaic.arrive(refs.finished)

    def load_queries(self, refs: _Refs) -> tuple[Any, ...]:
        """Bring the queries in; return wgmma's left operands: chunks, then rope channels."""
        q = refs.q.at[lax.axis_index("sequence"), self.rows()]
        held = NUM_CHUNKS - refs.q_chunks.shape[0]
        for chunk in range(held, NUM_CHUNKS):
            columns = q.at[:, pl.ds(chunk * CHUNK, CHUNK)]
            mosaic.copy_in(columns, refs.q_chunks.at[chunk - held], refs.q_full)
        if refs.q_rope is not None:
            mosaic.copy_in(q.at[:, pl.ds(LATENT, ROPE)], refs.q_rope, refs.q_full)
        load = partial(mosaic.load, layout=mosaic.ACCUMULATOR, optimized=False)
        registers = [load(q.at[:, pl.ds(chunk * CHUNK, CHUNK)]) for chunk in range(held)]
        rope = load(q.at[:, pl.ds(LATENT, ROPE)]) if refs.q_rope is None else refs.q_rope
        mosaic.wait(refs.q_full)
        shared = [refs.q_chunks.at[stage] for stage in range(NUM_CHUNKS - held)]
        return (*registers, *shared, rope)

    def num_seen(self, num_tokens: Any) -> Any:
        """Of these tokens, how many each row sees; rows are query token by query token."""
        if self.num_queries == 1:
            return num_tokens
        row = mosaic.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.PER_ROW)
        row = row + lax.axis_index("rows") * ROWS
        num_seen = lax.div(row, jnp.int32(self.num_heads)) + num_tokens - self.num_queries + 1
        # Rows that pad the block count as later queries; there is nothing behind the last token.
        num_seen = jnp.minimum(num_seen, num_tokens)
        return lax.broadcast_in_dim(num_seen, (ROWS, PAGE), [0])

    def score_page(
        self, refs: _Refs, queries: Any, step: Any, carry: Any, num_seen: Any = None
    ) -> Any:
        """Score one page, publish its weights and the factor that fades the older sum."""
        largest, mass = carry
        slot = lax.rem(step, jnp.int32(NUM_SLOTS))
        shape = (ROWS, PAGE)

        def issue(acc: Any) -> None:
            for chunk in range(NUM_CHUNKS):
                mosaic.wait(refs.full.at[NUM_CHUNKS * slot + chunk])
                mosaic.wgmma(acc, queries[chunk], refs.pages.at[slot, chunk].T)
            mosaic.wait(refs.full.at[FULL_ROPE])
            mosaic.wgmma(acc, queries[NUM_CHUNKS], refs.page_ropes.T)

        scores = mosaic.multiply(shape, issue)
        scale = self.sm_scale * LOG2_E
        if num_seen is not None:
            token = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.ACCUMULATOR)
            # Still far below the lowest maximum when it has been scaled.
            unseen = max(FAR_BELOW / scale, -3e38)
            scores = jnp.where(token + step * PAGE < num_seen, scores, unseen)
        page_largest = scores.max(axis=1) * scale
        new_largest = jnp.where(page_largest > largest + SLACK, page_largest, largest)
        fade = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_largest, shape, [0]))
        refs.factors[slot] = fade
        refs.weights[slot] = weights.astype(jnp.bfloat16)
        mosaic.commit()
        mosaic.arrive(refs.weights_full.at[slot])
        return new_largest, mass * fade + weights.sum(axis=1)

    def accumulate(self, refs: _Refs, half: Any) -> None:
        """An accumulating warpgroup: weights times its half of each page's channels."""
        mosaic.set_max_registers(ACCUMULATE_REGISTERS, action="increase")
        _, num_pages = self.part(refs)

        def page(step: Any, total: Any) -> Any:
            slot = lax.rem(step, jnp.int32(NUM_SLOTS))
            base = NUM_CHUNKS * slot + OWN_CHUNKS * half
            # Whoever has weights of a page has waited for all of it.
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

        total = lax.fori_loop(0, num_pages, page, mosaic.zeros((ROWS, OWN)))
        mosaic.wait(refs.finished)
        norm = mosaic.load(refs.factors.at[NORM], layout=mosaic.PER_ROW)
        total = (total * lax.broadcast_in_dim(norm, total.shape, [0])).astype(jnp.bfloat16)
        # Nobody reads or writes this half of a slot any more.
        stages = [refs.pages.at[0, OWN_CHUNKS * half + chunk] for chunk in range(OWN_CHUNKS)]
        for chunk, stage in enumerate(stages):
            stage[...] = total[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        mosaic.commit()
        split, sequence = lax.axis_index("split"), lax.axis_index("sequence")
        out = refs.out.at[split, sequence, self.rows()]

        @pl.when(half == 0)
        def _() -> None:
            mosaic.copy_out(refs.factors.at[LSE], refs.lse.at[split, sequence, self.rows()])

        # Nobody reads a part behind the end, the first one excepted.
        @pl.when((num_pages > 0) | (split == 0))
        def _() -> None:
            for chunk, stage in enumerate(stages):
                column = (OWN_CHUNKS * half + chunk) * CHUNK
                mosaic.copy_out(stage, out.at[:, pl.ds(column, CHUNK)])

        mosaic.wait_copy_out(0)


def _body(decode: _Decode, names: tuple[str, ...], *refs: Any) -> None:
    """The kernel: two warpgroups accumulate, the third scores, the last unpacks."""
    memory = _Refs(**dict(zip(names, refs, strict=True)))
    role = lax.axis_index("warpgroup")
    # One chain of conditions: the compiler then sees that the roles exclude each other.
    lax.cond(
        role < 2,
        lambda: decode.accumulate(memory, role),
        lambda: lax.cond(role == 2, lambda: decode.score(memory), lambda: decode.unpack(memory)),
    )


def _scratch() -> dict[str, object]:
    """Shared memory of one block, by the field of `_Refs` that holds it."""
    bf16 = jnp.bfloat16
    # The interpreter knows no left operands in registers.
    in_registers = 0 if mosaic.is_interpreting() else HELD_CHUNKS
    num_q_chunks = NUM_CHUNKS - in_registers
    memory: dict[str, object] = {
        "q_chunks": mosaic.shared((num_q_chunks, ROWS, CHUNK), bf16),
        "packed_latents": mosaic.byte_rows((NUM_CHUNKS, PAGE, CHUNK), mosaic_unpack.F8),
        "packed_scales": mosaic.shared((1, PAGE, NUM_CHUNKS), jnp.float32, matrix=False),
        "packed_ropes": mosaic.byte_rows((PAGE, ROPE), bf16),
        "pages": mosaic.shared((NUM_SLOTS, NUM_CHUNKS, PAGE, CHUNK), bf16),
        "page_ropes": mosaic.shared((PAGE, ROPE), bf16),
        "weights": mosaic.shared((NUM_SLOTS, ROWS, PAGE), bf16),
        "factors": mosaic.shared((NUM_SLOTS + 2, ROWS), jnp.float32, matrix=False),
        "copied": mosaic.Barrier(num_barriers=mosaic_unpack.NUM_COPIED),
        "full": mosaic.Barrier(num_barriers=FULL_ROPE + 1),
        "empty": mosaic.Barrier(num_barriers=NUM_CHUNKS * NUM_SLOTS),
        "weights_full": mosaic.Barrier(num_barriers=NUM_SLOTS),
        "q_full": mosaic.Barrier(num_arrivals=num_q_chunks + (1 if not in_registers else 0)),
        "finished": mosaic.Barrier(),
    }
    if mosaic.is_interpreting():
        memory["q_rope"] = mosaic.shared((ROWS, ROPE), bf16)
    return memory


def run(
    q: Float[Array, "batch queries heads width"],
    cache: UInt8[Array, "pages page token_bytes"],
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


def _launch(
    sizes: Sizes, q: Array, cache: Array, block_table: Array, lengths: Array
) -> tuple[Array, Array]:
    """Run the kernel on queries, the cache's three views, table and lengths."""
    decode = _Decode(**vars(sizes))
    operands = (q, *mosaic_unpack.views(cache), block_table, lengths)
    place = (decode.num_splits, decode.batch, decode.num_rows)
    scratch = _scratch()
    inputs = ("q", "latents", "scales", "ropes", "block_table", "lengths")
    launch = mosaic.kernel(
        partial(_body, decode, (*inputs, "out", "lse", *scratch)),
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
