"""Arithmetic with known answers on every device of this host: it finds cards that are wrong.

Operands are small integers, so products and sums are exact in every format and in any order: the
answer does not depend on the kernel that the compiler chooses, and a wrong bit shows.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.resources.preflight.check import Check, check

# Rows and columns of the product, by platform; what is not listed is taken for a GPU's.
SIZES = {"cpu": 256}
GPU_SIZE = 4096
# Entries up to 4 and 4096 products keep every sum within 2^16: exact in float32's 24 bits, as the
# operands are in the 8 bits of bfloat16 and the 11 of TF32.
LARGEST = 4
FORMATS = ("float32", "bfloat16")


class Burned(NamedTuple):
    """What came of the burn-in of one device.

    Attributes:
        device: as JAX names it.
        kind: the maker's name.
        rounds: products computed.
        wrong: entries of them that were not the known answer.
    """

    device: str
    kind: str
    rounds: int
    wrong: int


def burn_in(*, seconds: float | int, seed: int = 0) -> tuple[Burned, ...]:
    """Return what each device of this process made of products whose answers are known.

    Every format is tried once on every device, and again until the seconds have passed; devices
    work at the same time, as they do in a run.
    """
    devices = jax.local_devices()
    size = SIZES.get(devices[0].platform, GPU_SIZE)
    draw = np.random.default_rng(seed).integers(-LARGEST, LARGEST + 1, size=(2, size, size))
    left, right = (part.astype(np.float32) for part in draw)
    answer = left @ right
    count = wrong_entries()
    there = [tuple(jax.device_put(a, device) for a in (left, right, answer)) for device in devices]
    ends_s, rounds = time.monotonic() + seconds, 0
    wrong = [0] * len(devices)
    while not rounds or time.monotonic() < ends_s:
        found = [count(*operands) for operands in there]
        wrong = [before + int(now) for before, now in zip(wrong, found, strict=True)]
        rounds += len(FORMATS)
    return tuple(
        Burned(str(device), device.device_kind, rounds, bad)
        for device, bad in zip(devices, wrong, strict=True)
    )


def wrong_entries() -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return the compiled count of entries that differ from the answer, over all formats."""

    @jax.jit
    def count(left: jax.Array, right: jax.Array, answer: jax.Array) -> jax.Array:
        wrong = jnp.int32(0)
        for name in FORMATS:
            product = jnp.matmul(
                left.astype(name), right.astype(name), preferred_element_type=jnp.float32
            )
            wrong += (product != answer).sum(dtype=jnp.int32)
        return wrong

    return count


def check_burned(burned: Sequence[Burned]) -> tuple[Check, ...]:
    """Name each device that computed what it should not; one verdict when none did."""
    rule = "none, the answers are known"
    bad = [b for b in burned if b.wrong]
    if not bad:
        kinds = ", ".join(sorted({b.kind for b in burned}))
        told = f"0 wrong entries in {burned[0].rounds} products on each of {len(burned)} ({kinds})"
        return (check("arithmetic", "ok", told, threshold=rule, remedy=""),)
    return tuple(
        check(
            f"arithmetic of {one.device}",
            "fail",
            f"{one.wrong} wrong entries in {one.rounds} products",
            threshold=rule,
            remedy="take the card out of the job and have it tested (dcgmi diag -r 3)",
        )
        for one in bad
    )
