"""What an operand would lose in fp8: sizes of blocks, what underflows, channels that stand out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.formats import Format
from pallas_kernels.quantize import quantize

Operand = Literal["input", "weight", "output gradient"]

# Largest magnitudes of blocks are counted by exponent: 2^-48 and less, …, 2^23 and more.
FIRST_EXPONENT, NUM_EXPONENTS = -48, 72
# A channel stands out if its largest magnitude is this many times the median channel's. The scale
# of a block that holds it takes log2(16) = 4 of e4m3's 15 normal binades from its neighbours.
OUTLIER = 16.0


class Sums(NamedTuple):
    """Counts of one operand of a product, float32; of a stack of layers with a leading dim.

    Attributes:
        blocks: by exponent of their largest magnitude, blocks of zeros left out.
        elements: of the matrix.
        nonzero: elements that are finite and not zero.
        underflows: of these, those that are zero in fp8.
        at_largest: elements that the format's largest magnitude stands for.
        not_finite: elements.
        relative_error: of the matrix in fp8, in the Euclidean norm.
        channels: largest finite magnitude of each.
    """

    blocks: Float[Array, "*L exponents"]
    elements: Float[Array, "*L"]
    nonzero: Float[Array, "*L"]
    underflows: Float[Array, "*L"]
    at_largest: Float[Array, "*L"]
    not_finite: Float[Array, "*L"]
    relative_error: Float[Array, "*L"]
    channels: Float[Array, "*L channels"]


def no_sums(num_layers: int, num_channels: int) -> Sums:
    """Return sums of nothing, for a stack of layers."""
    one = jnp.zeros(num_layers, jnp.float32)
    blocks = jnp.zeros((num_layers, NUM_EXPONENTS), jnp.float32)
    channels = jnp.zeros((num_layers, num_channels), jnp.float32)
    return Sums(blocks, one, one, one, one, one, one, channels)


def sums_of(x: Float[Array, "rows channels"], format: Format) -> Sums:
    """Return the counts of a matrix with its channels last, as `format` would store it."""
    x = x.astype(jnp.float32)
    kept = quantize(x, format=format)
    values = kept.values[: x.shape[0], : x.shape[1]].astype(jnp.float32)
    finite = jnp.isfinite(x)
    magnitude = jnp.where(finite, jnp.abs(x), 0.0)
    nonzero, channels = magnitude > 0, magnitude.max(axis=0)
    largest = channels.max(initial=0.0)
    # Of numbers of size 1: the squares of small gradients would underflow in float32.
    unit = jnp.where(largest > 0, largest, 1.0)
    lost = jnp.where(finite, kept.dequantize() - x, 0.0)
    norm = jnp.sqrt(jnp.square(magnitude / unit).sum())
    error = jnp.sqrt(jnp.square(lost / unit).sum()) / jnp.where(norm > 0, norm, 1.0)

    def count(is_one: jax.Array) -> jax.Array:
        return is_one.sum(dtype=jnp.float32)

    return Sums(
        blocks=blocks_by_exponent(magnitude, format),
        elements=jnp.asarray(x.size, jnp.float32),
        nonzero=count(nonzero),
        underflows=count(nonzero & (values == 0)),
        at_largest=count(jnp.abs(values) == format.largest),
        not_finite=count(~finite),
        relative_error=error,
        channels=channels,
    )


def blocks_by_exponent(
    magnitude: Float[Array, "rows channels"], format: Format
) -> Float[Array, " exponents"]:
    """Return how many blocks have a largest magnitude of each exponent; those of zeros in none."""
    widths = [
        (0, want - have)
        for have, want in zip(magnitude.shape, format.padded(magnitude.shape), strict=True)
    ]
    rows, columns = format.num_blocks(magnitude.shape)
    blocks = jnp.pad(magnitude, widths).reshape(rows, format.block[0], columns, format.block[1])
    largest = blocks.max(axis=(1, 3)).reshape(-1)
    exponent = jnp.frexp(largest)[1] - 1 - FIRST_EXPONENT
    place = jnp.clip(exponent, 0, NUM_EXPONENTS - 1)
    is_there = (place[:, None] == jnp.arange(NUM_EXPONENTS)[None, :]) & (largest > 0)[:, None]
    return is_there.sum(axis=0, dtype=jnp.float32)


def added(total: Sums | None, more: Sums) -> Sums:
    """Return the sums of several batches on the host: counts add up, magnitudes are the largest."""
    more = jax.tree.map(lambda a: np.asarray(a, np.float64), more)
    if total is None:
        return more
    both = jax.tree.map(np.add, total, more)
    return both._replace(channels=np.maximum(total.channels, more.channels))


class ExponentCount(NamedTuple):
    """Blocks whose largest magnitude is in [2^exponent, 2^(exponent + 1))."""

    exponent: int
    num_blocks: int


@dataclass(frozen=True)
class OperandNumbers:
    """One operand of an operation in one layer.

    Attributes:
        path: of the operation.
        layer: number of the layer in the model.
        operand: which one it is.
        largest: largest finite magnitude.
        underflow: share of the nonzero elements that are zero in fp8.
        at_largest: share of the elements that are the format's largest magnitude: one of each block
            is scaled to it, and nothing is ever beyond.
        not_finite: elements that are NaN or infinite.
        relative_error: of the matrix in fp8, in the Euclidean norm, a mean over batches.
        outlier_channels: channels whose largest magnitude is `OUTLIER` times the median channel's.
        outlier_ratio: largest channel over the median one; 0 where the median is 0.
        outlier: number of the largest channel.
        blocks: by the exponent of their largest magnitude, empty ones left out.
    """

    path: str
    layer: int
    operand: Operand
    largest: float
    underflow: float
    at_largest: float
    not_finite: int
    relative_error: float
    outlier_channels: int
    outlier_ratio: float
    outlier: int
    blocks: tuple[ExponentCount, ...]


def numbers_of(
    sums: Sums, *, path: str, layers: Sequence[int], operand: Operand, num_batches: int = 1
) -> list[OperandNumbers]:
    """Return the numbers of each layer of a stack.

    Args:
        sums: of all batches.
        path: of the operation.
        layers: numbers of the stack's layers in the model.
        operand: which one it is.
        num_batches: whose relative errors were added up.
    """
    found = []
    for row, layer in enumerate(layers):
        of_layer = jax.tree.map(lambda a, row=row: np.asarray(a)[row], sums)
        channels = of_layer.channels
        median, largest = float(np.median(channels)), float(channels.max(initial=0.0))
        counts = [(FIRST_EXPONENT + i, int(n)) for i, n in enumerate(of_layer.blocks) if n]
        found.append(
            OperandNumbers(
                path=path,
                layer=layer,
                operand=operand,
                largest=largest,
                underflow=float(of_layer.underflows) / max(float(of_layer.nonzero), 1.0),
                at_largest=float(of_layer.at_largest) / float(of_layer.elements),
                not_finite=int(of_layer.not_finite),
                relative_error=float(of_layer.relative_error) / num_batches,
                outlier_channels=int((channels > OUTLIER * median).sum()) if median else 0,
                outlier_ratio=largest / median if median else 0.0,
                outlier=int(channels.argmax()),
                blocks=tuple(ExponentCount(*each) for each in counts),
            )
        )
    return found


def spread(numbers: OperandNumbers) -> int:
    """Return how many binades lie between the smallest and the largest block."""
    exponents = [each.exponent for each in numbers.blocks]
    return max(exponents) - min(exponents) if exponents else 0
