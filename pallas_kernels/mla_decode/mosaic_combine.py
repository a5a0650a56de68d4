"""Merge the parts of each sequence on Hopper, reading only parts that hold tokens.

The number of parts is static, what the block table has room for; most sequences fill few of them.
XLA would read all. Parts are added in order, so repeated runs agree bit for bit.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.mla_decode.cases import LATENT

ROWS = mosaic.WARPGROUP_ROWS
# Channels of one block: their sum fits the registers, and 4 blocks share a row of parts.
COLUMNS = 128
NUM_SLOTS = 2
# Parts with a log sum below this saw nothing.
SAW_NOTHING = -5e29
LOG2_E = math.log2(math.e)


class _Refs(NamedTuple):
    parts: Any
    lse: Any
    lengths: Any
    out: Any
    out_lse: Any
    part_slots: Any
    lse_slots: Any
    out_stage: Any
    lse_stage: Any
    full: Any


@dataclass(frozen=True)
class _Combine:
    split_len: int

    def run(self, refs: _Refs) -> None:
        """Merge 64 rows of one sequence, 128 channels wide."""
        sequence, chunk = lax.axis_index("sequence"), lax.axis_index("chunk")
        rows = pl.ds(lax.axis_index("rows") * ROWS, ROWS)
        columns = pl.ds(chunk * COLUMNS, COLUMNS)
        length = refs.lengths[sequence]
        num_parts = lax.div(length + self.split_len - 1, jnp.int32(self.split_len))
        num_parts = jnp.maximum(num_parts, 1)

        def fetch(part: Any) -> None:
            slot = lax.rem(part, jnp.int32(NUM_SLOTS))
            full = refs.full.at[slot]
            source = refs.parts.at[part, sequence, rows, columns]
            mosaic.copy_in(source, refs.part_slots.at[slot], full)
            mosaic.copy_in(refs.lse.at[part, sequence, rows], refs.lse_slots.at[slot], full)

        def merge(part: Any, carry: Any) -> Any:
            total, largest, mass = carry

            @pl.when(part + 1 < num_parts)
            def _() -> None:
                fetch(part + 1)

            slot = lax.rem(part, jnp.int32(NUM_SLOTS))
            mosaic.wait(refs.full.at[slot])
            lse = mosaic.load(refs.lse_slots.at[slot], layout=mosaic.PER_ROW)
            values = mosaic.load(refs.part_slots.at[slot], layout=mosaic.ACCUMULATOR)
            new_largest = jnp.maximum(largest, lse)
            fade, share = jnp.exp2(largest - new_largest), jnp.exp2(lse - new_largest)
            share = jnp.where(lse > SAW_NOTHING, share, 0.0)
            shape = total.shape
            total = total * lax.broadcast_in_dim(fade, shape, [0])
            total = total + values.astype(jnp.float32) * lax.broadcast_in_dim(share, shape, [0])
            # All threads have read the slot before the next copy into it starts.
            mosaic.commit()
            return total, new_largest, mass * fade + share

        fetch(jnp.int32(0))
        start = (
            mosaic.zeros((ROWS, COLUMNS)),
            mosaic.per_row(2 * SAW_NOTHING),
            mosaic.per_row(0.0),
        )
        total, largest, mass = lax.fori_loop(0, num_parts, merge, start)
        norm = jnp.where(mass > 0, 1.0 / jnp.maximum(mass, 1e-30), 0.0)
        total = total * lax.broadcast_in_dim(norm, total.shape, [0])
        refs.out_stage[...] = total.astype(jnp.bfloat16)
        natural = (largest + jnp.log(jnp.maximum(mass, 1e-30)) * LOG2_E) / LOG2_E
        refs.lse_stage[...] = jnp.where(mass > 0, natural, jnp.inf)
        mosaic.commit()
        mosaic.copy_out(refs.out_stage, refs.out.at[sequence, rows, columns])

        @pl.when(chunk == 0)
        def _() -> None:
            mosaic.copy_out(refs.lse_stage, refs.out_lse.at[sequence, rows])

        mosaic.wait_copy_out(0)


def combine(
    parts: Float[Array, "splits batch rows latent"],
    lse: Float[Array, "splits batch rows"],
    lengths: Int[Array, " batch"],
    *,
    split_len: int,
) -> tuple[Float[Array, "batch rows latent"], Float[Array, "batch rows"]]:
    """Return the merged rows and their natural-log sums; zeros and +inf where nothing was seen.

    Args:
        parts: each part's normalised result; anything in parts behind a sequence's end.
        lse: base-2 log sums of the parts.
    """
    _, batch, num_rows, _ = parts.shape
    bf16 = jnp.bfloat16
    launch = mosaic.kernel(
        partial(_body, _Combine(split_len)),
        out_type=(
            jax.ShapeDtypeStruct((batch, num_rows, LATENT), bf16),
            jax.ShapeDtypeStruct((batch, num_rows), jnp.float32),
        ),
        scratch_types=(
            mosaic.shared((NUM_SLOTS, ROWS, COLUMNS), bf16),
            mosaic.shared((NUM_SLOTS, ROWS), jnp.float32, matrix=False),
            mosaic.shared((ROWS, COLUMNS), bf16),
            mosaic.shared((ROWS,), jnp.float32, matrix=False),
            mosaic.Barrier(num_arrivals=2, num_barriers=NUM_SLOTS),
        ),
        grid=(batch, num_rows // ROWS, LATENT // COLUMNS),
        grid_names=("sequence", "rows", "chunk"),
        num_warpgroups=1,
    )
    out, out_lse = launch(parts, lse, lengths)
    return out, out_lse


def _body(work: _Combine, *refs: Any) -> None:
    work.run(_Refs(*refs))
