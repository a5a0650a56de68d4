"""Rows grouped by expert into whole tiles, and the product of each tile with its expert's matrix.

Shapes are those of the worst case, products those of the rows there are: tiles behind the last one
in use are not multiplied.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import ACTIVATION, WEIGHT, Quantized
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantize import rounded
from pallas_kernels.widened_matmul import has_kernel, widened_matmul

# Rows of one tile: every expert's tokens are padded to a multiple of it, so that one tile
# multiplies one expert's matrix.
TILE_ROWS = 128
# Share of the experts from which on a product of all of them beats the grouped one, which reads the
# touched ones alone: on an H200 they stream weights at 3.9 and 2.3 TB/s (docs/kernels.md).
LEAST_SHARE = 0.6
# Choices up to which each is compared with each to find its place.
MOST_COMPARED = 1024

# What finds tokens their experts, and their way there and back, is under this name in a program.
ROUTING = "routing"
# gate and up [E D F], down [E F D]; as serving keeps them in 8 bits, transposed.
type Kernel = jax.Array | Quantized | Beside
type Kernels = tuple[jax.Array, jax.Array, jax.Array]
type KernelsBeside = tuple[Beside, Beside, Beside]
type Kernels8Bit = tuple[Quantized, Quantized, Quantized]
# Format of the operands of products.
type Product = Literal["float32", "bfloat16", "fp8"]


class Beside(NamedTuple):
    """A kernel with its 8-bit copy, which is multiplied; the kernel itself gets the gradient."""

    kernel: Float[Array, "E K N"]
    quantized: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel."""
        return self.kernel.shape


class Tiles(NamedTuple):
    """Where rows stand when every expert's start at a whole tile.

    Attributes:
        slot_of_choice: the row in the tiles of each choice; `num_slots` for a choice of no expert.
        choice_of_slot: the choice that stands there; the number of choices for none.
        expert_of_tile: experts in order; any expert behind the last tile in use.
        rows_of_expert: rows of each expert, padding included.
    """

    slot_of_choice: Int[Array, " R"]
    choice_of_slot: Int[Array, " S"]
    expert_of_tile: Int[Array, " P"]
    rows_of_expert: Int[Array, " E"]

    @property
    def num_slots(self) -> int:
        """Rows of all tiles."""
        return len(self.choice_of_slot)


@jax.named_scope(ROUTING)
def tiles_of(
    experts: Int[Array, " R"], *, num_experts: int, most_choices: int, tile_rows: int = TILE_ROWS
) -> Tiles:
    """Give every choice a row, grouped by expert, each group padded to whole tiles.

    Args:
        experts: the expert of each choice; `num_experts` for a choice that is not made here.
        num_experts: experts that hold matrices here.
        most_choices: most choices that are made here, whatever the router does.
        tile_rows: rows of a tile.
    """
    partly_filled = min(num_experts, most_choices)
    num_tiles = (most_choices + partly_filled * (tile_rows - 1)) // tile_rows
    num_slots = num_tiles * tile_rows
    ranks, counts = ranks_and_counts(experts, num_experts=num_experts)
    padded = -(-counts // tile_rows) * tile_rows
    ends = jnp.cumsum(padded)
    first_slots = (ends - padded).at[experts].get(mode="fill", fill_value=0)
    slot_of_choice = jnp.where(experts < num_experts, first_slots + ranks, num_slots)
    # One comparison with each end: a search is a loop of small programs.
    starts = jnp.arange(num_tiles) * tile_rows
    expert_of_tile = jnp.searchsorted(ends, starts, side="right", method="compare_all")
    return Tiles(
        slot_of_choice=slot_of_choice,
        choice_of_slot=inverse(slot_of_choice, size=num_slots),
        expert_of_tile=jnp.minimum(expert_of_tile, num_experts - 1),
        rows_of_expert=padded,
    )


def ranks_and_counts(
    experts: Int[Array, " R"], *, num_experts: int
) -> tuple[Int[Array, " R"], Int[Array, " E"]]:
    """Return how many choices before each have its expert, and how many each expert has.

    Few choices, as in decoding, are compared with each other: a sort is many small programs.
    """
    choices = len(experts)
    if choices <= MOST_COMPARED:
        same = experts[:, None] == experts[None, :]
        ranks = jnp.tril(same, -1).sum(axis=1, dtype=jnp.int32)
        chosen = experts[None, :] == jnp.arange(num_experts, dtype=experts.dtype)[:, None]
        return ranks, chosen.sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=num_experts + 1)
    firsts = jnp.cumsum(counts) - counts
    sorted_ranks = jnp.arange(choices) - firsts[experts[order]]
    ranks = jnp.zeros(choices, sorted_ranks.dtype).at[order].set(sorted_ranks, unique_indices=True)
    return ranks, counts[:num_experts]


def inverse(places: Int[Array, " R"], *, size: int) -> Int[Array, " S"]:
    """Return who stands at each of `size` places; the number of those asked where nobody does.

    Args:
        places: the place of each, `size` or more for one that stands nowhere; none is taken twice.
        size: number of places.
    """
    askers = jnp.arange(len(places), dtype=jnp.int32)
    return jnp.full(size, len(places), jnp.int32).at[places].set(askers, mode="drop")


@jax.custom_vjp
def moved(
    rows: Float[Array, "R D"], sources: Int[Array, " S"], places: Int[Array, "R J"]
) -> Float[Array, "S D"]:
    """Return the rows of `sources`, zeros where there is none.

    The gradient of a row is summed over the places it went to in their order and in float32, and is
    a gather like the way there: the same bits every time, which a scatter does not promise.

    Args:
        rows: what is moved.
        sources: the row that goes to each place; R or more for none.
        places: the places that each row goes to; S or more for none.
    """
    return rows.at[sources].get(mode="fill", fill_value=0)


def _moved_back(
    places: Int[Array, "R J"], grads: Float[Array, "S D"]
) -> tuple[Float[Array, "R D"], None, None]:
    gone = grads.at[places].get(mode="fill", fill_value=0)
    return gone.astype(jnp.float32).sum(axis=1).astype(grads.dtype), None, None


moved.defvjp(lambda rows, sources, places: (moved(rows, sources, places), places), _moved_back)


def outputs_here(
    rows: Float[Array, "R D"],
    experts: Int[Array, "R A"],
    kernels: Kernels | Kernels8Bit | KernelsBeside,
    product: Product | None = None,
) -> Float[Array, "R A D"]:
    """Return what each row's experts make of it, all of them on this device.

    Args:
        rows: tokens.
        experts: that each chose.
        kernels: of all experts; for products in fp8 also in squares already.
        product: format of the products; that of the rows by default.
    """
    num_experts = kernels[0].shape[0]
    tiles = tiles_of(experts.reshape(-1), num_experts=num_experts, most_choices=experts.size)
    out = swiglu(in_tiles(rows, tiles), kernels, tiles, product)
    return of_choices(out, tiles, experts)


@jax.named_scope(ROUTING)
def of_choices(
    outputs: Float[Array, "S D"], tiles: Tiles, experts: Int[Array, "R A"]
) -> Float[Array, "R A D"]:
    """Return what stands in the tiles, choice by choice."""
    picked = moved(outputs, tiles.slot_of_choice, tiles.choice_of_slot[:, None])
    return picked.reshape(*experts.shape, -1)


def outputs_of_all(
    rows: Float[Array, "R D"],
    experts: Int[Array, "R A"],
    kernels: Kernels,
    product: Product | None = None,
) -> Float[Array, "R A D"]:
    """Return what each row's experts make of it, every expert having multiplied every row.

    For few rows that touch most experts: nothing is sorted or moved, and each matrix is read once,
    as it lies.
    """
    gate, up, down = kernels
    rows_ERD = jnp.broadcast_to(rows[None], (len(gate), *rows.shape))
    one = partial(batched_product, product=product)
    hidden = nnx.silu(one(rows_ERD, gate)) * one(rows_ERD, up)
    out_ERD = one(hidden, down)
    return out_ERD[experts, jnp.arange(len(rows))[:, None]]


def outputs_of_8_bit(
    rows: Float[Array, "R D"],
    experts: Int[Array, "R A"],
    kernels: Kernels8Bit,
    *,
    in_fp8: bool = False,
) -> Float[Array, "R A D"]:
    """Return what each row's experts make of it, their matrices kept in 8 bits.

    So few rows that one tile holds them all meet every expert that one of them chose; the others
    are not read. More stand in tiles of one expert's rows. Either way matrices are widened as they
    are read; where there is no kernel for that, rows in tiles have all of them widened before.

    Args:
        rows: tokens.
        experts: that each chose.
        kernels: of all experts, transposed.
        in_fp8: whether what they multiply is in 8 bits too; then many rows need nothing widened.
    """
    num_experts = len(kernels[0].values)
    tile_rows = rows_of_tiles(experts.size, num_experts=num_experts)
    if len(rows) <= tile_rows:
        chosen = jnp.zeros(num_experts, bool).at[experts].set(True)
        matrices = jnp.where(chosen, jnp.arange(num_experts), -1)
        out_ERD = widened_swiglu(rows, kernels, matrices, in_fp8=in_fp8)
        return out_ERD[experts, jnp.arange(len(rows))[:, None]]
    tiles = tiles_of(
        experts.reshape(-1),
        num_experts=num_experts,
        most_choices=experts.size,
        tile_rows=tile_rows,
    )
    rows_PMD = in_tiles(rows, tiles).reshape(-1, tile_rows, rows.shape[1])
    many_in_fp8 = in_fp8 and len(rows) > TILE_ROWS
    if many_in_fp8 or not has_kernel(rows_PMD, kernels[0], num_tiles=len(rows_PMD)):
        gate, up, down = (kernel.mT for kernel in kernels)
        if in_fp8:
            return outputs_here(rows, experts, (gate, up, down), "fp8")
        gate, up, down = (kernel.dequantize(rows.dtype) for kernel in (gate, up, down))
        return outputs_here(rows, experts, (gate, up, down))
    in_use = jnp.arange(len(rows_PMD)) < tiles.rows_of_expert.sum() // tile_rows
    matrices = jnp.where(in_use, tiles.expert_of_tile, -1)
    out_PMD = widened_swiglu(rows_PMD, kernels, matrices, in_fp8=in_fp8)
    return of_choices(out_PMD.reshape(-1, rows.shape[1]), tiles, experts)


def rows_of_tiles(num_choices: int, *, num_experts: int) -> int:
    """Return rows for tiles: twice what an expert has on average, as a program reads all of them.

    What it reads and multiplies of a tile is whole, and weights of an expert with more rows than a
    tile are read once more.
    """
    wanted = -(-2 * num_choices // num_experts)
    return min(max(16, 1 << max(wanted - 1, 0).bit_length()), TILE_ROWS)


def widened_swiglu(
    rows: Float[Array, "*tiles M D"],
    kernels: Kernels8Bit,
    matrices: Int[Array, " P"],
    *,
    in_fp8: bool = False,
) -> Float[Array, "P M D"]:
    """Return what the expert of each tile makes of its rows, or of the rows that all have.

    Args:
        rows: of each tile, or of all.
        kernels: transposed.
        matrices: the expert of each tile; -1 for none.
        in_fp8: whether what is multiplied is rounded to 8 bits first.
    """

    def one(rows: jax.Array, kernel: Quantized) -> jax.Array:
        operand = rounded(rows, format=ACTIVATION) if in_fp8 else rows
        return widened_matmul(operand, kernel, matrices=matrices)

    gate, up, down = kernels
    return one(nnx.silu(one(rows, gate)) * one(rows, up), down)


def touches_most(num_rows: int, num_choices: int, *, num_experts: int) -> bool:
    """Return whether rows are few, and touch so many experts that reading all of them is faster."""
    share = 1.0 - (1.0 - num_choices / num_experts) ** num_rows
    return num_rows <= TILE_ROWS and share >= LEAST_SHARE


def batched_product(
    rows: Float[Array, "E R K"], kernels: Float[Array, "E K N"], *, product: Product | None = None
) -> Float[Array, "E R N"]:
    """Return each expert's product with its rows; sums are float32."""
    dtype = rows.dtype
    if product == "fp8":
        rows, kernels = rounded(rows, format=ACTIVATION), rounded(kernels, format=WEIGHT)
    elif product is not None:
        rows, kernels = rows.astype(product), kernels.astype(product)
    full = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    out = jnp.matmul(rows, kernels, precision=full, preferred_element_type=jnp.float32)
    return out.astype(dtype)


@jax.named_scope(ROUTING)
def in_tiles(rows: Float[Array, "R D"], tiles: Tiles) -> Float[Array, "S D"]:
    """Return a copy of each row for each of its choices, at its place in the tiles."""
    places = tiles.slot_of_choice.reshape(len(rows), -1)
    return moved(rows, tiles.choice_of_slot // places.shape[1], places)


def swiglu(
    rows: Float[Array, "S D"],
    kernels: Kernels | Kernels8Bit | KernelsBeside,
    tiles: Tiles,
    product: Product | None = None,
) -> Float[Array, "S D"]:
    """Return what each tile's expert makes of its rows."""
    gate, up, down = kernels
    one = partial(tile_product, tiles=tiles, product=product)
    return one(nnx.silu(one(rows, gate)) * one(rows, up), down)


def tile_product(
    rows: Float[Array, "S K"],
    kernels: Float[Array, "E K N"] | Quantized | Beside,
    tiles: Tiles,
    product: Product | None = None,
) -> Float[Array, "S N"]:
    """Return each row times its expert's matrix; rows behind the last tile in use hold anything."""
    own = "bfloat16" if rows.dtype == jnp.bfloat16 else "float32"
    w, quantized = kernels if isinstance(kernels, Beside) else (kernels, None)
    return grouped_matmul(
        rows,
        w,
        quantized=quantized,
        group_sizes=tiles.rows_of_expert,
        precision=product or own,
        in_tiles=True,
    )
