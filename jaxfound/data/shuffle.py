"""A shuffled order that is computed, not stored: any entry in constant time and memory."""

import numpy as np

# Four mix well in theory (Luby and Rackoff, 1988); more cost little and help very small sizes.
NUM_ROUNDS = 8
MASK_64 = (1 << 64) - 1


def permute(index: np.ndarray, *, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Return where each `index` goes in the permutation of 0 … size-1 that (seed, epoch) names.

    A Feistel network on the next even number of bits is a bijection of that range; walking its
    cycle until the value is below `size` makes it one of 0 … size-1 (Black and Rogaway, 2002).
    The range is less than four times `size`, so a walk takes fewer than four steps on average.

    Args:
        index: 0 … size-1, int64 [n].
        size: length of the permutation.
        seed: of the run.
        epoch: which permutation each index is looked up in, int64 [n].

    Raises:
        ValueError: if an index is outside 0 … size-1.
    """
    if size < 1 or (index.size and (index.min() < 0 or index.max() >= size)):
        raise ValueError(f"an index is outside 0…{size - 1}, the range that is permuted")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    key = _mix(epoch.astype(np.uint64) ^ np.uint64(_scramble(seed)))
    value = _feistel(index.astype(np.uint64), key, half_bits)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], key[outside], half_bits)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, key: np.ndarray, half_bits: int) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for round_number in range(NUM_ROUNDS):
        round_key = key + np.uint64(_scramble(round_number))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << bits) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits of each value (splitmix64's finaliser; arithmetic wraps)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _scramble(number: int) -> int:
    """Return a 64-bit constant far from those of neighbouring numbers (golden-ratio steps)."""
    return ((number + 1) * 0x9E3779B97F4A7C15) & MASK_64
