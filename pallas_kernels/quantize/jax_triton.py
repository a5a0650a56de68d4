"""Quantising in Triton: one read of a matrix gives its tiles, those of its transpose, or both.

XLA reads a matrix for the largest magnitudes, again for the elements, and writes its transpose in
float32 in between. Here a program holds 128 x 128 elements in registers, and only what is 8-bit
goes back. Any number of rows and columns: what lies behind an edge is read as zero. Scales leave
K first, as the products read them, so that no transpose of them is left in a program.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import sharded, triton
from pallas_kernels.formats import BLOCK, Format, Quantized
from pallas_kernels.quantize import kernels
from pallas_kernels.quantize.cases import SCOPE, QuantizeCase
from pallas_kernels.quantize.reference import SMALLEST_SCALE

# Warps of a program. The three tiles of a gate's gradient leave half as many too few registers
# for programs beside each other.
NUM_WARPS, GATE_NUM_WARPS = 4, 8
# Elements of a line that a thread holds: 16 of 8 bits are the widest store. With fewer the tile
# changes hands between threads before it is stored, which takes three times as long.
VECTOR = 16


def refuses(case: QuantizeCase) -> str | None:
    """Why the case is not for these kernels; None if it is."""
    hardware = case.hardware
    made = (BLOCK, BLOCK) if case.way == "squares" else (1, BLOCK)
    if case.format.block != made:
        return f"blocks of {case.format.block}: these kernels make tiles of 1x{BLOCK}"
    if case.format.scale != "float32":
        return f"scales are {case.format.scale}; these kernels make float32 ones"
    if case.rows < BLOCK or not case.columns:
        return (
            f"{case.rows} x {case.columns} fills no block of {BLOCK} rows; XLA rounds few of them "
            "in the kernel that makes them"
        )
    if hardware.platform == "cuda" and not hardware.supports("float8"):
        return f"{hardware.kind} is {hardware.architecture}, which has no casts to 8-bit floats"
    return triton.refuses(hardware) or sharded.refuses_mesh()


def run(
    x: Float[Array, "*stack rows columns"] | Quantized | tuple[Array, ...], *, case: QuantizeCase
) -> Any:
    """Return what the case asks for; sharded operands stay where they are."""
    if isinstance(x, tuple):
        return _of_swiglu(case, *x)
    if isinstance(x, Quantized):
        call = sharded.batched(partial(_partitioned, kernels.requantized, case), stacked=())
        turned, turned_scales = call(x.values, x.scales.mT)
        return _of(turned, turned_scales.mT, case, rows=x.columns, columns=x.rows)
    rows, columns = x.shape[-2:]
    if case.way == "squares":
        values, scales, turned = sharded.batched(partial(_squares, case), stacked=(0,))(x)
        return replace(_of(values, scales, case, rows=rows, columns=columns), turned=turned)
    if case.way == "plain":
        values, scales = sharded.batched(partial(_plain, case), stacked=(0,))(x)
        return _of(values, scales, case, rows=rows, columns=columns)
    call = sharded.batched(partial(_partitioned, kernels.quantized_both, case), stacked=())
    return _pair(case, *call(x))


def _pair(
    case: QuantizeCase, values: Array, scales: Array, turned: Array, turned_scales: Array
) -> tuple[Quantized, Quantized]:
    """A matrix and its transpose, of what a kernel leaves."""
    rows, columns = case.rows, case.columns
    return (
        _of(values, scales.mT, case, rows=rows, columns=columns),
        _of(turned, turned_scales.mT, case, rows=columns, columns=rows),
    )


@jax.named_scope(SCOPE)
def _of_swiglu(case: QuantizeCase, *operands: Array) -> Any:
    """Rounded both ways: SwiGLU of gate and up, or with a gradient, the gradients of both."""
    sizes = _Sizes(case.rows, case.columns, case.format)
    both = (*sizes.plain, *sizes.turned)
    rounded = lambda source, *of: _pair(case, *_call(source, case, sizes, of, both))
    if case.way == "swiglu":
        return rounded(kernels.swiglu_both, *operands)
    # A kernel each: one of both has no registers left to hide the memory's latency.
    gate, up, grad = operands
    of_gate = rounded(kernels.gate_gradient_both, gate, up, grad)
    return of_gate, rounded(kernels.up_gradient_both, gate, grad)


def _call(
    source: Callable[..., None],
    case: QuantizeCase,
    sizes: "_Sizes",
    operands: tuple[Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> tuple[Array, ...]:
    """Run a kernel on a device's matrices, the first of which says how columns are stored."""
    num_warps = GATE_NUM_WARPS if source is kernels.gate_gradient_both else NUM_WARPS
    return triton.call(
        source,
        *operands,
        out_shape=results,
        grid=(sizes.column_blocks, sizes.row_blocks),
        num_warps=num_warps,
        num_stages=1,
        hardware=case.hardware,
        uses=kernels.USES,
        ROWS=sizes.rows,
        COLUMNS=sizes.columns,
        STORED_COLUMNS=operands[0].shape[-1],
        LARGEST=case.format.largest,
        SMALLEST_SCALE=SMALLEST_SCALE,
        BLOCK=BLOCK,
        # How many lines of a tile all threads hold at once; a thread's own are so far apart.
        APART=num_warps * 32 * VECTOR // BLOCK,
    )


def _squares(
    case: QuantizeCase, x: Float[Array, "*stack rows columns"]
) -> tuple[Array, Array, Array]:
    """Elements, scales and the elements of the transpose, of matrices that may be sharded."""
    stack = sharded.STACK_LETTERS[: x.ndim - 2]
    k, many_k, cut_k = ("o", "O", "k") if case.columns % BLOCK else ("k", "K", "")
    m, many_m, cut_m = ("p", "P", "m") if case.rows % BLOCK else ("m", "M", "")
    rule = sharded.ShardRule(
        (f"{stack}mk",),
        (f"{stack}{m}{k}", f"{stack}{many_m}{many_k}", f"{stack}{k}{m}"),
        {"K": ("k", BLOCK), "M": ("m", BLOCK)},
        whole=cut_k + cut_m,
    )
    return sharded.partitioned(partial(_launch_squares, case), rule)(x)


@jax.named_scope(SCOPE)
def _launch_squares(case: QuantizeCase, x: Array) -> tuple[Array, Array, Array]:
    """Run the kernel on the matrices that one device has."""
    *stack, rows, columns = x.shape
    height, width = -(-rows // BLOCK), -(-columns // BLOCK)
    values = (*stack, height * BLOCK, width * BLOCK)
    shapes = values, (*stack, height, width), (*values[:-2], values[-1], values[-2])
    dtypes = case.format.dtype, jnp.float32, case.format.dtype
    values, scales, turned = triton.call(
        kernels.squares,
        x,
        out_shape=[jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)],
        grid=(width, height, math.prod(stack)),
        num_warps=NUM_WARPS,
        num_stages=1,
        hardware=case.hardware,
        uses=kernels.USES,
        ROWS=rows,
        COLUMNS=columns,
        STORED_COLUMNS=columns,
        LARGEST=case.format.largest,
        SMALLEST_SCALE=SMALLEST_SCALE,
        BLOCK=BLOCK,
        APART=NUM_WARPS * 32 * VECTOR // BLOCK,
        IS_NARROWED=case.is_narrowed and x.dtype != jnp.bfloat16,
    )
    return values, scales, turned


def _plain(case: QuantizeCase, x: Float[Array, "*stack rows columns"]) -> tuple[Array, Array]:
    """Elements, and scales as `Quantized` holds them."""
    values, scales = _partitioned(kernels.quantized, case, x)
    return values, jnp.moveaxis(scales, 0, -1)


def _of(values: Array, scales: Array, case: QuantizeCase, *, rows: int, columns: int) -> Quantized:
    return Quantized(values, scales, rows=rows, columns=columns, format=case.format)


def _partitioned(source: Callable[..., None], case: QuantizeCase, *operands: Array) -> Any:
    """The kernel on arrays that may be sharded: which of its dims are the same."""
    stack = sharded.STACK_LETTERS[: operands[0].ndim - 2]
    # A dim that is padded or cropped is another one in the result, and must be whole.
    k, many_k = ("o", "O") if case.columns % BLOCK else ("k", "K")
    m, many_m = ("p", "P") if case.rows % BLOCK else ("m", "M")
    plain = (f"{stack}m{k}", f"{many_k}{stack}m")
    whole = "k" if case.columns % BLOCK else ""
    if source is kernels.quantized:
        rule = sharded.ShardRule((f"{stack}mk",), plain, {"K": ("k", BLOCK)}, whole=whole)
        return sharded.partitioned(partial(_launch, source, case), rule)(*operands)
    blocks = {"K": ("k", BLOCK), "M": ("m", BLOCK)}
    whole += "m" if case.rows % BLOCK else ""
    taken, turned = ("mk",), (f"k{m}", f"{many_m}k")
    given = (*plain, *turned)
    if source is kernels.requantized:
        taken, given = ("mk", "Km"), (f"{k}{m}", f"{many_m}{k}")
    rule = sharded.ShardRule(taken, given, blocks, whole=whole)
    return sharded.partitioned(partial(_launch, source, case), rule)(*operands)


@jax.named_scope(SCOPE)
def _launch(source: Callable[..., None], case: QuantizeCase, *operands: Array) -> Any:
    """Run a kernel on what one device has.

    Args:
        operands: the matrix [*stack, rows, columns]; of one in 8-bit its elements, and its scales
            [blocks of columns, rows].
    """
    *stack, _, stored_columns = operands[0].shape
    matrix = operands[0].reshape(-1, stored_columns)
    # Elements in 8-bit are stored padded; a device's part has as many columns as it has.
    columns = min(stored_columns, case.columns) if source is kernels.requantized else stored_columns
    sizes = _Sizes(len(matrix), columns, case.format)
    results = {
        kernels.quantized: sizes.plain,
        kernels.quantized_both: (*sizes.plain, *sizes.turned),
        kernels.requantized: sizes.turned,
    }[source]
    found = _call(source, case, sizes, (matrix, *operands[1:]), results)
    if source is kernels.requantized:
        return found
    values, scales, *turned = found
    stacked = values.reshape(*stack, -1, values.shape[-1])
    return stacked, scales.reshape(len(scales), *stack, -1), *turned


class _Sizes(NamedTuple):
    """Of a matrix, and of what comes of it.

    Attributes:
        plain: its elements, and its scales with blocks of columns first.
        turned: elements of its transpose, and their scales with blocks of rows first.
    """

    rows: int
    columns: int
    format: Format

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // BLOCK)

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // BLOCK)

    @property
    def plain(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return self._pair(self.rows, self.column_blocks)

    @property
    def turned(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return self._pair(self.columns, self.row_blocks)

    def _pair(
        self, rows: int, num_blocks: int
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        values = jax.ShapeDtypeStruct((rows, num_blocks * BLOCK), self.format.dtype)
        return values, jax.ShapeDtypeStruct((num_blocks, rows), jnp.float32)
