"""Block-scaled fp8: element (i, j) is the stored number times scale[i // rows, j // columns].

The last block of a row or column may be cut; sizes are never guessed from the scales' shape. The
published name says `inv`, and the scale multiplies.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxfound.models.weights.layout import Stored

SCALE = "_scale_inv"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def read_dequantized(
    stored: Stored, scale: np.ndarray, *, block: tuple[int, int], start: int, stop: int
) -> np.ndarray:
    """Return the rows from `start` to `stop` as float32, read one row of blocks at a time.

    Args:
        stored: the matrix in fp8.
        scale: float32, one number a block.
        block: rows and columns of a block.
        start: first row.
        stop: row after the last.
    """
    out = np.empty((stop - start, stored.shape[1]), np.float32)
    row = start
    while row < stop:
        end = min((row // block[0] + 1) * block[0], stop)
        # In place, and a column's scale at a time: no second float32 copy of the strip.
        strip = out[row - start : end - start]
        strip[...] = stored.read(row, end)
        strip *= np.repeat(scale[row // block[0]], block[1])[None, : strip.shape[1]]
        row = end
    return out


class Quantized(NamedTuple):
    """A matrix in fp8 and the scale of each of its blocks."""

    values: np.ndarray
    scale: np.ndarray


def quantize(
    w: np.ndarray, *, block: tuple[int, int], earlier: np.ndarray | None = None
) -> Quantized:
    """Return a float32 matrix in fp8, each block scaled so that its largest element is 448.

    Args:
        w: the matrix.
        block: rows and columns of a block.
        earlier: scales that the matrix had in fp8 before. A block that they still give back bit
            by bit keeps its own, so that weights nobody changed go out as they came in.
    """
    values = np.empty(w.shape, E4M3)
    scale = np.empty(scale_shape(w.shape, block), np.float32)
    for i in range(scale.shape[0]):
        rows = slice(i * block[0], min((i + 1) * block[0], w.shape[0]))
        old = None if earlier is None else earlier[i]
        values[rows], scale[i] = _strip(w[rows], columns=block[1], earlier=old)
    return Quantized(values, scale)


def _strip(
    w: np.ndarray, *, columns: int, earlier: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return one row of blocks [rows, K] in fp8, and the scale of each block."""
    starts = np.arange(0, w.shape[1], columns)
    largest = np.maximum.reduceat(np.abs(w).max(axis=0), starts)
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    # A block of subnormal numbers would divide by zero.
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    if earlier is not None:
        back = _scaled(_divided(w, earlier, columns), earlier, columns)
        same = np.logical_and.reduceat((back.view(np.uint32) == w.view(np.uint32)).all(0), starts)
        scale = np.where(same, earlier, scale)
    return _divided(w, scale, columns), scale


def _divided(w: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """Return w / scale rounded to fp8, never above its largest number (which would be NaN)."""
    whole = np.where(scale == 0, np.float32(1), scale)
    ratio = w / _spread(whole, w, columns)
    return np.clip(ratio, -LARGEST, LARGEST).astype(E4M3)


def _scaled(values: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    return values.astype(np.float32) * _spread(scale, values, columns)


def _spread(scale: np.ndarray, like: np.ndarray, columns: int) -> np.ndarray:
    """Return the scale of each column of a strip, as a row."""
    return np.repeat(scale, columns)[None, : like.shape[1]]
