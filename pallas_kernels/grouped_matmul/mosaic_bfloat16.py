"""Grouped bfloat16 products on Hopper: operands as they lie in memory, no copy transposed.

wgmma reads 16-bit operands in either orientation, so weights stay [K, N], and the weight
gradient reads both operands with tokens first.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.hopper_product import Grouping, Product, Refs, Tile, Work, stored_columns

# The widest wgmma: most work per loaded byte, and its accumulator fits beside nothing else.
TILE = Tile(num_groups=2, columns=256, num_stages=4, snake=4)


@dataclass(frozen=True)
class PlainProduct(Product):
    """A product of 16-bit operands.

    Attributes:
        a_inner_first: A is [K, M] in memory; otherwise [M, K].
        b_inner_first: B is [K, N] in memory; otherwise [N, K].
    """

    a_inner_first: bool = False
    b_inner_first: bool = True

    def stage_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one stage of A and of B, as they lie in memory."""
        rows, columns, step = self.tile.rows, self.tile.columns, self.step
        return (
            (step, rows) if self.a_inner_first else (rows, step),
            (step, columns) if self.b_inner_first else (columns, step),
        )

    def copy_step(self, refs: Refs, work: Work, *, index: Any, slot: Any) -> None:
        """Start the copies of both operands."""
        rows = pl.ds(work.row_tile * self.tile.rows, self.tile.rows)
        columns = pl.ds(work.first_column, work.columns)
        inner = pl.ds((work.first_block + index) * self.step, self.step)
        b = refs.b.at[work.group] if self.grouping == "rows" else refs.b
        full = refs.full.at[slot]
        a_place = (inner, rows) if self.a_inner_first else (rows, inner)
        b_place = (inner, columns) if self.b_inner_first else (columns, inner)
        a_stage, b_stage = refs.a_stages.at[slot], refs.b_stages.at[slot]
        mosaic.copy_in(refs.a.at[a_place], a_stage, full, **self.sharing("a"))
        mosaic.copy_in(b.at[b_place], b_stage, full, **self.sharing("b"))

    def compute_tile(self, refs: Refs, work: Work, warpgroup: Any) -> tuple[jax.Array, ...]:
        """Add all steps up in one accumulator, two products in flight."""
        ring = self.ring(refs)
        my_rows = pl.ds(warpgroup * mosaic.WARPGROUP_ROWS, mosaic.WARPGROUP_ROWS)

        def issue(acc: Any) -> None:
            def step(index: Any, _: None) -> None:
                ring.wait_full(work.first_step + index)
                slot = ring.slot(work.first_step + index)
                if self.a_inner_first:
                    a = refs.a_stages.at[slot, :, my_rows].T
                else:
                    a = refs.a_stages.at[slot, my_rows]
                b = refs.b_stages.at[slot]
                mosaic.wgmma(acc, a, b if self.b_inner_first else b.T)
                mosaic.wgmma_wait(1)

                @pl.when(index > 0)
                def _() -> None:
                    ring.release(work.first_step + index - 1)

            lax.fori_loop(0, work.num_steps, step, None)
            mosaic.wgmma_wait(0)

            @pl.when(work.num_steps > 0)
            def _() -> None:
                ring.release(work.first_step + work.num_steps - 1)

        sums = mosaic.multiply((mosaic.WARPGROUP_ROWS, self.tile.columns), issue)
        segment = self.tile.segment
        return tuple(sums[:, at : at + segment] for at in range(0, work.columns, segment))


def grouped_product(
    a: Float[Array, "a0 a1"],
    b: Float[Array, "*group b0 b1"],
    *,
    groups: Int[Array, " groups"],
    grouping: Grouping,
    b_inner_first: bool,
    num_cores: int,
    out_dtype: jax.typing.DTypeLike,
    tile: Tile = TILE,
) -> Float[Array, "*out m_out n_out"]:
    """Return the grouped product, its rows and columns rounded up to what copies may store.

    Args:
        a: by "rows" [M, K]; by "inner" [K, M], whose rows are what is summed.
        b: by "rows" one [K, N] a group, or [N, K] without `b_inner_first`; by "inner" [K, N].
        groups: as in `hopper_product.Product`.
    """
    a, b = mosaic.whole_patterns(a), mosaic.whole_patterns(b)
    inner = grouping == "inner"
    dtype = jnp.dtype(out_dtype)
    columns = b.shape[-1] if b_inner_first else b.shape[-2]
    product = PlainProduct(
        m=a.shape[1] if inner else a.shape[0],
        n=columns,
        k=a.shape[0] if inner else a.shape[1],
        num_columns=stored_columns(columns, dtype),
        dtype=a.dtype,
        out_dtype=dtype,
        tile=tile,
        num_cores=num_cores,
        grouping=grouping,
        num_groups=len(groups) - inner,
        a_inner_first=inner,
        b_inner_first=b_inner_first,
    )
    return product.launch({"a": a, "b": b, "groups": groups})
