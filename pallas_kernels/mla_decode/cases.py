"""Sizes on which every backend of MLA decode is tested and timed."""

from dataclasses import dataclass

from pallas_kernels.hardware import Hardware
from pallas_kernels.sharded import ShardRule

LATENT = 512
ROPE = 64
PAGE = 64
# Of q [B, T, N, C + R], cache, table and lengths: sequences and heads may be cut over devices.
SHARD_RULE = ShardRule(operands=("btnc", "pso", "bm", "b"), results=("btnl", "btn"), whole="tcpsom")


@dataclass(frozen=True)
class MlaCase:
    """B sequences of T query tokens, N heads, over pages of a latent cache.

    Attributes:
        max_tokens: tokens that the block table has room for, per sequence.
    """

    batch: int
    num_queries: int
    num_heads: int
    latent: int
    rope: int
    page: int
    max_tokens: int
    cache_dtype: str
    hardware: Hardware

    @property
    def padded_flop_ratio(self) -> float:
        """FLOPs of whole 64-row blocks over FLOPs asked for, lengths apart."""
        rows = self.num_queries * self.num_heads
        if not rows or not self.hardware.supports("bfloat16") or self.hardware.platform == "cpu":
            return 1.0
        return -(-rows // 64) * 64 / rows

    def flops(self, num_tokens: int) -> int:
        """Useful FLOPs if the lengths of the batch sum to `num_tokens`."""
        width = 2 * self.latent + self.rope
        return 2 * self.num_queries * self.num_heads * width * num_tokens

    def bytes_moved(self, num_tokens: int) -> int:
        """Bytes read and written once: cache, queries and result."""
        rows = self.batch * self.num_queries * self.num_heads
        return 2 * (num_tokens * (self.latent + self.rope) + rows * (2 * self.latent + self.rope))


def make_case(
    batch: int, num_heads: int, max_tokens: int, num_queries: int = 1, *, hardware: Hardware
) -> MlaCase:
    """The case of B, N, S and T with DeepSeek-V3's cache on `hardware`."""
    return MlaCase(
        batch=batch,
        num_queries=num_queries,
        num_heads=num_heads,
        latent=LATENT,
        rope=ROPE,
        page=PAGE,
        max_tokens=max_tokens,
        cache_dtype="bfloat16",
        hardware=hardware,
    )


# FlashMLA's grid of dense decode, for the card.
GRID_BATCH: tuple[int, ...] = (1, 2, 6, 64)
GRID_QUERIES: tuple[int, ...] = (1, 2, 4)
GRID_TOKENS: tuple[int, ...] = (20, 140, 4096)
GRID_HEADS: tuple[int, ...] = (1, 3, 9, 16, 63, 64, 126, 128)
# (B, S) of the timings, with 128 heads; and heads at (64, 4096).
BENCH_SHAPES: tuple[tuple[int, int, int], ...] = (
    (16, 4096, 128),
    (64, 4096, 128),
    (128, 4096, 128),
    (64, 16384, 128),
    (128, 16384, 128),
    (64, 4096, 16),
    (64, 4096, 64),
)
