"""Block-scaled 8-bit floating point: the formats, and the arrays that carry theirs with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 128

Element = Literal["e4m3", "e5m2"]
ScaleKind = Literal["float32", "power_of_two"]

ELEMENTS: dict[Element, jnp.dtype] = {
    "e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "e5m2": jnp.dtype(jnp.float8_e5m2),
}
BLOCKS: tuple[tuple[int, int], ...] = ((1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK))


class FormatError(ValueError):
    """Two operands, or an operand and an op, disagree about the number format."""


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: the element type, and which elements share a scale.

    Attributes:
        block: (rows, columns) that share one scale.
        scale: "power_of_two" scales change only the exponent, so requantising is lossless and
            hardware that keeps 8-bit exponents reads them; "float32" uses the whole range.
    """

    block: tuple[int, int]
    element: Element = "e4m3"
    scale: ScaleKind = "float32"

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise FormatError(f"block={self.block} is not a block shape. Use one of {BLOCKS}.")
        if self.element not in ELEMENTS:
            raise FormatError(f"element={self.element!r} is unknown. Use one of {[*ELEMENTS]}.")
        if self.scale not in ("float32", "power_of_two"):
            raise FormatError(f"scale={self.scale!r} is unknown. Use 'float32' or 'power_of_two'.")

    @property
    def dtype(self) -> jnp.dtype:
        """The JAX dtype of the stored elements."""
        return ELEMENTS[self.element]

    @property
    def largest(self) -> float:
        """The largest finite element: what a block's largest magnitude is scaled to."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def transposed(self) -> "Format":
        """The format of the transposed matrix."""
        rows, columns = self.block
        return Format(block=(columns, rows), element=self.element, scale=self.scale)

    def padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` with its last two dims rounded up to whole blocks."""
        rows, columns = (round_up(n, b) for n, b in zip(shape[-2:], self.block, strict=True))
        return (*shape[:-2], rows, columns)

    def num_blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a matrix of `shape`: one for each block, partial ones too."""
        *leading, rows, columns = self.padded(shape)
        return (*leading, rows // self.block[0], columns // self.block[1])

    def __str__(self) -> str:
        rows, columns = self.block
        return f"{self.element} {rows}x{columns} {self.scale}"


# DeepSeek-V3, section 3.3: activations and gradients one row at a time, weights in squares.
ACTIVATION = Format(block=(1, BLOCK))
WEIGHT = Format(block=(BLOCK, BLOCK))


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Quantized:
    """A matrix, or a stack of them, in a block-scaled format; a pytree of two arrays or three.

    Element (i, j) is `values[..., i, j] * scales[..., i // block[0], j // block[1]]`. `values`
    is stored padded with zeros to whole blocks, so that no product pads it again.

    Attributes:
        values: elements, [..., rows rounded up, columns rounded up].
        scales: one float32 for each block, finite and positive.
        rows: rows that hold data.
        columns: columns that hold data.
        turned: elements of the transpose as they lie in memory, where they were made beside; a
            product that reads the transpose copies nothing then.
    """

    values: Float[Array, "*stack padded_rows padded_columns"]
    scales: Float[Array, "*stack block_rows block_columns"]
    rows: int
    columns: int
    format: Format
    turned: Float[Array, "*stack padded_columns padded_rows"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for, without padding."""
        return (*self.values.shape[:-2], self.rows, self.columns)

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[object, object], ...], tuple[int, int, Format]]:
        """The arrays under their names; the rest is static."""
        names = ("values", "scales", "turned")
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names)
        return children, (self.rows, self.columns, self.format)

    @classmethod
    def tree_unflatten(
        cls, static: tuple[int, int, Format], children: Sequence[object]
    ) -> "Quantized":
        """Rebuild without checks: JAX also builds trees of shardings, shapes and placeholders."""
        self = object.__new__(cls)
        names = ("values", "scales", "turned", "rows", "columns", "format")
        for name, value in zip(names, (*children, *static), strict=True):
            object.__setattr__(self, name, value)
        return self

    @property
    def mT(self) -> "Quantized":
        """The transposed matrix, in the transposed format; no requantising."""
        return Quantized(
            values=self.values.mT if self.turned is None else self.turned,
            scales=self.scales.mT,
            rows=self.columns,
            columns=self.rows,
            format=self.format.transposed,
            turned=None if self.turned is None else self.values,
        )

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """The matrix as `dtype`, without padding."""
        block_rows, block_columns = self.format.block
        scales = jnp.repeat(jnp.repeat(self.scales, block_rows, -2), block_columns, -1)
        # XLA may skip the rounding where it sees a conversion to 8 bits and back (its "excess
        # precision"); results would then depend on what is compiled together.
        values = jax.lax.optimization_barrier(self.values)
        full = values.astype(jnp.float32) * scales
        return full[..., : self.rows, : self.columns].astype(dtype)


def check_quantized(name: str, array: Quantized) -> None:
    """Raise FormatError if the parts of `array` contradict each other."""
    if array.values.dtype != array.format.dtype:
        raise FormatError(
            f"{name} holds {array.values.dtype} but its format is {array.format}. "
            f"Build it with quantize(), or pass values of {array.format.dtype}."
        )
    want = array.format.padded(array.shape), array.format.num_blocks(array.shape)
    have = array.values.shape, array.scales.shape
    if want != have:
        raise FormatError(
            f"{name} has values {have[0]} and scales {have[1]}; {array.format} of a "
            f"{array.shape} matrix has values {want[0]} and scales {want[1]}."
        )
    if array.scales.dtype != jnp.float32:
        raise FormatError(f"{name} has scales of {array.scales.dtype}; they must be float32.")


def check_same_scale_kind(a: Quantized, b: Quantized) -> None:
    """Raise FormatError unless both operands use the same kind of scale."""
    if a.format.scale != b.format.scale:
        raise FormatError(
            f"operands mix scale kinds: {a.format} and {b.format}. A backend that reads "
            "exponents only would round one of them silently; quantise both the same way."
        )
