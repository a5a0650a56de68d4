"""Sizes on which every backend of attention is tested and timed, and how far off it may be."""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.formats import round_up
from pallas_kernels.hardware import Hardware

DType = Literal["bfloat16", "float16", "float32"]
# "runs": in each row every segment is one run, in rising order, and padding is last. "checked": so
# it is, and who calls has made sure of it.
Segments = Literal["none", "runs", "checked", "any"]

# (H, V) that cuDNN multiplies as they are although V is narrower.
NATIVE_NARROW: frozenset[tuple[int, int]] = frozenset({(192, 128)})
# cuDNN's head dims are whole 16-byte rows of 2-byte elements.
HEAD_ALIGN = 8


@dataclass(frozen=True)
class AttentionCase:
    """Queries [B, T, N, H] over keys [B, S, K, H] and values [B, S, K, V].

    Attributes:
        max_segments: most segments a row may hold on the path for runs.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: DType
    causal: bool
    segments: Segments
    hardware: Hardware
    max_segments: int = 1

    @property
    def in_runs(self) -> bool:
        """True where documents are found by offsets, checked or not."""
        return self.segments in ("runs", "checked")

    @property
    def kernel_dims(self) -> tuple[int, int]:
        """(H, V) after padding for cuDNN.

        Runs are found by one offset for keys and values, so these must be equally wide there.
        """
        h, v = round_up(self.head_dim, HEAD_ALIGN), round_up(self.value_dim, HEAD_ALIGN)
        by_offset = self.in_runs and self.max_segments > 1
        if not by_offset and (h, v) in NATIVE_NARROW:
            return h, v
        return max(h, v), max(h, v)

    @property
    def padded_flop_ratio(self) -> float:
        """FLOPs on padded head dims over FLOPs asked for; 1.0 = nothing wasted."""
        asked = self.head_dim + self.value_dim
        if not asked or self.hardware.platform != "cuda":
            return 1.0
        return sum(self.kernel_dims) / asked

    @property
    def flops(self) -> int:
        """Useful FLOPs of the forward pass if every row is one segment."""
        t, s = self.num_queries, self.num_keys
        seen = sum(min(i + 1, s) for i in range(t)) if self.causal else t * s
        return 2 * self.batch * self.num_heads * seen * (self.head_dim + self.value_dim)

    @property
    def bytes_moved(self) -> int:
        """Bytes of q, k, v and the result, each once."""
        width = 4 if self.dtype == "float32" else 2
        per_head = self.head_dim + self.value_dim
        queries = self.num_queries * self.num_heads * per_head
        keys = self.num_keys * self.num_kv_heads * per_head
        return width * self.batch * (queries + keys)


def make_case(
    t: int,
    s: int,
    n: int,
    k: int,
    h: int,
    v: int,
    *,
    hardware: Hardware,
    batch: int = 1,
    dtype: DType = "bfloat16",
    causal: bool = True,
    segments: Segments = "none",
    max_segments: int = 1,
) -> AttentionCase:
    """The case of T, S, N, K, H, V: one causal bfloat16 row without segments, unless said."""
    return AttentionCase(
        batch=batch,
        num_queries=t,
        num_keys=s,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        value_dim=v,
        dtype=dtype,
        causal=causal,
        segments=segments,
        hardware=hardware,
        max_segments=max_segments,
    )


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences of a result or gradient from the float32 reference.

    Rows are not compared by their direction: the gradient of a query that sees one key is 0.

    Attributes:
        total: `accuracy.cosine_difference` of the whole array.
        largest: of one element, over the root mean square of the reference or, where that is
            more, a sixth of the element.
    """

    total: float
    largest: float


# float32 differs by the order of its sums only. In the others the operands are exact, but the
# weights, their gradient, the result and what leaves it are each rounded: up to four roundings of
# at most 2^-8 (bfloat16) of an element, which is mostly under six times the root mean square; the
# gradients of a causal row's first keys, which every query sees, are measured against themselves.
# float16 rounds 8 times finer, and the total is in squares.
TOLERANCES: dict[DType, Tolerance] = {
    "float32": Tolerance(total=1e-12, largest=2e-5),
    "bfloat16": Tolerance(total=1e-5, largest=0.1),
    "float16": Tolerance(total=2e-7, largest=0.0125),
}

# (B, T, S, N, K, H, V): odd lengths, T over and under S, one head, one key head, 24 channels, MLA.
Sizes = tuple[int, int, int, int, int, int, int]
SIZES: dict[str, Sizes] = {
    "grouped": (2, 37, 37, 4, 2, 32, 32),
    "one key head": (2, 33, 33, 4, 1, 16, 16),
    "one head": (1, 29, 29, 1, 1, 64, 64),
    "24 channels": (2, 31, 31, 2, 2, 24, 24),
    "latent": (1, 41, 41, 2, 2, 192, 128),
    "values wider": (1, 17, 17, 2, 1, 16, 40),
    "odd channels": (1, 13, 13, 2, 1, 13, 11),
    "fewer keys": (2, 37, 21, 2, 1, 16, 16),
    "more keys": (2, 21, 37, 2, 1, 16, 16),
    "one token": (1, 1, 1, 2, 2, 16, 16),
}
# On a card the same kinds at sizes that cross its tiles of 64 to 128 rows.
CARD_SIZES: dict[str, Sizes] = {
    "grouped": (2, 1000, 1000, 8, 2, 128, 128),
    "one key head": (2, 257, 257, 4, 1, 64, 64),
    "one head": (1, 129, 129, 1, 1, 64, 64),
    "24 channels": (2, 191, 191, 4, 4, 24, 24),
    "latent": (1, 577, 577, 4, 4, 192, 128),
    "values wider": (1, 130, 130, 2, 1, 64, 128),
    "odd channels": (1, 63, 63, 2, 1, 13, 11),
    "fewer keys": (2, 300, 193, 4, 2, 64, 64),
    "more keys": (2, 193, 300, 4, 2, 64, 64),
    "one token": (1, 1, 1, 2, 2, 64, 64),
    "widest": (1, 200, 200, 2, 2, 256, 256),
    "long": (1, 2100, 2100, 4, 2, 64, 64),
}

# (B, T, N, K, H, V): Llama-like, long, MLA of DeepSeek-V3 as one of 8 tensor shards holds it.
BENCH_SIZES: tuple[tuple[int, int, int, int, int, int], ...] = (
    (4, 4096, 32, 8, 128, 128),
    (1, 16384, 32, 8, 128, 128),
    (8, 2048, 32, 8, 128, 128),
    (4, 4096, 16, 16, 192, 128),
)
