"""What every matrix product on Hopper here shares: the walk over tiles, the ring, the store.

A persistent grid: each block walks over tiles of the result. Its `tile.num_groups` computing
warpgroups take 64 rows each, one more warpgroup copies operands into a ring of stages. A step is
128 bytes of K, one row of the shared-memory pattern. What a step does is a subclass's business.
Where the last round of tiles would leave more than half of the blocks idle, its tiles are halved.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import mosaic
from pallas_kernels.formats import BLOCK
from pallas_kernels.hardware import SM90_SCRATCH_BYTES

# Shared memory for barriers, the reduction scratch and alignment of the buffers.
RESERVED_BYTES = 2048
# Registers of a computing and of the copying warpgroup, by number of computing ones: together at
# most the 512 a lane quadruple has, in steps of 8.
REGISTERS: dict[int, tuple[int, int]] = {1: (240, 40), 2: (232, 40), 3: (160, 24)}


Grouping = Literal["none", "rows", "inner"]


@dataclass(frozen=True)
class Tile:
    """How one block works.

    Attributes:
        num_groups: computing warpgroups; each takes 64 rows.
        columns: columns of the tile, a multiple of 32. 64 rows of them twice over (sum and
            partial product) must fit the registers: at most 128 for three groups, 192 for two.
        num_stages: most steps in flight between copying and computing; fewer if memory is short.
        num_out_buffers: buffers of 128 bytes a row through which a warpgroup stores its rows.
        snake: tiles side by side before the walk turns; neighbours share operands in L2.
        cluster: blocks that share each copy of an operand: one above the other of B, or where
            rows are grouped, and B with them, side by side of A.
    """

    num_groups: int
    columns: int
    num_stages: int
    num_out_buffers: int = 1
    snake: int = 1
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.num_groups * mosaic.WARPGROUP_ROWS

    @property
    def segment(self) -> int:
        """Columns that surely lie in one block of weights: all have one scale."""
        return math.gcd(self.columns, BLOCK)


class Refs(NamedTuple):
    """The kernel's memory: operands and result in device memory, stages in shared memory.

    `added` are operands of products that are added, if any, one product's after the other's.
    """

    a: Any
    b: Any
    out: Any
    a_stages: Any
    b_stages: Any
    out_stages: Any
    full: Any
    empty: Any
    groups: Any = None
    a_scales: Any = None
    b_scales: Any = None
    a_scale_stages: Any = None
    b_scale_stages: Any = None
    added: tuple[Any, ...] = ()


class Work(NamedTuple):
    """One tile of the result: where it is, which blocks of K it sums, and its number of steps.

    `columns`, its width, is a number at compile time: a whole tile's or half of one's.
    `first_step` counts the steps that this block took before, for the ring of stages.
    """

    row_tile: Any
    first_column: Any
    columns: int
    group: Any
    first_block: Any
    num_steps: Any
    first_step: Any


@dataclass(frozen=True)
class Product(ABC):
    """Static sizes of one launch. Subclasses say how a step is copied and computed.

    Attributes:
        m: rows of the result, like `num_columns` a number of whole patterns.
        num_columns: columns of the result, rounded up to what copies may store.
        grouping: by "rows": each tile of rows has a group, which picks its B; -1 = no group, not
            written. By "inner": each group sums its own part of K into its own result.
        num_groups: groups of an "inner" product.
    """

    m: int
    n: int
    k: int
    num_columns: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    tile: Tile
    num_cores: int
    grouping: Grouping = "none"
    num_groups: int = 1

    @property
    def step(self) -> int:
        """Elements of K in a step."""
        return mosaic.SWIZZLE_BYTES // self.dtype.itemsize

    @property
    def num_steps(self) -> int:
        """Steps of a tile that sums all of K."""
        return pl.cdiv(self.k, self.step)

    @property
    def num_copies(self) -> int:
        """Copies that fill one stage."""
        return 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile.rows + self.tile.columns) * mosaic.SWIZZLE_BYTES

    @property
    def store_columns(self) -> int:
        """Columns stored at a time: 128 bytes, the widest swizzle."""
        return min(mosaic.SWIZZLE_BYTES // self.out_dtype.itemsize, self.tile.segment)

    @property
    def num_stages(self) -> int:
        """Stages that are useful and fit."""
        row_bytes = self.store_columns * self.out_dtype.itemsize
        out_bytes = self.tile.num_out_buffers * self.tile.rows * row_bytes
        fitting = (SM90_SCRATCH_BYTES - RESERVED_BYTES - out_bytes) // self.stage_bytes
        return min(self.tile.num_stages, self.num_steps, fitting)

    @property
    def walk_shape(self) -> tuple[int, int]:
        """Tiles in each direction; those of a cluster count as one."""
        rows, columns = self.tile.rows, self.tile.columns
        if self.grouping == "rows":
            columns *= self.tile.cluster
        else:
            rows *= self.tile.cluster
        return pl.cdiv(self.m, rows), pl.cdiv(self.num_columns, columns)

    @property
    def num_tiles(self) -> int:
        """Tiles of all results."""
        return math.prod(self.walk_shape) * (self.num_groups if self.grouping == "inner" else 1)

    @property
    def num_halved(self) -> int:
        """Tiles, the last ones, that two blocks share."""
        if self.grouping != "none":
            return 0
        return num_halved(self.num_tiles, self.num_cores // self.tile.cluster, tile=self.tile)

    @property
    def num_blocks(self) -> int:
        """Clusters of the grid: all run at once and share the tiles."""
        return min(self.num_cores // self.tile.cluster, self.num_tiles + self.num_halved)

    def scratch(self) -> dict[str, object]:
        """Shared memory of one block, by the field of `Refs` that holds it."""
        tile, num_stages = self.tile, self.num_stages
        out = (tile.num_groups, tile.num_out_buffers, mosaic.WARPGROUP_ROWS, self.store_columns)
        a_stage, b_stage = self.stage_shapes()
        return {
            "a_stages": mosaic.shared((num_stages, *a_stage), self.dtype),
            "b_stages": mosaic.shared((num_stages, *b_stage), self.dtype),
            "out_stages": mosaic.shared(out, self.out_dtype),
            "full": mosaic.Barrier(num_arrivals=self.num_copies, num_barriers=num_stages),
            "empty": mosaic.empty_barrier(tile.num_groups, num_stages, cluster=tile.cluster),
        }

    def stage_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one stage of A and of B."""
        return (self.tile.rows, self.step), (self.tile.columns, self.step)

    @abstractmethod
    def copy_step(self, refs: Refs, work: Work, *, index: Any, slot: Any) -> None:
        """Start the copies of step `index` of a tile into stage `slot`."""

    @abstractmethod
    def compute_tile(self, refs: Refs, work: Work, warpgroup: Any) -> tuple[jax.Array, ...]:
        """Return the float32 sums of this warpgroup's rows, one array for each segment."""

    def sharing(self, operand: Literal["a", "b"]) -> dict[str, str]:
        """Options of the copies of an operand: whether a cluster makes each once for all."""
        shared = "a" if self.grouping == "rows" else "b"
        return {"collective_axes": "member"} if self.tile.cluster > 1 and operand == shared else {}

    def ring(self, refs: Refs) -> mosaic.Ring:
        """The stages between the copying warpgroup and the computing ones."""
        return mosaic.Ring(full=refs.full, empty=refs.empty, num_stages=self.num_stages)

    def walk(self, refs: Refs, visit: Callable[[Work], None]) -> jax.Array:
        """Call `visit` for each tile of this block and return the number of steps taken."""
        block = lax.axis_index("block")

        def one(index: jax.Array, first_step: jax.Array) -> jax.Array:
            work = self.work(refs, block + index * self.num_blocks, first_step)
            if self.grouping != "rows":
                visit(work)
                return first_step + work.num_steps
            # Rows of no group are neither read nor written.
            alive = work.group >= 0

            @pl.when(alive)
            def _() -> None:
                visit(work)

            return first_step + jnp.where(alive, jnp.int32(work.num_steps), jnp.int32(0))

        num_whole = self.num_tiles - self.num_halved
        mine = lax.div(num_whole - block + self.num_blocks - 1, jnp.int32(self.num_blocks))
        num_steps = lax.fori_loop(0, mine, one, jnp.int32(0))
        if not self.num_halved:
            return num_steps
        # In the last round two neighbours take the halves of one tile.
        taken = block < 2 * self.num_halved

        @pl.when(taken)
        def _() -> None:
            linear = num_whole + lax.div(block, jnp.int32(2))
            work = self.work(refs, linear, num_steps)
            columns = work.columns // 2
            first_column = work.first_column + lax.rem(block, jnp.int32(2)) * columns
            visit(work._replace(first_column=first_column, columns=columns))

        return num_steps + jnp.where(taken, jnp.int32(self.num_steps), jnp.int32(0))

    def work(self, refs: Refs, linear: jax.Array, first_step: jax.Array) -> Work:
        """The tile with number `linear` of this block's walk."""
        group, first_block, num_steps = jnp.int32(0), jnp.int32(0), self.num_steps
        if self.grouping == "inner":
            tiles_of_group = jnp.int32(math.prod(self.walk_shape))
            group, linear = lax.div(linear, tiles_of_group), lax.rem(linear, tiles_of_group)
            steps_of_block = BLOCK // self.step
            first_block = refs.groups[group] * steps_of_block
            num_steps = refs.groups[group + 1] * steps_of_block - first_block
        row_tile, column_tile = mosaic.planar_snake(linear, self.walk_shape, 1, self.tile.snake)
        member = lax.axis_index("member") if self.tile.cluster > 1 else jnp.int32(0)
        if self.grouping == "rows":
            group = refs.groups[row_tile]
            column_tile = column_tile * self.tile.cluster + member
        else:
            row_tile = row_tile * self.tile.cluster + member
        columns = self.tile.columns
        first_column = column_tile * columns
        return Work(row_tile, first_column, columns, group, first_block, num_steps, first_step)

    def store(self, refs: Refs, sums: tuple[jax.Array, ...], *, work: Work, warpgroup: Any) -> None:
        """Round the sums and copy them out; the copies overlap the next tile's first steps."""
        first_row = work.row_tile * self.tile.rows + warpgroup * mosaic.WARPGROUP_ROWS
        rows = pl.ds(first_row, mosaic.WARPGROUP_ROWS)
        width, num_buffers = self.store_columns, self.tile.num_out_buffers
        whole = self.num_columns % self.tile.columns == 0
        out = refs.out.at[work.group] if self.grouping == "inner" else refs.out
        # Where columns end inside a tile some stores are left out, so that they cannot be counted.
        num_pending = num_buffers - 1 if whole else 0
        num_stores = 0
        for index, values in enumerate(sums):
            for at in range(0, values.shape[1], width):
                buffer = refs.out_stages.at[warpgroup, num_stores % num_buffers]
                mosaic.wait_copy_out(num_pending, wait_read_only=True)
                buffer[...] = values[:, at : at + width].astype(refs.out.dtype)
                mosaic.commit()
                column = work.first_column + index * values.shape[1] + at
                target = out.at[rows, pl.ds(column, width)]
                if whole:
                    mosaic.copy_out(buffer, target)
                else:
                    pl.when(column < self.num_columns)(partial(mosaic.copy_out, buffer, target))
                num_stores += 1

    def copy(self, refs: Refs) -> None:
        """The copying warpgroup: fill the stages of every step of every tile, in order."""
        mosaic.set_max_registers(REGISTERS[self.tile.num_groups][1], action="decrease")
        ring = self.ring(refs)

        def tile(work: Work) -> None:
            def step(index: Any, _: None) -> None:
                ring.wait_empty(work.first_step + index)
                slot = ring.slot(work.first_step + index)
                self.copy_step(refs, work, index=index, slot=slot)

            lax.fori_loop(0, work.num_steps, step, None)

        ring.drain(self.walk(refs, tile))

    def compute(self, refs: Refs, warpgroup: Any) -> None:
        """A computing warpgroup: its 64 rows of every tile."""
        mosaic.set_max_registers(REGISTERS[self.tile.num_groups][0], action="increase")

        def tile(work: Work) -> None:
            sums = self.compute_tile(refs, work, warpgroup)
            self.store(refs, sums, work=work, warpgroup=warpgroup)

        self.walk(refs, tile)
        mosaic.wait_copy_out(0)

    def launch(self, operands: Mapping[str, Array], *, added: Sequence[Array] = ()) -> Array:
        """Run on `operands`, named as in `Refs`, and return the result [*group, M, columns]."""
        names = (*operands, *("added" for _ in added))
        run = self.kernel(names) if mosaic.is_interpreting() else _shared(self, names)
        return run(*operands.values(), *added)

    def kernel(self, operands: tuple[str, ...]) -> Callable[..., Array]:
        """Return the launcher for operands of these names."""
        cluster = self.tile.cluster
        scratch = self.scratch()
        stack = (self.num_groups,) if self.grouping == "inner" else ()
        return mosaic.kernel(
            partial(_body, self, (*operands, "out", *scratch)),
            out_type=jax.ShapeDtypeStruct((*stack, self.m, self.num_columns), self.out_dtype),
            scratch_types=tuple(scratch.values()),
            grid=(self.num_blocks,),
            grid_names=("block",),
            num_warpgroups=self.tile.num_groups + 1,
            **({"cluster": (cluster,), "cluster_names": ("member",)} if cluster > 1 else {}),
        )


@lru_cache(maxsize=256)
def _shared(product: Product, operands: tuple[str, ...]) -> Callable[..., Array]:
    """The launcher as one function of a program, however often it is called.

    A kernel takes a third of a second to lower and longer to compile, and a model has few sizes.
    """
    return jax.jit(product.kernel(operands))


def _body(product: Product, names: tuple[str, ...], *refs: Any) -> None:
    """The kernel: the last warpgroup copies, the others compute."""
    named = list(zip(names, refs, strict=True))
    memory = Refs(**dict(named))._replace(added=tuple(r for name, r in named if name == "added"))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < product.tile.num_groups)
    def _() -> None:
        product.compute(memory, warpgroup)

    @pl.when(warpgroup == product.tile.num_groups)
    def _() -> None:
        product.copy(memory)


def num_halved(num_tiles: int, num_blocks: int, *, tile: Tile) -> int:
    """Tiles of the last round that are halved, so that two blocks share each; often none.

    Halves of 128 columns have one scale a row of K and store whole patterns, as tiles do.
    """
    num_last = num_tiles % num_blocks
    return num_last if tile.columns == BLOCK and 2 * num_last <= num_blocks else 0


def stored_columns(num_columns: int, dtype: jnp.dtype) -> int:
    """Columns of a result that copies may store: whole patterns of 128 bytes."""
    return mosaic.whole_shape((1, num_columns), dtype)[1]
