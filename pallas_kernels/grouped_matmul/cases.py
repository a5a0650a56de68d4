"""Sizes on which every backend of the grouped product is tested and timed."""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.formats import BLOCK
from pallas_kernels.grouped_matmul.layout import num_tiles
from pallas_kernels.hardware import Hardware

# The two products of the op: by rows forward and for the input, by inner dim for the weights.
Part = Literal["rows", "inner"]
OutDtype = Literal["bfloat16", "float32"]
Precision = Literal["float32", "bfloat16", "fp8"]


@dataclass(frozen=True)
class GroupedCase:
    """M rows in G groups, each group times its own [K, N] matrix.

    Attributes:
        out_dtype: of rows that come out.
        inner_dtype: of sums over rows, the gradients of matrices.
    """

    m: int
    n: int
    k: int
    num_groups: int
    precision: Precision
    hardware: Hardware
    out_dtype: OutDtype = "bfloat16"
    inner_dtype: OutDtype = "float32"

    @property
    def padded_flop_ratio(self) -> float:
        """Most FLOPs that any group sizes can cost, over FLOPs asked for."""
        if not self.m or not self.hardware.supports("float8"):
            return 1.0
        return num_tiles(self.m, self.num_groups, tile_rows=BLOCK) * BLOCK / self.m

    @property
    def flops(self) -> int:
        """Useful FLOPs if every row has a group."""
        return 2 * self.m * self.n * self.k


def make_case(m: int, n: int, k: int, num_groups: int, *, hardware: Hardware) -> GroupedCase:
    """The case of M, N, K and G in 8-bit on `hardware`."""
    return GroupedCase(m=m, n=n, k=k, num_groups=num_groups, precision="fp8", hardware=hardware)


# (group sizes, number of rows, N, K): empty groups at both ends and adjacent, one group with all
# rows, no rows at all, rows behind the groups, sizes around a tile.
TEST_CASES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((0, 4, 0, 0, 8, 0), 12, 40, 72),
    ((0, 4, 0, 0, 5, 0), 12, 40, 72),
    ((1, 0, 7, 63), 71, 72, 136),
    ((0, 0, 0, 0), 5, 8, 16),
    ((129,), 129, 40, 200),
    ((0, 127, 128, 1), 300, 136, 128),
)
# Tokens M, K, N of DeepSeek-V3's experts at 8 and 32 groups a device.
BENCH_SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (8192, 4096, 7168, 8),
    (8192, 4096, 7168, 32),
    (8192, 7168, 2048, 8),
)
