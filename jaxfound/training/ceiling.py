"""What a bare matrix product reaches on this device now: the ceiling of a step's FLOP/s."""

import statistics
import time

import jax
import jax.numpy as jnp

# M = N = K of the product; a processor would take minutes for the larger one.
SIZE, CPU_SIZE = 8192, 1024
ROUNDS, ROUND_S = 3, 0.5


def ceiling_size() -> int:
    """Return M = N = K of the product on this device."""
    return CPU_SIZE if jax.default_backend() == "cpu" else SIZE


def bare_product(*, rounds: int = ROUNDS, round_s: float = ROUND_S) -> tuple[float, ...]:
    """Return the FLOP/s of a bfloat16 product of random numbers, back to back, a figure a round.

    Rounds are long enough for the clock to settle where the card's power allows, as in training:
    a short burst is faster. Zeros or ones would take less power and read higher.

    Args:
        rounds: how many figures.
        round_s: seconds of one round, about.
    """
    size = ceiling_size()
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(jnp.matmul).lower(left, right).compile()

    def seconds(calls: int) -> float:
        began_s = time.perf_counter()
        jax.block_until_ready([product(left, right) for _ in range(calls)][-1])
        return time.perf_counter() - began_s

    seconds(1)
    calls = max(1, round(round_s / seconds(1)))
    return tuple(2 * size**3 * calls / seconds(calls) for _ in range(rounds))


def median_flops(rounds: tuple[float, ...]) -> float | None:
    """Return the median of a ceiling's rounds; None where it was not measured."""
    return statistics.median(rounds) if rounds else None
