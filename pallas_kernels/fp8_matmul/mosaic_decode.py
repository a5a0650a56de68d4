"""The block-scaled product on Hopper for few rows: weights on the wide side, K split over blocks.

At M ≤ 128 the weights' bytes are the cost. So they take wgmma's 64 rows, the tokens take its
columns, and where N alone gives too few blocks K is split; partial sums are added in a fixed
order, so repeated runs agree bit for bit.
"""

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

COPY_REGISTERS = 40
COMPUTE_REGISTERS = 208
RESERVED_BYTES = 2048


@dataclass(frozen=True)
class DecodeTile:
    """How one block works.

    Attributes:
        num_groups: computing warpgroups; each takes 64 weight rows.
        num_splits: blocks that share one stripe of weights, each with a part of K.
        num_stages: most steps in flight; fewer if memory is short.
    """

    num_groups: int
    num_splits: int
    num_stages: int

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
        out_bytes = self.tile.weight_rows * self.m * 4
        fitting = (SM90_SCRATCH_BYTES - RESERVED_BYTES - out_bytes) // stage_bytes
        return min(self.tile.num_stages, pl.cdiv(self.num_steps, self.num_splits), fitting)

    def steps(self) -> tuple[Any, Any]:
        """First step of this block's part of K, and how many it has; parts differ by one step."""
        split = lax.axis_index("split")
        first = lax.div(split * self.num_steps, jnp.int32(self.num_splits))
        end = lax.div((split + 1) * self.num_steps, jnp.int32(self.num_splits))
        return first, end - first

    def ring(self, refs: _Refs) -> mosaic.Ring:
        return mosaic.Ring(full=refs.full, empty=refs.empty, num_stages=self.num_stages)

    def copy(self, refs: _Refs) -> None:
        """The copying warpgroup: fill the stages of every step, in order."""
        mosaic.set_max_registers(COPY_REGISTERS, action="decrease")
        ring = self.ring(refs)
        first, count = self.steps()
        weights = pl.ds(lax.axis_index("stripe") * self.tile.weight_rows, self.tile.weight_rows)

        def step(index: Any, _: None) -> None:
            ring.wait_empty(index)
            slot = ring.slot(index)
            full = refs.full.at[slot]
            inner = pl.ds((first + index) * BLOCK, BLOCK)
            mosaic.copy_in(refs.b.at[weights, inner], refs.b_stages.at[slot], full)
            mosaic.copy_in(refs.a.at[:, inner], refs.a_stages.at[slot], full)
            scales = refs.a_scale_stages.at[slot, pl.ds(0, self.m)]
            mosaic.copy_in(refs.a_scales.at[first + index], scales, full)

        lax.fori_loop(0, count, step, None)
        ring.drain(count)

    def compute(self, refs: _Refs, warpgroup: Any) -> None:
        """A computing warpgroup: 64 weight rows times all tokens, over this block's part of K."""
        mosaic.set_max_registers(COMPUTE_REGISTERS, action="increase")
        ring = self.ring(refs)
        first, count = self.steps()
        stripe = lax.axis_index("stripe")
        row = stripe * self.tile.weight_rows + warpgroup * mosaic.WARPGROUP_ROWS
        weight_block = jnp.minimum(lax.div(row, jnp.int32(BLOCK)), pl.cdiv(self.n, BLOCK) - 1)
        my_rows = pl.ds(warpgroup * mosaic.WARPGROUP_ROWS, mosaic.WARPGROUP_ROWS)
        shape = (mosaic.WARPGROUP_ROWS, self.m)

        def step(index: Any, carry: Any) -> Any:
            total, weight_scale = carry
            following = jnp.minimum(first + index + 1, self.num_steps - 1)
            next_scale = refs.b_scales[weight_block, following]
            ring.wait_full(index)
            slot = ring.slot(index)
            stage = refs.a_scale_stages.at[slot, pl.ds(0, self.m)]
            token_scales = mosaic.load(stage, layout=mosaic.PER_COLUMN)
            part = mosaic.multiply(
                shape,
                lambda acc: mosaic.wgmma(
                    acc, refs.b_stages.at[slot, my_rows], refs.a_stages.at[slot].T
                ),
            )
            ring.release(index)
            scales = lax.broadcast_in_dim(token_scales * weight_scale, shape, [1])
            return total + part * scales, next_scale

        carry = (mosaic.zeros(shape), refs.b_scales[weight_block, first])
        total, _ = lax.fori_loop(0, count, step, carry)
        self.store(refs, total, warpgroup)

    def store(self, refs: _Refs, total: jax.Array, warpgroup: Any) -> None:
        """Store the sums: transposed into the result, or as this split's partial sums.

        A warpgroup whose weights all lie behind the last column has nothing to store.
        """
        row = lax.axis_index("stripe") * self.tile.weight_rows + warpgroup * mosaic.WARPGROUP_ROWS
        weights = pl.ds(row, mosaic.WARPGROUP_ROWS)
        buffer = refs.out_stages.at[warpgroup]

        @pl.when(row < self.num_columns)
        def _() -> None:
            if self.direct:
                transposed = buffer.T
                rounded = total.astype(refs.out.dtype)
                transposed[...] = mosaic.layout_cast(rounded, mosaic.ACCUMULATOR)
                mosaic.commit()
                mosaic.copy_out(buffer, refs.out.at[:, weights])
            else:
                buffer[...] = total
                mosaic.commit()
                mosaic.copy_out(buffer, refs.out.at[lax.axis_index("split"), weights])

        mosaic.wait_copy_out(0)


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
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "m n_out"]:
    """Return A·Bᵀ with scales, `num_columns` wide, rounded up to whole warpgroups of weights.

    Args:
        a: 8-bit elements; M a multiple of 8, at most 128; K a multiple of 128, not zero.
        b: 8-bit elements.
        a_scales: of tiles 1x128, K first.
        b_scales: of squares 128x128.
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
    )
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
            mosaic.Barrier(num_arrivals=tile.num_groups, num_barriers=decode.num_stages),
        ),
        grid=(pl.cdiv(columns, tile.weight_rows), decode.num_splits),
        grid_names=("stripe", "split"),
        num_warpgroups=tile.num_groups + 1,
    )
    out = launch(a, b, a_scales, b_scales)
    return out if decode.direct else out.sum(axis=0).T.astype(wanted)
