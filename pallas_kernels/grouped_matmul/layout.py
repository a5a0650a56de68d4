"""Rows of groups, moved so that each group starts at a whole tile, and moved back."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sharded import vary, varying_axes


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class GroupLayout:
    """Where the rows of each group stand when every group starts at a whole tile.

    The number of tiles is static, the most that any sizes need, so that sizes may be computed on
    the device: at most G - 1 tiles more than the rows fill.

    Attributes:
        tile_groups: the group of each tile; -1 behind the last one.
        bounds: first tile of each group, and the end of the last.
        source: for each aligned row the row it comes from; the number of rows for none. None where
            rows stand at their places already.
        target: for each row where it goes; the number of aligned rows for none. None likewise.
        tile_rows: rows of a tile.
    """

    tile_groups: Int[Array, " tiles"]
    bounds: Int[Array, " groups_and_one"]
    source: Int[Array, " aligned"] | None
    target: Int[Array, " rows"] | None
    tile_rows: int

    def tree_flatten(self) -> tuple[tuple[object, ...], int]:
        """The arrays that are there are leaves."""
        return (self.tile_groups, self.bounds, self.source, self.target), self.tile_rows

    @classmethod
    def tree_unflatten(cls, tile_rows: int, leaves: tuple[object, ...]) -> "GroupLayout":
        """Rebuild without checks: JAX also builds trees of shardings and placeholders."""
        self = object.__new__(cls)
        names = ("tile_groups", "bounds", "source", "target", "tile_rows")
        for name, leaf in zip(names, (*leaves, tile_rows), strict=True):
            object.__setattr__(self, name, leaf)
        return self

    @property
    def num_aligned(self) -> int:
        """Rows of all tiles."""
        return len(self.tile_groups) * self.tile_rows

    @property
    def aligned_sizes(self) -> Int[Array, " groups"]:
        """Rows of each group, padding included."""
        return jnp.diff(self.bounds) * self.tile_rows

    def spread(self, rows: Float[Array, "rows n"]) -> Float[Array, "aligned n"]:
        """Rows at their aligned places; zeros between them, whatever the rows of no group hold.

        Rows that stand there already are left as they are.
        """
        if self.source is None:
            return rows
        return rows.at[self.source].get(mode="fill", fill_value=0)

    def collect(self, aligned: Float[Array, "aligned n"]) -> Float[Array, "rows n"]:
        """Rows back at their places; zeros for rows of no group, but where no row moves."""
        if self.target is None:
            return aligned
        return aligned.at[self.target].get(mode="fill", fill_value=0)


def num_tiles(num_rows: int, num_groups: int, *, tile_rows: int) -> int:
    """The most tiles that `num_rows` rows in `num_groups` groups can need."""
    if not num_rows:
        return 0
    partial = min(num_groups, num_rows)
    return (num_rows + partial * (tile_rows - 1)) // tile_rows


def align(group_sizes: Int[Array, " groups"], *, num_rows: int, tile_rows: int) -> GroupLayout:
    """Return the layout of consecutive groups of `group_sizes` rows; later rows have no group."""
    sizes = group_sizes.astype(jnp.int32)
    count = num_tiles(num_rows, len(sizes), tile_rows=tile_rows)
    tile_groups, bounds = _tiles_of(sizes, count, tile_rows=tile_rows)
    first_rows, last = jnp.cumsum(sizes) - sizes, len(sizes) - 1

    known = jnp.where(tile_groups >= 0, tile_groups, last)
    tiles = jnp.arange(count, dtype=jnp.int32)
    inside = (tiles - bounds[known])[:, None] * tile_rows + jnp.arange(tile_rows)[None, :]
    real = (inside < sizes[known][:, None]) & (tile_groups >= 0)[:, None]
    source = jnp.where(real, first_rows[known][:, None] + inside, num_rows).reshape(-1)

    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group_of_row = _num_at_or_before(jnp.cumsum(sizes), rows)
    of_row = jnp.minimum(group_of_row, last)
    place = bounds[of_row] * tile_rows + rows - first_rows[of_row]
    target = jnp.where(group_of_row <= last, place, count * tile_rows)
    return GroupLayout(
        tile_groups=tile_groups,
        bounds=bounds,
        source=source.astype(jnp.int32),
        target=target.astype(jnp.int32),
        tile_rows=tile_rows,
    )


def stay(group_sizes: Int[Array, " groups"], *, num_rows: int, tile_rows: int) -> GroupLayout:
    """Return the layout of groups that are whole tiles of rows already, one behind the other."""
    sizes = group_sizes.astype(jnp.int32)
    tile_groups, bounds = _tiles_of(sizes, num_rows // tile_rows, tile_rows=tile_rows)
    return GroupLayout(tile_groups, bounds, source=None, target=None, tile_rows=tile_rows)


def _tiles_of(
    sizes: Int[Array, " groups"], count: int, *, tile_rows: int
) -> tuple[Int[Array, " tiles"], Int[Array, " groups_and_one"]]:
    """The group of each of `count` tiles, and the first tile of each group."""
    ends = jnp.cumsum(-(-sizes // tile_rows))
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends.astype(jnp.int32)])
    group = _num_at_or_before(ends, jnp.arange(count, dtype=jnp.int32))
    return jnp.where(group < len(sizes), group, -1), bounds


def _num_at_or_before(
    ends: Int[Array, " groups"], places: Int[Array, " places"]
) -> Int[Array, " places"]:
    """For each place how many of the ascending `ends` are not above it."""
    axes = varying_axes(ends)
    # Sorting is slower, but the one method that takes operands that differ inside a shard_map.
    method = "sort" if axes else "scan"
    return jnp.searchsorted(ends, vary(places, axes), side="right", method=method).astype(jnp.int32)
