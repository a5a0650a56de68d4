"""Sizes on which every backend of the block-scaled product is tested and timed."""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.formats import BLOCK, Element, round_up
from pallas_kernels.hardware import Hardware

OutDtype = Literal["bfloat16", "float32"]


# Largest M whose accumulator and partial product fit the registers as wgmma's right operand.
FEW_ROWS = 128
# Weight rows that tiles are made of.
WEIGHT_ROWS = 64


def tuning_key(m: int, n: int, k: int) -> str:
    """The tuning table's key of a product.

    M by powers of two, because it varies from step to step; N and K by the 64 rows and the block
    that a kernel works on, so that an odd size takes the tile of the whole one.
    """
    rows = 1 << max(m - 1, 0).bit_length()
    return f"m{rows}_n{round_up(n, WEIGHT_ROWS)}_k{round_up(k, BLOCK)}"


@dataclass(frozen=True)
class MatmulCase:
    """D [M, N] = A [M, K] · B [N, K]ᵀ.

    Attributes:
        b_block_rows: 128 for weights in squares, 1 for the weight gradient's operand.
    """

    m: int
    n: int
    k: int
    b_block_rows: int
    out_dtype: OutDtype
    hardware: Hardware
    a_element: Element = "e4m3"
    b_element: Element = "e4m3"

    @property
    def padded_flop_ratio(self) -> float:
        """FLOPs of whole hardware tiles over FLOPs asked for; 1.0 = nothing wasted."""
        asked = self.m * self.n * self.k
        if not asked or not self.hardware.supports("float8"):
            return 1.0
        m, n, k = self.hardware.alignment["float8"]
        if self.few_rows:
            m, n = n, m
        return round_up(self.m, m) * round_up(self.n, n) * round_up(self.k, k) / asked

    @property
    def few_rows(self) -> bool:
        """True where weights are worth the wide side of the matrix unit, tokens the narrow one."""
        return self.m <= FEW_ROWS and self.b_block_rows > 1

    @property
    def flops(self) -> int:
        """Useful FLOPs."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written once: operands, scales and result."""
        k_blocks = -(-self.k // BLOCK)
        scales = 4 * k_blocks * (self.m + -(-self.n // self.b_block_rows))
        out_bytes = 2 if self.out_dtype == "bfloat16" else 4
        return (self.m + self.n) * self.k + scales + out_bytes * self.m * self.n


def make_case(m: int, n: int, k: int, *, hardware: Hardware) -> MatmulCase:
    """The case of M, N, K with square weight blocks and bfloat16 out."""
    return MatmulCase(m=m, n=n, k=k, b_block_rows=BLOCK, out_dtype="bfloat16", hardware=hardware)


# Every residue that matters: empty, one, under a tile, one off a tile, DeepSeek's odd widths.
ODD_SIZES: tuple[int, ...] = (0, 1, 7, 13, 127, 129, 576, 1152, 4097)

# At most 32 tile-steps each, so that the GPU interpreter runs one in seconds.
INTERPRETER_SHAPES: tuple[tuple[int, int, int], ...] = (
    (192, 128, 128),
    (192, 128, 512),
    (200, 136, 300),
    (7, 13, 129),
    (384, 256, 256),
)
DECODE_INTERPRETER_SHAPES: tuple[tuple[int, int, int], ...] = (
    (8, 128, 512),
    (1, 64, 128),
    (13, 200, 300),
    (64, 128, 256),
)

# (N, K) of DeepSeek-V3's layers, the list by which block-scaled GEMMs are compared.
BENCH_NK: tuple[tuple[int, int], ...] = (
    (2112, 7168),
    (576, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
)
BENCH_M: tuple[int, ...] = (64, 128, 4096, 8192)
# Products of training with 16,384 tokens: layers of 2560 x 6912, and of 4096 x 14336. The largest
# K are of gradients that sum over several matrices of one input.
TRAINING_SIZES: tuple[tuple[int, int, int], ...] = (
    (16384, 2560, 2560),
    (16384, 6912, 2560),
    (16384, 2560, 6912),
    (16384, 2560, 7680),
    (16384, 2560, 13824),
    (16384, 4096, 4096),
    (16384, 14336, 4096),
    (16384, 4096, 14336),
    (16384, 1024, 4096),
    (16384, 4096, 6144),
    (16384, 4096, 28672),
)
WGRAD_SIZES: tuple[tuple[int, int, int], ...] = (
    (2560, 2560, 16384),
    (2560, 6912, 16384),
    (6912, 2560, 16384),
    (4096, 4096, 16384),
    (4096, 14336, 16384),
    (14336, 4096, 16384),
    (4096, 1024, 16384),
)
# (odd, the next multiple of 64, 8, 128).
BENCH_ODD: tuple[tuple[tuple[int, int, int], tuple[int, int, int]], ...] = (
    ((4033, 4096, 7168), (4096, 4096, 7168)),
    ((4096, 4089, 7168), (4096, 4096, 7168)),
    ((4096, 4096, 7041), (4096, 4096, 7168)),
    ((61, 4096, 7168), (64, 4096, 7168)),
    ((64, 4089, 7168), (64, 4096, 7168)),
    ((64, 4096, 7041), (64, 4096, 7168)),
)
