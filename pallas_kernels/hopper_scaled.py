"""The block-scaled product on Hopper, which dense and grouped products share.

A step is 128 of K: the scale block, the promotion interval and one 128-byte row of shared memory
are the same length, so a step is one barrier, four wgmma and one promotion to float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, batched, pairwise
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.formats import BLOCK
from pallas_kernels.hopper_product import (
    Grouping,
    Product,
    Refs,
    Tile,
    Work,
    stored_columns,
)


@dataclass(frozen=True)
class ScaledProduct(Product):
    """A product of 8-bit operands with scales.

    Attributes:
        b_scales_by_row: B has tiles of 1x128; otherwise squares of 128x128.
        ends: where not empty, the product is a sum of products; the step behind each one's last.
    """

    b_scales_by_row: bool = False
    ends: tuple[int, ...] = ()

    @property
    def num_copies(self) -> int:
        """Copies that fill one stage."""
        return 4 if self.b_scales_by_row else 3

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage, scales included."""
        return (self.tile.rows + self.tile.columns) * (BLOCK + 4)

    def scratch(self) -> dict[str, object]:
        """Shared memory of one block, by the field of `Refs` that holds it."""
        rows, columns = (self.num_stages, self.tile.rows), (self.num_stages, self.tile.columns)
        memory = super().scratch()
        memory["a_scale_stages"] = mosaic.shared(rows, jnp.float32, matrix=False)
        if self.b_scales_by_row:
            memory["b_scale_stages"] = mosaic.shared(columns, jnp.float32, matrix=False)
        return memory

    def copy_step(self, refs: Refs, work: Work, *, index: Any, slot: Any) -> None:
        """Start the copies of both operands and their scales."""
        k = work.first_block + index
        copy = partial(self._copy_operands, refs, work, slot=slot)
        if not self.ends:
            copy(refs.a, refs.b, refs.a_scales, k=k)
            return
        operands = ((refs.a, refs.b, refs.a_scales), *batched(refs.added, 3))
        for these, (first, end) in zip(operands, pairwise((0, *self.ends)), strict=True):
            pl.when((k >= first) & (k < end))(partial(copy, *these, k=k - first))

    def _copy_operands(
        self, refs: Refs, work: Work, a: Any, b: Any, a_scales: Any, *, k: Any, slot: Any
    ) -> None:
        """Start the copies of block `k` of two operands and their scales."""
        rows = pl.ds(work.row_tile * self.tile.rows, self.tile.rows)
        columns, width = pl.ds(work.first_column, work.columns), pl.ds(0, work.columns)
        inner, full = pl.ds(k * BLOCK, BLOCK), refs.full.at[slot]
        b = b.at[work.group] if self.grouping == "rows" else b
        mosaic.copy_in(a.at[rows, inner], refs.a_stages.at[slot], full, **self.sharing("a"))
        b_stage = refs.b_stages.at[slot, width]
        mosaic.copy_in(b.at[columns, inner], b_stage, full, **self.sharing("b"))
        mosaic.copy_in(a_scales.at[k, rows], refs.a_scale_stages.at[slot], full)
        if self.b_scales_by_row:
            stage = refs.b_scale_stages.at[slot, width]
            mosaic.copy_in(refs.b_scales.at[k, columns], stage, full)

    def compute_tile(self, refs: Refs, work: Work, warpgroup: Any) -> tuple[jax.Array, ...]:
        """Multiply each step into a fresh accumulator and promote it with its scales."""
        ring = self.ring(refs)
        my_rows = pl.ds(warpgroup * mosaic.WARPGROUP_ROWS, mosaic.WARPGROUP_ROWS)
        shape = (mosaic.WARPGROUP_ROWS, work.columns)
        width = pl.ds(0, work.columns)
        segment = math.gcd(work.columns, BLOCK)
        starts = range(0, work.columns, segment)

        def step(index: Any, carry: Any) -> Any:
            sums, b_scales = carry
            next_scales = self.weight_scales(refs, work, index + 1)
            ring.wait_full(work.first_step + index)
            slot = ring.slot(work.first_step + index)
            a_scale = mosaic.load(refs.a_scale_stages.at[slot, my_rows], layout=mosaic.PER_ROW)
            part = mosaic.multiply(
                shape,
                lambda acc: mosaic.wgmma(
                    acc, refs.a_stages.at[slot, my_rows], refs.b_stages.at[slot, width].T
                ),
            )
            if self.b_scales_by_row:
                stage = refs.b_scale_stages.at[slot, width]
                by_column = mosaic.load(stage, layout=mosaic.PER_COLUMN)
                part = part * lax.broadcast_in_dim(by_column, shape, [1])
            ring.release(work.first_step + index)
            scaled = [
                part[:, at : at + segment]
                * lax.broadcast_in_dim(a_scale * scale, (shape[0], segment), [0])
                for at, scale in zip(starts, b_scales, strict=True)
            ]
            return tuple(s + x for s, x in zip(sums, scaled, strict=True)), next_scales

        zeros = tuple(mosaic.zeros((shape[0], segment)) for _ in starts)
        carry = (zeros, self.weight_scales(refs, work, jnp.int32(0)))
        return lax.fori_loop(0, work.num_steps, step, carry)[0]

    def weight_scales(self, refs: Refs, work: Work, step: Any) -> tuple[Any, ...]:
        """Scales of the tile's segments at a step, read one step ahead of their use."""
        segment = math.gcd(work.columns, BLOCK)
        num_segments = work.columns // segment
        if self.b_scales_by_row:
            return (jnp.float32(1.0),) * num_segments
        k = jnp.minimum(step, self.num_steps - 1)
        last = pl.cdiv(self.n, BLOCK) - 1
        scales = refs.b_scales.at[work.group] if self.grouping == "rows" else refs.b_scales
        found = []
        for index in range(num_segments):
            column = work.first_column + index * segment
            found.append(scales[jnp.minimum(lax.div(column, jnp.int32(BLOCK)), last), k])
        return tuple(found)


class Operands(NamedTuple):
    """What a further product of a sum is of, as `block_scaled_product` takes it."""

    a: Float[Array, "m k"]
    b: Float[Array, "n k"]
    a_scales: Float[Array, "k_blocks m_padded"]


def block_scaled_product(
    a: Float[Array, "m k"],
    b: Float[Array, "n k"] | Float[Array, "g n k"],
    a_scales: Float[Array, "k_blocks m_padded"],
    *,
    b_scales: Float[Array, "..."],
    b_scales_by_row: bool,
    num_columns: int,
    tile: Tile,
    num_cores: int,
    out_dtype: jax.typing.DTypeLike,
    groups: Int[Array, " groups"] | None = None,
    grouping: Grouping = "none",
    added: Sequence[Operands] = (),
) -> Float[Array, "m_out n_out"] | Float[Array, "g m_out n_out"]:
    """Return A·Bᵀ with scales, M and `num_columns` rounded up to what copies may store.

    Args:
        a: 8-bit elements; K a multiple of 128, not zero.
        b: 8-bit elements; one matrix a group where rows are grouped.
        a_scales: of tiles 1x128, K first; the row count a multiple of 4 (16-byte copies).
        b_scales: [*group, N/128, K/128] of squares, or with `b_scales_by_row` [K/128, N] of
            tiles 1x128, N a multiple of 4.
        num_cores: blocks that run at once.
        groups: by "rows": the group of each tile of rows, -1 for none, whose rows are not
            written. By "inner": the first 128 of K of each group, and the end of the last.
        added: operands of products of the same M and N that are added in the same sum, of rows
            that are not grouped. `b_scales` are then squares, those of all products along K.
    """
    dtype = jnp.dtype(out_dtype)
    num_rows_of_b = b.shape[-2]
    a, b = mosaic.whole_patterns(a), mosaic.whole_patterns(b)
    product = ScaledProduct(
        m=a.shape[0],
        n=num_rows_of_b,
        k=a.shape[1] + sum(each.a.shape[1] for each in added),
        num_columns=stored_columns(num_columns, dtype),
        dtype=a.dtype,
        out_dtype=dtype,
        tile=tile,
        num_cores=num_cores,
        grouping=grouping,
        num_groups=1 if groups is None else len(groups) - (grouping == "inner"),
        b_scales_by_row=b_scales_by_row,
        ends=_ends([a, *(each.a for each in added)]) if added else (),
    )
    operands = {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales}
    if groups is not None:
        operands["groups"] = groups
    whole = [(*map(mosaic.whole_patterns, each[:2]), each.a_scales) for each in added]
    return product.launch(operands, added=[array for each in whole for array in each])


def _ends(operands: Sequence[Array]) -> tuple[int, ...]:
    """The steps behind the last of each operand's K, when they are summed one after the other."""
    return tuple(accumulate(a.shape[1] // BLOCK for a in operands))
