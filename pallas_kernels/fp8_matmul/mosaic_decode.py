"""The block-scaled product on Hopper for few rows: weights on the wide side, K split over blocks.

At M ≤ 128 the weights' bytes are the cost. So they take wgmma's 64 rows, the tokens take its
columns, and where N alone gives too few blocks K is split; partial sums are added in a fixed
order, so repeated runs agree bit for bit. Each block walks over parts of the weights, and the next
part's copies start while this one is computed and stored: memory is never idle between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.formats import BLOCK, round_up
from pallas_kernels.hardware import SM90_SCRATCH_BYTES
from pallas_kernels.hopper_product import REGISTERS

RESERVED_BYTES = 2048


@dataclass(frozen=True)
class DecodeTile:
    """How one block works.

    Attributes:
        num_groups: computing warpgroups; each takes 64 weight rows.
        num_splits: parts of K into which each stripe of weights is cut.
        num_stages: most steps in flight; fewer if memory is short.
        cluster: blocks with neighbouring stripes that share each copy of the tokens.
    """

    num_groups: int
    num_splits: int
    num_stages: int
    cluster: int = 1

    @property
    def weight_rows(self) -> int:
        """Weight rows of one block."""
        return self.num_groups * mosaic.WARPGROUP_ROWS


class _Refs(NamedTuple):
    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    out: Any
    a_stages: Any
    b_stages: Any
    a_scale_stages: Any
    out_stages: Any
    full: Any
    empty: Any


class _Part(NamedTuple):
    """A stripe of weights times the tokens over a part of K, as in `hopper_product.Work`."""

    stripe: Any
    split: Any
    first_block: Any
    num_steps: Any
    first_step: Any


@dataclass(frozen=True)
class _Decode:
    """Static sizes of one launch; its methods are the halves of the kernel's body.

    Attributes:
        num_columns: weight rows whose products are stored, a multiple of 64.
    """

    m: int
    n: int
    k: int
    num_columns: int
    tile: DecodeTile
    out_dtype: jnp.dtype
    num_cores: int

    @property
    def direct(self) -> bool:
        """True where a block writes the result itself, not a partial sum.

        Only in bfloat16: the compiler finds no layout for a transposed store of float32.
        """
        return self.num_splits == 1 and self.out_dtype == jnp.bfloat16

    @property
    def num_steps(self) -> int:
        return self.k // BLOCK

    @property
    def scale_columns(self) -> int:
        """Scales of one stage, rounded up so that the next stage starts where a copy may."""
        return round_up(self.m, mosaic.STAGE_ALIGN_BYTES // 4)

    @property
    def num_splits(self) -> int:
        return min(self.tile.num_splits, self.num_steps)

    @property
    def num_stages(self) -> int:
        stage_bytes = (self.m + self.tile.weight_rows) * BLOCK + 4 * self.scale_columns
        out_bytes = self.tile.weight_rows * self.m * (2 if self.direct else 4)
        fitting = (SM90_SCRATCH_BYTES - RESERVED_BYTES - out_bytes) // stage_bytes
        return min(self.tile.num_stages, self.num_steps * self.num_parts, fitting)

    @property
    def cluster(self) -> int:
        """Blocks that share the tokens; each copies a part of their rows for all."""
        whole = self.m % (self.tile.cluster * mosaic.PATTERN_ROWS) == 0
        return self.tile.cluster if whole else 1

    @property
    def num_stripes(self) -> int:
        """Stripes of weights, those of a cluster counted as one."""
        return pl.cdiv(self.num_columns, self.tile.weight_rows * self.cluster)

    @property
    def num_parts(self) -> int:
        return self.num_stripes * self.num_splits

    @property
    def num_blocks(self) -> int:
        """Clusters of the grid: all run at once and share the parts."""
        return min(self.num_cores // self.cluster, self.num_parts)

    def walk(self, visit: Callable[[_Part], None]) -> jax.Array:
        """Call `visit` for each part of this block and return the number of steps taken."""
        block = lax.axis_index("block")

        def one(index: jax.Array, first_step: jax.Array) -> jax.Array:
            part = self.part(block + index * self.num_blocks, first_step)
            visit(part)
            return first_step + part.num_steps

        mine = lax.div(self.num_parts - block + self.num_blocks - 1, jnp.int32(self.num_blocks))
        return lax.fori_loop(0, mine, one, jnp.int32(0))

    def part(self, linear: jax.Array, first_step: jax.Array) -> _Part:
        """Part number `linear`; the parts of one stripe differ by at most one step of K."""
        split = lax.div(linear, jnp.int32(self.num_stripes))
        stripe = lax.rem(linear, jnp.int32(self.num_stripes))
        if self.cluster > 1:
            stripe = stripe * self.cluster + lax.axis_index("member")
        first = lax.div(split * self.num_steps, jnp.int32(self.num_splits))
        end = lax.div((split + 1) * self.num_steps, jnp.int32(self.num_splits))
        return _Part(stripe, split, first, end - first, first_step)

    def ring(self, refs: _Refs) -> mosaic.Ring:
        return mosaic.Ring(full=refs.full, empty=refs.empty, num_stages=self.num_stages)

    def copy(self, refs: _Refs) -> None:
        """The copying warpgroup: fill the stages of every step, in order."""
        mosaic.set_max_registers(REGISTERS[self.tile.num_groups][1], action="decrease")
        ring = self.ring(refs)
        height = self.tile.weight_rows
        together = {"collective_axes": "member"} if self.cluster > 1 else {}

        def visit(part: _Part) -> None:
            weights = pl.ds(part.stripe * height, height)

            def step(index: Any, _: None) -> None:
                ring.wait_empty(part.first_step + index)
                slot = ring.slot(part.first_step + index)
                full = refs.full.at[slot]
                block = part.first_block + index
                inner = pl.ds(block * BLOCK, BLOCK)
                mosaic.copy_in(refs.b.at[weights, inner], refs.b_stages.at[slot], full)
                mosaic.copy_in(refs.a.at[:, inner], refs.a_stages.at[slot], full, **together)
                scales = refs.a_scale_stages.at[slot, pl.ds(0, self.m)]
                mosaic.copy_in(refs.a_scales.at[block], scales, full)

            lax.fori_loop(0, part.num_steps, step, None)

        ring.drain(self.walk(visit))

    def compute(self, refs: _Refs, warpgroup: Any) -> None:
        """A computing warpgroup: 64 weight rows of each part times all tokens."""
        mosaic.set_max_registers(REGISTERS[self.tile.num_groups][0], action="increase")

        def visit(part: _Part) -> None:
            row = part.stripe * self.tile.weight_rows + warpgroup * mosaic.WARPGROUP_ROWS
            total = self.compute_part(refs, part, row=row, warpgroup=warpgroup)
            self.store(refs, total, part=part, row=row, warpgroup=warpgroup)

        self.walk(visit)
        mosaic.wait_copy_out(0)

    def compute_part(self, refs: _Refs, part: _Part, *, row: Any, warpgroup: Any) -> jax.Array:
        """The float32 sum of 64 weight rows times all tokens."""
        ring = self.ring(refs)
        weight_block = jnp.minimum(lax.div(row, jnp.int32(BLOCK)), pl.cdiv(self.n, BLOCK) - 1)
        my_rows = pl.ds(warpgroup * mosaic.WARPGROUP_ROWS, mosaic.WARPGROUP_ROWS)
        shape = (mosaic.WARPGROUP_ROWS, self.m)

        def step(index: Any, carry: Any) -> Any:
            total, weight_scale = carry
            following = jnp.minimum(part.first_block + index + 1, self.num_steps - 1)
            next_scale = refs.b_scales[weight_block, following]
            ring.wait_full(part.first_step + index)
            slot = ring.slot(part.first_step + index)
            product = mosaic.multiply(
                shape,
                lambda acc: mosaic.wgmma(
                    acc, refs.b_stages.at[slot, my_rows], refs.a_stages.at[slot].T
                ),
            )
            # Not before the product: a warpgroup's accumulators leave no registers for them.
            stage = refs.a_scale_stages.at[slot, pl.ds(0, self.m)]
            token_scales = mosaic.load(stage, layout=mosaic.PER_COLUMN)
            ring.release(part.first_step + index)
            scales = lax.broadcast_in_dim(token_scales * weight_scale, shape, [1])
            return total + product * scales, next_scale

        carry = (mosaic.zeros(shape), refs.b_scales[weight_block, part.first_block])
        return lax.fori_loop(0, part.num_steps, step, carry)[0]

    def store(
        self, refs: _Refs, total: jax.Array, *, part: _Part, row: Any, warpgroup: Any
    ) -> None:
        """Store the sums: transposed into the result, or as this split's partial sums.

        A warpgroup whose weights all lie behind the last column has nothing to store.
        """
        weights = pl.ds(row, mosaic.WARPGROUP_ROWS)
        buffer = refs.out_stages.at[warpgroup]

        @pl.when(row < self.num_columns)
        def _() -> None:
            mosaic.wait_copy_out(0, wait_read_only=True)
            if self.direct:
                transposed = buffer.T
                rounded = total.astype(refs.out.dtype)
                transposed[...] = mosaic.layout_cast(rounded, mosaic.ACCUMULATOR)
                mosaic.commit()
                mosaic.copy_out(buffer, refs.out.at[:, weights])
            else:
                buffer[...] = total
                mosaic.commit()
                mosaic.copy_out(buffer, refs.out.at[part.split, weights])


def _body(decode: _Decode, *refs: Any) -> None:
    memory = _Refs(*refs)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < decode.tile.num_groups)
    def _() -> None:
        decode.compute(memory, warpgroup)

    @pl.when(warpgroup == decode.tile.num_groups)
    def _() -> None:
        decode.copy(memory)


def decode_product(
    a: Float[Array, "m k"],
    b: Float[Array, "n k"],
    *,
    a_scales: Float[Array, "k_blocks m"],
    b_scales: Float[Array, "n_blocks k_blocks"],
    num_columns: int,
    tile: DecodeTile,
    num_cores: int,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "m n_out"]:
    """Return A·Bᵀ with scales, `num_columns` wide, rounded up to whole warpgroups of weights.

    Args:
        a: 8-bit elements; M a multiple of 8, at most 128; K a multiple of 128, not zero.
        b: 8-bit elements.
        a_scales: of tiles 1x128, K first.
        b_scales: of squares 128x128.
        num_cores: blocks that run at once.
    """
    wanted = jnp.dtype(out_dtype)
    rows = mosaic.WARPGROUP_ROWS
    columns = round_up(num_columns, rows)
    decode = _Decode(
        m=a.shape[0],
        n=b.shape[0],
        k=a.shape[1],
        num_columns=columns,
        tile=tile,
        out_dtype=wanted,
        num_cores=num_cores,
    )
    cluster = decode.cluster
    dtype = wanted if decode.direct else jnp.dtype(jnp.float32)
    stage = (
        (tile.num_groups, decode.m, rows) if decode.direct else (tile.num_groups, rows, decode.m)
    )
    shape = (decode.m, columns) if decode.direct else (decode.num_splits, columns, decode.m)
    launch = mosaic.kernel(
        partial(_body, decode),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=(
            mosaic.shared((decode.num_stages, decode.m, BLOCK), a.dtype),
            mosaic.shared((decode.num_stages, tile.weight_rows, BLOCK), b.dtype),
            mosaic.shared((decode.num_stages, decode.scale_columns), jnp.float32, matrix=False),
            mosaic.shared(stage, dtype, matrix=False),
            mosaic.Barrier(num_arrivals=3, num_barriers=decode.num_stages),
            mosaic.empty_barrier(tile.num_groups, decode.num_stages, cluster=decode.cluster),
        ),
        grid=(decode.num_blocks,),
        grid_names=("block",),
        num_warpgroups=tile.num_groups + 1,
        **({"cluster": (cluster,), "cluster_names": ("member",)} if cluster > 1 else {}),
    )
    out = launch(a, b, a_scales, b_scales)
    return out if decode.direct else out.sum(axis=0).T.astype(wanted)
