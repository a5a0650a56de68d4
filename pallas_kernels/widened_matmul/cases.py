"""Sizes on which every backend of the product with widened weights is tested and timed."""

from dataclasses import dataclass

from pallas_kernels.formats import BLOCK, Element, round_up
from pallas_kernels.hardware import Hardware

# Most rows whose sums a program of the Triton kernel holds.
FEW_ROWS = 128
# As many products fill a card whatever the tile; more are tuned as these.
MANY_PRODUCTS = 64


@dataclass(frozen=True)
class WidenedCase:
    """Y [P, M, N] = X [P, M, K] · W [P, N, K]ᵀ, W in 8-bit squares of 128x128.

    Attributes:
        p: products; what they read of W counts as if no two had the same matrix.
        shared: every matrix multiplies the same X [M, K].
        dtype: of X and Y.
        element: of W.
    """

    p: int
    m: int
    n: int
    k: int
    hardware: Hardware
    shared: bool = False
    dtype: str = "bfloat16"
    element: Element = "e4m3"

    @property
    def padded_flop_ratio(self) -> float:
        """FLOPs of whole blocks of weights over FLOPs asked for; 1.0 = nothing wasted."""
        asked = self.n * self.k
        return round_up(self.n, BLOCK) * round_up(self.k, BLOCK) / asked if asked else 1.0

    @property
    def flops(self) -> int:
        """Useful FLOPs."""
        return 2 * self.p * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written once: weights, their scales, rows and results."""
        weights = self.n * self.k + 4 * -(-self.n // BLOCK) * -(-self.k // BLOCK)
        rows = self.m * self.k * (1 if self.shared else self.p)
        return self.p * weights + 2 * (rows + self.p * self.m * self.n)


def make_case(p: int, m: int, n: int, k: int, *, hardware: Hardware) -> WidenedCase:
    """The case of P matrices [N, K] times the same M rows."""
    return WidenedCase(p=p, m=m, n=n, k=k, hardware=hardware, shared=True)


def tuning_key(case: WidenedCase) -> str:
    """The key of a product in tuning tables.

    Rows and products by powers of two, as they vary by step, and products up to `MANY_PRODUCTS`.
    """
    rows, products = (1 << max(size - 1, 0).bit_length() for size in (case.m, case.p))
    return f"p{min(products, MANY_PRODUCTS)}_m{rows}_n{case.n}_k{case.k}"


# Matrices, rows, N, K: one row and many, edges in every dim, one matrix and several.
TEST_SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (1, 1, 1, 1),
    (1, 7, 576, 2048),
    (3, 16, 200, 130),
    (2, 64, 129, 257),
    (4, 128, 128, 384),
    (1, 0, 64, 128),
    (0, 4, 64, 128),
)
# Experts of DeepSeek-V2-Lite and one of its linear layers, with the rows of a decoding step.
BENCH_SHAPES: tuple[tuple[int, int, int, int], ...] = tuple(
    (e, m, n, k)
    for m in (16, 64)
    for e, n, k in ((64, 1408, 2048), (64, 2048, 1408), (1, 3072, 2048))
)
